"""Stream a text with accepted draft tokens in [brackets], and stop after four lines.

Run it with ``python examples/stream.py``; give a folder or a Hub id to use another model.
"""

from __future__ import annotations

import sys
from contextlib import closing

from pronk import LLM, SamplingParams

PROMPT = "for i in range(3):\n    print(i)\nfor j in range(3):\n"


def main(model: str | None = None) -> None:
    llm = LLM(model)
    lines = 0
    with closing(llm.stream(PROMPT, SamplingParams(max_tokens=120))) as pieces:
        for piece in pieces:
            print(f"[{piece.text}]" if piece.guessed else piece.text, end="", flush=True)
            lines += piece.text.count("\n")
            if lines == 4:
                break  # closing the stream frees the request's memory
    print()


if __name__ == "__main__":
    main(*sys.argv[1:2])
