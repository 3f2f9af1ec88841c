"""Drafters that copy from the request's text, from outputs of earlier requests, or from a datastore."""
