"""Drafters of papers, by the names of their methods; docs/methods describes them."""
