"""What to do for a model, some texts and a machine: measured for a few minutes, and said."""
