"""Drafters of papers, one module per method; docs/methods describes the methods."""
