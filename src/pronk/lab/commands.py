"""Commands of the command line that measure, explain, verify and build datastores."""

from pronk.base.guests import Command

BENCH = Command(
    "pronk.lab.cli.bench:bench",
    "Measure the gain of speculative decoding on your models and your prompts.",
)
DATASTORE = Command("pronk.lab.cli.datastore:app", "Build datastores for the drafter retrieval.")
EXPLAIN = Command(
    "pronk.lab.cli.explain:explain",
    "Show every step of a generated text: the drafters, their draft tokens and the accepted ones.",
)
VERIFY = Command(
    "pronk.lab.cli.verify:verify",
    "Verify that speculative decoding does not change the output of the model.",
)
