"""Command line: one module per command, which reads the options and shows the results."""
