"""Models by name: short names, the Hugging Face Hub, copies on this machine, pairs with drafters."""
