"""Benchmark of drafters and of other engines (peers) on a model: measurement, metrics, tables, report."""
