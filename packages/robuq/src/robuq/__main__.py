"""``python -m robuq``, for launchers that start modules."""

from robuq.cli import main

main()
