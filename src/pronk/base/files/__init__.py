"""Reading and writing of files: atomic writes, JSON Lines, text, model cards."""
