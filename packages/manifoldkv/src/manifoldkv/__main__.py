"""``python -m manifoldkv``, for launchers that start modules."""

from manifoldkv.cli import main

main()
