"""Hostile and damaged files of the lab's drafters either load, or are refused; see the engine's
test of model files.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mutations
from checkpoints import VOCAB, make_checkpoint
from loading_worker import Request
from models.test_hostile_files import (
    MODELS,
    THIS,
    Case,
    Loader,
    check,
    check_undamaged,
    read,
    sample,
)
from pronk.lab.drafters.datastore.builder import write_datastore
from pronk.text.tokenizer import Tokenizer

Bases = dict[str, Path]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """Return a model and a datastore for it."""
    root = tmp_path_factory.mktemp("bases")
    model = make_checkpoint(root / "llama", "llama")
    store = root / "datastore"
    store.mkdir()
    documents = [[1, 2, 3, 4, 2, 1] * 4, [*range(20)] * 2]
    write_datastore(
        store, documents, vocabulary=Tokenizer.load(model).fingerprint, vocab_size=VOCAB
    )
    return {"llama": model, "datastore": store}


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    """A worker process for all cases, which takes a second to start."""
    made = Loader(tmp_path_factory.mktemp("loader") / "worker")
    yield made
    made.close()


def drafter_cases(bases: Bases) -> Iterator[Case]:
    del bases  # the drafters are those of pronk-tiny
    for name in ("glide", "kangaroo", "medusa", "multi-token"):
        base = MODELS / f"pronk-tiny-{name}"
        request = Request("pronk-tiny", drafter=f"{name.replace('-', '_')}(model='{THIS}')")
        document = read(base / "drafter.json")
        shown = {key: value for key, value in document.items() if key not in ("figures", "command")}
        for mutation in (*mutations.json_values(shown), *mutations.json_texts(shown)):
            yield Case("drafter", base, "drafter.json", mutation, request)
        for mutation in mutations.safetensors_files((base / "model.safetensors").read_bytes()):
            yield Case("drafter weights", base, "model.safetensors", mutation, request)


def datastore_cases(bases: Bases) -> Iterator[Case]:
    model = str(bases["llama"])
    request = Request(model, drafter=f"retrieval(datastore='{THIS}')")
    base = bases["datastore"]
    document = read(base / "datastore.json")
    for mutation in (*mutations.json_values(document), *mutations.json_texts(document)):
        yield Case("datastore", base, "datastore.json", mutation, request)
    for file in ("tokens.bin", "suffixes.bin"):
        for mutation in mutations.binary_files((base / file).read_bytes()):
            yield Case("datastore data", base, file, mutation, request)


KINDS: dict[str, Callable[[Bases], Iterator[Case]]] = {
    "drafter": drafter_cases,
    "datastore": datastore_cases,
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_files_load_or_are_refused(bases: Bases, loader: Loader, kind: str) -> None:
    cases = sample(KINDS[kind](bases), 8)
    check_undamaged(cases, loader)
    check(cases, loader)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_files_load_or_are_refused(bases: Bases, loader: Loader, kind: str) -> None:
    check(sample(KINDS[kind](bases), 1000), loader)
