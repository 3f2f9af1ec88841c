"""Benchmark of drafters and peers on a model: measurement, metrics, tables, report."""
