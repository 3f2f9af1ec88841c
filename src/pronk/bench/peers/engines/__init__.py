"""What runs inside a peer's worker process: one file per engine.

Nothing here imports the rest of pronk, so that a worker also starts in an environment that pronk is not part of.
"""
