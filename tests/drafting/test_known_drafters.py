"""Heads that others publish: ``auto`` uses one that is on this machine and fits the target."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints import MakeCheckpoint
from fake_hub import FakeHub
from gguf_files import convert
from pronk import LLM, SamplingParams
from pronk.checkpoint.hub.model_identity import simplify_name
from pronk.drafting import Auto, KnownDrafter, list_drafters
from pronk.drafting.from_target.eagle3 import Eagle3, Eagle3Proposer, packaged_heads
from pronk.drafting.known_drafters import list_drafters_by_name
from pronk.models.loader import describe_architecture, read_config
from pronk.models.resolve import pull_model
from published_heads import HEADS, TARGET, head_files, published_heads

FIRST, SECOND = HEADS


@pytest.fixture
def model(checkpoint: MakeCheckpoint) -> Path:
    return checkpoint("llama")


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with published_heads(model, tmp_path, monkeypatch) as server:
        yield server


def parts(llm: LLM) -> list[str]:
    """Return the names of the drafters of ``auto``."""
    return [part.name for part in Auto(bundled=False).bind(llm.target).parts]


def heads_in_use(llm: LLM) -> list[str | None]:
    """Return the heads of EAGLE-3 that ``auto`` uses, by the drafter's option ``model``."""
    found = []
    proposers = [*Auto(bundled=False).bind(llm.target).parts]
    for proposer in proposers:
        proposers += proposer.parts
        if isinstance(proposer, Eagle3Proposer):
            found.append(proposer.options.model)
    return found


def test_a_downloaded_head_is_used(hub: FakeHub) -> None:
    """The first listed head that is here is used; the text is that of plain decoding."""
    folder = pull_model(f"{TARGET}-FP8")
    llm = LLM(str(folder), drafter="autoregressive")
    assert "eagle3" not in parts(llm)
    pull_model(SECOND)
    assert heads_in_use(llm) == [SECOND]
    pull_model(FIRST)
    assert heads_in_use(llm) == [FIRST]
    plain = llm.generate("a b c", SamplingParams(max_tokens=12))
    drafted = LLM(str(folder), budget="all").generate("a b c", SamplingParams(max_tokens=12))
    assert drafted.token_ids == plain.token_ids
    assert any(name.startswith("eagle3") for name in drafted.stats.sources)
    hub.requests.clear()
    assert parts(llm)
    assert hub.requests == []


def test_a_head_of_another_size_is_left_out(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    """A wrong head changes nothing: the next listed one is used."""
    wide = 2 * read_config(model).hidden_size
    hub.repos[FIRST] = head_files(model, tmp_path / "wide", hidden=wide)
    llm = LLM(str(pull_model(f"{TARGET}-FP8")), drafter="autoregressive")
    pull_model(FIRST)
    assert "eagle3" not in parts(llm)
    pull_model(SECOND)
    assert heads_in_use(llm) == [SECOND]


def test_a_damaged_head_is_left_out_with_a_warning(hub: FakeHub) -> None:
    hub.repos[FIRST]["model.safetensors"] = b"damaged"
    llm = LLM(str(pull_model(f"{TARGET}-FP8")), drafter="autoregressive")
    pull_model(FIRST)
    with pytest.warns(UserWarning, match="^auto: drafter left out: "):
        assert "eagle3" not in parts(llm)


@pytest.mark.usefixtures("hub")
def test_quantized_files_have_the_heads_of_their_original(model: Path, tmp_path: Path) -> None:
    """A GGUF file is found by its own name, whatever that of the file; a fine-tune is not."""

    def drafters(name: str, file: str) -> list[KnownDrafter]:
        path = tmp_path / file
        convert(model, path, change=lambda writer: writer.add_name(name))
        return list_drafters(path, read_config(path))

    expected = [KnownDrafter("eagle3", head, here=False) for head in HEADS]
    assert drafters("Tiny Llama", "renamed.gguf") == expected
    assert drafters("0a1b", "tiny-llama-q8_0.gguf") == expected
    assert drafters("Tiny Llama Pirate", "pirate.gguf") == []
    assert expected[0].label == f"eagle3: {FIRST}"


def test_packaged_heads_are_found_by_name() -> None:
    """Each head that comes with pronk is listed for the model that it was trained on."""
    assert packaged_heads()
    for folder, target, _ in packaged_heads():
        [known] = [each for each in list_drafters_by_name(simplify_name(target)) if each.here]
        assert known == (Eagle3.name, str(folder), True)
        assert known.label == f"eagle3: {folder.name}"
    assert list_drafters_by_name("another-model") == []


@pytest.mark.usefixtures("hub")
def test_packaged_heads_come_first(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_config(model)
    head = tmp_path / "packaged" / "own"
    trained_on = {"architecture": describe_architecture(config), "weights": "0" * 16}
    verifier = {"name_or_path": TARGET, "architectures": []}
    settings = {"algorithm": "eagle3", "verifier": verifier}
    head_files(model, head, pronk={"target": trained_on}, speculators_config=settings)
    monkeypatch.setattr("pronk.drafting.from_target.eagle3._PACKAGED", head.parent)
    folder = pull_model(f"{TARGET}-FP8")
    pull_model(FIRST)
    found = list_drafters(folder, config)
    assert [each.source for each in found] == [str(head), *HEADS]
    assert [each.here for each in found] == [True, True, False]
