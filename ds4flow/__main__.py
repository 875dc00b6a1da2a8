"""`python -m ds4flow` is the `ds4flow` command."""

from ds4flow.cli import main

if __name__ == "__main__":
    main()
