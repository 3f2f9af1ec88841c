"""The engine: schedule, propose, forward, verify, commit, update."""
