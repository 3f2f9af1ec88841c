"""One model on several workers: the branches of a step's trees are dealt to them, and their texts stay the same."""
