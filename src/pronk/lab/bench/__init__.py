"""Benchmark of drafters, and of other engines (peers), on a model.

Measurement, metrics, tables, plots and report.
"""
