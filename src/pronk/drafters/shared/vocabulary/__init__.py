"""Between a target and a draft of another vocabulary."""
