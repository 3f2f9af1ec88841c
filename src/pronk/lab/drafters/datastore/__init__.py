"""Datastores of the drafter ``retrieval``: files with a corpus' token ids and its suffix array."""
