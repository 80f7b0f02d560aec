"""`python -m raysim` is `raysim`."""

from raysim.cli import main

if __name__ == "__main__":
    main()
