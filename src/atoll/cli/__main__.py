"""`python -m atoll.cli`: the command line of this interpreter's installation."""

from atoll.cli import main

if __name__ == "__main__":
    main()
