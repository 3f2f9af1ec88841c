"""Weights of 8 and 4 bits: one form of them, the formats that they come in, and how they are made."""
