"""Drafters that copy from the request's text or from outputs of earlier requests."""
