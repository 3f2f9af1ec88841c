"""Models by name: short names, the Hugging Face Hub, its cache, and models of a clone."""
