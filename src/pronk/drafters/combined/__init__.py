"""Drafters that are made of others."""
