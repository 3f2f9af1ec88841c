"""Sizes of runs that take a second, and a writer of JSONL files."""

from __future__ import annotations

import json
from pathlib import Path

from pronk.train.options import Shape, TrainOptions

SHAPE = Shape(hidden=32, layers=2, heads=4, kv_heads=2, mlp=48, vocab=320, context=64)
TINY = TrainOptions(
    shape=SHAPE,
    steps=12,
    batch=256,
    micro=128,
    length=32,
    final_length=64,
    final_share=0.25,
    rate=1e-2,
    warmup=2,
    threads=1,
    evaluate_every=6,
    save_every=6,
    log_every=3,
)


def write_jsonl(path: Path, texts: list[str], origin: str = "owner/name@abc:file") -> Path:
    rows = ({"text": text, "source": f"{origin}#{i}", "license": "MIT"} for i, text in enumerate(texts))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
