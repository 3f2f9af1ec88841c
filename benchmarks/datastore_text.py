"""Select redistributable text for pronk-tiny's datastore: Python, arithmetic problems and prose.

    python benchmarks/datastore_text.py FOLDER corpus.jsonl
    pronk datastore build datastore corpus.jsonl

FOLDER is the project's data, with train/ and eval/. Half of the text is the standard library of the
running Python, without files that have a copyright notice of their own. The rest is arithmetic
problems and prose. Text that shares 13 consecutive words with eval/ is left out.
"""

import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from pronk.base.files.json_lines import read_json_lines
from pronk.base.files.results import save_result
from pronk.train.corpus.collection import Exclusion
from pronk.train.corpus.sources import read_python

# Bytes of text per source; a token has about 3.4 bytes.
BYTES = {
    "python": 360_000,
    "openai/grade-school-math": 150_000,
    "mlschmitt/": 100_000,
    "python/peps": 100_000,
}
LONGEST = 6_000
NOTICE = re.compile("copyright|licen[sc]e|all rights", re.IGNORECASE)


def python() -> Iterator[str]:
    """Yield the files of the standard library without a copyright notice of their own."""
    for text, origin, _ in read_python(None):
        if origin.startswith("CPython") and not NOTICE.search(text):
            yield text


def rows(folder: Path, origin: str) -> Iterator[str]:
    """Yield the project's texts of a source, such as ``python/peps``."""
    for name in ("math", "prose"):
        for _, row in read_json_lines(folder / "train" / f"{name}.jsonl.gz"):
            if row["source"].startswith(origin):
                yield row["text"]


def cut(text: str, dice: random.Random) -> str:
    """Return a random part of a text with at most ``LONGEST`` characters, in whole lines if any."""
    start = dice.randrange(max(1, len(text) - LONGEST))
    part = text[start : start + LONGEST]
    if len(text) <= LONGEST:
        return part
    lines = part[part.find("\n") + 1 : part.rfind("\n") + 1]
    return lines or part


def main(folder: Path, out: Path) -> None:
    unwanted = Exclusion.from_files(sorted((folder / "eval").glob("*.jsonl*")))
    dice = random.Random(0)
    chosen = list[dict[str, str]]()
    for origin, limit in BYTES.items():
        texts = list(python() if origin == "python" else rows(folder, origin))
        size = 0
        for text in dice.sample(texts, len(texts)):
            part = cut(text, dice)
            if size < limit and part.strip() and not unwanted(part):
                size += len(part.encode())
                chosen.append({"text": part, "source": origin})
    dice.shuffle(chosen)
    save_result("out", out, "".join(json.dumps(row) + "\n" for row in chosen))
    print(f"{out}: {len(chosen)} texts; standard library: {sysconfig.get_path('stdlib')}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
