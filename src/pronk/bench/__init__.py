"""Measuring: definitions, task suites, reports, peers."""
