"""Sorted texts on disk that ``retrieval`` searches."""
