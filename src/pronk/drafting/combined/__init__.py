"""Drafters that combine other drafters."""
