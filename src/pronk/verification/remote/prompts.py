"""Prompts for a server: texts of different lengths, and texts that no server has seen before."""

from __future__ import annotations

from collections.abc import Mapping

# Texts by name. Their lengths differ, so that the requests of a batch are at different positions.
TEXTS: Mapping[str, str] = {
    "sentence": "The three most important inventions of the nineteenth century were",
    "code": 'def fibonacci(n: int) -> list[int]:\n    """Return the first n Fibonacci numbers."""\n',
    "question": (
        "A shop sells apples for 40 cents and pears for 65 cents each. Tom buys five apples and four pears, and pays "
        "with a ten-euro note. How much change does he get? Explain each step of the calculation.\n\nAnswer: First,"
    ),
    "story": (
        "Write the next paragraph of this story.\n\nThe lighthouse had been dark for eleven years when Mara rowed out "
        "to it with a can of oil, a box of matches and her grandmother's logbook. The stairs were wet. On the third "
        "landing she found a chair, a lamp, and a cup of tea that was still warm.\n\nShe looked around, and"
    ),
}
# Texts of requests that only fill a batch, each with its number of tokens, relative to that of the compared requests.
FILLERS: tuple[tuple[str, float], ...] = (
    ("List the planets.", 0.1),
    ("Once upon a time, in a village at the edge of a forest,", 0.3),
    ("import numpy as np\n\n", 0.6),
    ("Translate into French: The weather is fine today, and we are going to the sea. Then explain the grammar.", 0.9),
)
_PARAGRAPH = (
    "The committee met in the old library to discuss the plans for the harbour. The engineer explained that the "
    "northern pier would have to be rebuilt within two years, because its piles were rotten below the water. The mayor "
    "asked for the costs. A fisherman remembered the storm of 1953, which had torn away the lamp and half of the wall. "
)
# Parts of a text that begins with a number of its own: ``{nonce}`` is random, so that no prefix is in any cache. The
# two endings share a prefix of several hundred tokens.
NEVER_SEEN = (
    "Record {nonce}. " + _PARAGRAPH * 4,
    ("Question: what did the engineer explain?", "Question: which storm did the fisherman remember?"),
)
