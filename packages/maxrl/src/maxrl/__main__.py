"""``python -m maxrl``, for launchers that start modules."""

from maxrl.cli import main

main()
