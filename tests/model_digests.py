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
    """Return the digests of a model's outputs with an instruction set.

    A folder may have a file ``llm_options.json`` with further arguments of :class:`pronk.LLM`.
    """
    file = path / "llm_options.json"
    more = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    llm = LLM(path, dtype="float32", kv_memory="64MiB", kernels=kernels, bits="portable", **more)
    with closing(llm):
        return reproducibility.digests(llm)


def main() -> None:
    """Run the command."""
    found = {path: digests(Path(path)) for path in sys.argv[1:]}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
