"""Drafters that copy from the request's text, from earlier outputs, or from a datastore."""
