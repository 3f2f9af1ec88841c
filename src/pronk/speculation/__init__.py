"""Speculation: token trees, interface of drafters, measured costs, and how many tokens to draft."""
