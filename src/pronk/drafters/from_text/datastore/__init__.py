"""Datastores: token ids of a corpus with a suffix array, searched by the drafter ``retrieval``."""
