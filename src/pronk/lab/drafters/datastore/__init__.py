"""Datastores for the drafter ``retrieval``: a corpus as token ids, with its suffix array, on disk."""
