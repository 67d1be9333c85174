"""`python -m dppo`, for launchers that start modules."""

from dppo.cli import main

if __name__ == "__main__":
    main()
