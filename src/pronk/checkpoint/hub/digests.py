"""Published digests of known models' outputs, by the SHA-256 of the model's files.

``digests.json`` has one line for each model: what :func:`pronk.reproducibility.digests` returns,
since each value of ``pronk.BITS`` that changed them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import file_digest, sha256
from pathlib import Path

from pronk.checkpoint.hub.names import weight_files

# {BITS: {name of a text: digest}}
DigestHistory = Mapping[str, Mapping[str, str]]


def model_hash(path: Path) -> str:
    """Return the SHA-256 of a model, 64 hexadecimal digits.

    That of a GGUF file is the file's. That of a model in several files, parts of a GGUF model or
    ``config.json`` and ``*.safetensors`` of a folder, is the SHA-256 of what ``sha256sum FILES``
    prints for them in the order of their names.
    """
    files = weight_files(path)
    if path.is_dir():
        files = sorted([path / "config.json", *files])
    hashes = [_file_hash(file) for file in files]
    if len(files) == 1:
        return hashes[0]
    lines = [f"{digest}  {file.name}\n" for digest, file in zip(hashes, files, strict=True)]
    return sha256("".join(lines).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def published_digests(sha256: str) -> DigestHistory:
    """Return the published digests of a model by its :func:`model_hash`, or an empty mapping."""
    rows = json.loads((Path(__file__).parent / "digests.json").read_bytes())
    row = rows.get(sha256, {"digests": {}})
    history: DigestHistory = row["digests"]
    return history


def digests_line(path: Path, sha256: str, bits: int, digests: Mapping[str, str]) -> str:
    """Return the line of ``digests.json`` for a model that has none, without a comma at its end."""
    row = {"file": path.name, "digests": {str(bits): dict(digests)}}
    return f"{json.dumps(sha256)}: {json.dumps(row)}"
