"""The engine: schedules requests, drafts, runs forward passes, and verifies draft tokens."""
