"""Entry point of ``python -m pronk``, which runs the command line."""

from pronk.cli.main import main

if __name__ == "__main__":
    main()
