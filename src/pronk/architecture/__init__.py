"""What a checkpoint says its model is: sizes, families of norms and activations, positions."""
