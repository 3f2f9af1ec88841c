"""The laboratory: drafters of papers, benchmarks, explanations of steps, and verification."""
