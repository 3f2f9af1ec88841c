"""Command-line commands of this package: training and quantization."""

from pronk.base.guests import Command

QUANTIZE = Command(
    "pronk.train.cli.quantize:quantize", "Write a checkpoint with 4-bit or 8-bit weights."
)
TRAIN = Command("pronk.train.cli.main:app", "Train language models and drafters.")
