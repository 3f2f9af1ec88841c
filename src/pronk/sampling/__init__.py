"""Which token comes next: options, noise, the rules of acceptance, the walk along a tree."""
