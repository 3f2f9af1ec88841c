"""Speculation: token trees, interface of drafters, measured costs, decision how many tokens to draft."""
