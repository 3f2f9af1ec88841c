"""A pass of a model over token trees: what it sees, how it runs, what it costs."""
