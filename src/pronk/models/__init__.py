"""The decoder and the loading of checkpoints into it."""
