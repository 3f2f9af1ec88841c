"""Neural modules that are trained on a target, and their files."""
