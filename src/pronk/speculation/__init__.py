"""Speculation: token trees, the interface of drafters, and the draft-length policy."""
