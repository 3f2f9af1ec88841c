"""The decoder and everything that brings a checkpoint into it."""
