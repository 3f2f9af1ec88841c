"""Digests of models' outputs with portable bits; needs pronk alone, neither torch nor transformers.

    python tests/model_digests.py MODEL ...

prints one JSON object: the digests of each model, by its path.
"""

import json
import sys
from contextlib import closing
from pathlib import Path

from pronk import LLM, reproducibility


def digests(path: Path, kernels: str = "auto") -> dict[str, str]:
    """Return the digests of a model's outputs with an instruction set."""
    llm = LLM(path, dtype="float32", kv_memory="64MiB", kernels=kernels, bits="portable")
    with closing(llm):
        return reproducibility.digests(llm)


def main() -> None:
    """Run the command."""
    found = {path: digests(Path(path)) for path in sys.argv[1:]}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
