"""The command line: one file per command, which reads options and shows results; the work is elsewhere."""
