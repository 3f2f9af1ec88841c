"""Forward passes over draft trees: jobs, executors and the model runner."""
