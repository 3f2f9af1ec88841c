"""Forward passes over draft trees: attention, executors and the model runner."""
