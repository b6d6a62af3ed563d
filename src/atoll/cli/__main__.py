"""`python -m atoll.cli`: the command line, for who knows a Python and no path."""

from atoll.cli import main

if __name__ == "__main__":
    main()
