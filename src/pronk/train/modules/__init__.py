"""Modules of torch that are trained: language models and drafters."""
