"""Text to train, calibrate and build datastores with: sources, dialogues, and their token ids."""
