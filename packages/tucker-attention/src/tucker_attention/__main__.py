"""``python -m tucker_attention``, for launchers that start modules."""

from tucker_attention.cli import main

main()
