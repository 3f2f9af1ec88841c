"""``python -m pronk``: the command line."""

from pronk.commands.main import main

if __name__ == "__main__":
    main()
