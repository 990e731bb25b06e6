"""`python -m stenograph.cli` is `steno`."""

from stenograph.cli.main import main

if __name__ == "__main__":
    main()
