"""A fake Hub with a target model and heads for it, in place of the table of published heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from drafting.from_target.trained_eagle import Form, random_head, write_head
from fake_hub import FakeHub, hub_in_use
from pronk.models.loader import read_config
from pronk.models.pairs import Pair

__all__ = ["HEADS", "TARGET", "head_files", "published_heads"]

TARGET = "owner/Tiny-Llama"  # the original; the fake Hub has the repository TARGET-FP8
HEADS = ("heads/first", "heads/second")
_PAGE = "https://example.org/heads"


def head_files(
    target: Path, folder: Path, *, hidden: int | None = None, **changes: Any
) -> dict[str, bytes]:
    """Return the files of an EAGLE-3 head for the model ``target``, written into ``folder``.

    ``hidden`` is the width of hidden states for which the head is made, by default the target's;
    ``changes`` replace keys of its ``config.json``.
    """
    config = read_config(target)
    size = hidden or config.hidden_size
    form = replace(
        Form(), vocab=config.vocab_size, draft=config.vocab_size, hidden=size, own_head=False
    )
    changes = {"target_hidden_size": None, "speculators_config": {"verifier": {}}} | changes
    write_head(random_head(form, size=size), folder, **changes)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextmanager
def published_heads(
    target: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeHub]:
    """Serve a Hub with ``target`` and two heads for it, and an empty cache, both below ``folder``.

    The table of pairs has these heads only.
    """
    pairs = tuple(Pair(TARGET, "eagle3", head, "MIT", _PAGE) for head in HEADS)
    monkeypatch.setattr("pronk.models.pairs.all_pairs", lambda: pairs)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    with hub_in_use() as hub:
        hub.repos[f"{TARGET}-FP8"] = {path.name: path.read_bytes() for path in target.iterdir()}
        for head in HEADS:
            hub.repos[head] = head_files(target, folder / head)
        yield hub
