"""The trained parts, and their files."""
