"""Real text at the cost of a large model: the function of a small one in the shapes of a large one."""
