"""Command line of pronk: the commands, and modules that commands share.

Functions import the engine when they run, so that ``--help`` answers at once. Modules with options
have no ``from __future__ import annotations``, because typer reads annotations at run time.
"""
