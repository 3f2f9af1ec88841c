"""Commands of the command line that measure, explain and verify."""

from pronk.guests import Command

BENCH = Command(
    "pronk.lab.cli.bench:bench", "Measure the gain of speculative decoding on your models and your prompts."
)
EXPLAIN = Command(
    "pronk.lab.cli.explain:explain",
    "Show every step of a generated text: the drafters, their draft tokens and the accepted ones.",
)
VERIFY = Command(
    "pronk.lab.cli.verify:verify", "Verify that speculative decoding does not change the output of the model."
)
