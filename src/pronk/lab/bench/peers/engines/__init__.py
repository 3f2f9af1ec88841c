"""Engines that run in a peer's worker process, one file per engine.

These modules do not import the rest of pronk, so that a worker also runs in an environment without
pronk.
"""
