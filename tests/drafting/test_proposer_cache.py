"""The cache of proposers: evictions, the models that they free, and errors for objects that are no
drafter.
"""

import gc
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from checkpoints import MakeCheckpoint
from drafting.from_draft.drafts import write_checkpoint
from pronk import (
    LLM,
    DraftModel,
    Merged,
    OptionError,
    PromptLookup,
    SamplingParams,
    Suffix,
    Threshold,
)
from pronk.drafting import Drafter, Proposer, Target, make_drafter
from pronk.drafting.autoregressive import Autoregressive
from pronk.drafting.proposer_cache import ProposerCache
from pronk.drafting.registry import DRAFTERS
from tiny_models import make_engine, tiny_decoder, tiny_module
from waiting import HUNG, eventually

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture
def folders(checkpoint: MakeCheckpoint, tmp_path: Path) -> list[str]:
    """Return folders of draft models for the target of :func:`llm`, all equal but for their
    paths.
    """
    made = checkpoint("llama", num_hidden_layers=1, seed=5)
    return [shutil.copytree(made, tmp_path / str(number)).as_posix() for number in range(8)]


@pytest.fixture
def llm(checkpoint: MakeCheckpoint) -> LLM:
    return LLM(checkpoint("llama"), drafter="autoregressive", kv_memory="4MB", budget="all")


@pytest.fixture
def target() -> Target:
    return make_engine(tiny_decoder()).target


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Without the garbage collector, only reference counts free a model."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_four_draft_models_stay_and_the_target_keeps_its_memory(
    llm: LLM, folders: list[str]
) -> None:
    blocks = []
    for folder in folders:
        assert llm.generate("def", PARAMS, drafter=DraftModel(folder)).stats.drafted > 0
        blocks.append(llm.engine.cache.allocator.num_blocks)
    assert len(llm.target.loaded_models) == 4
    assert blocks[4] == blocks[-1] > 0.4 * blocks[0]
    again = llm.get_proposer(DraftModel(folders[5]))  # used recently
    for folder in (folders[1], folders[0], folders[2]):
        llm.get_proposer(DraftModel(folder))
    assert llm.get_proposer(DraftModel(folders[5])) is again


@pytest.mark.usefixtures("without_collector")
def test_a_referenced_proposer_keeps_its_model(llm: LLM, folders: list[str]) -> None:
    held = llm.get_proposer(DraftModel(folders[0]))
    for folder in folders[1:]:
        llm.get_proposer(DraftModel(folder))
    assert len(llm.target.loaded_models) == 5
    assert llm.generate("def", PARAMS, drafter=held).stats.drafted > 0
    assert llm.get_proposer(DraftModel(folders[0])).models == held.models
    del held
    assert len(llm.target.loaded_models) == 4


def test_proposers_without_models_evict_none_with_a_model(llm: LLM, folders: list[str]) -> None:
    held = llm.get_proposer(DraftModel(folders[0]))
    first = llm.get_proposer(Suffix(num_nodes=1))
    for num_nodes in range(2, 65):
        llm.get_proposer(Suffix(num_nodes=num_nodes))
    # one of 64, and now the most recently used
    assert llm.get_proposer(Suffix(num_nodes=1)) is first
    for num_nodes in range(65, 129):
        llm.get_proposer(Suffix(num_nodes=num_nodes))
    assert llm.get_proposer(Suffix(num_nodes=1)) is not first
    assert llm.get_proposer(DraftModel(folders[0])) is held


@pytest.mark.parametrize("drafter", ["suffix", "draft_model"])
def test_the_default_drafter_is_never_evicted(
    drafter: str, checkpoint: MakeCheckpoint, folders: list[str]
) -> None:
    given = Suffix() if drafter == "suffix" else DraftModel(folders[0])
    llm = LLM(checkpoint("llama"), drafter=given)
    own = llm.get_proposer()
    for num_nodes in range(1, 80):
        llm.get_proposer(Suffix(num_nodes=num_nodes, store_tokens=0))
    for folder in folders[1:]:
        llm.get_proposer(DraftModel(folder))
    assert llm.get_proposer() is llm.get_proposer(given) is own


@pytest.mark.parametrize(
    "kind",
    ["{}", "threshold({})", "merged(prompt_lookup, {})"],
    ids=["draft_model", "threshold", "merged"],
)
def test_a_rewritten_folder_is_loaded_again(kind: str, target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    write_checkpoint(folder, tiny_module(), noise=0.1)
    drafter = make_drafter(kind.format(f"draft_model(model={str(folder)!r})"))
    proposers = ProposerCache(target, drafter)
    other = ProposerCache(target, Autoregressive())
    old = other.get_proposer(drafter)
    assert other.get_proposer(drafter) is old
    write_checkpoint(folder, tiny_module(), noise=0.2)
    # another time even on file systems with coarse clocks
    os.utime(folder / "model.safetensors", ns=(1, 2**60))
    new = other.get_proposer(drafter)
    assert new is not old
    assert new.models != old.models
    assert other.get_proposer(drafter) is new
    # The default proposer keeps the weights that it was loaded with; its options load the new ones.
    assert proposers.default.models == old.models
    assert proposers.get_proposer(drafter).models == new.models
    shutil.rmtree(folder)
    assert other.get_proposer(drafter) is new


@pytest.mark.parametrize(
    "name", [name for name in DRAFTERS if name not in ("eagle3", "mtp", "gemma4_assistant")]
)
def test_proposers_list_their_models(name: str) -> None:
    # pronk-tiny, which has a trained drafter of every other kind
    llm = LLM(drafter="autoregressive")
    proposer = llm.get_proposer(name)
    assert {*map(id, proposer.models)} == {*map(id, llm.target.loaded_models)}
    assert all(map(llm.target.loaded_models.is_current, proposer.models))


@dataclass(frozen=True)
class Slow(Drafter):
    """A drafter whose ``bind`` waits until the test sets ``go``."""

    name = "slow"
    begun: threading.Event = field(default_factory=threading.Event, compare=False)
    go: threading.Event = field(default_factory=threading.Event, compare=False)
    ended: list[bool] = field(default_factory=list, compare=False)

    def bind(self, target: Target) -> Proposer[Any]:
        self.begun.set()
        self.ended.append(self.go.wait(HUNG))
        return Suffix().bind(target)


def test_other_requests_and_drafters_go_on_while_a_drafter_is_bound(llm: LLM) -> None:
    slow = Slow()
    llm.get_proposer("suffix")
    with ThreadPoolExecutor(1) as pool:
        binding = pool.submit(llm.get_proposer, slow)
        assert slow.begun.wait(HUNG)
        assert len(llm.generate("def", PARAMS).token_ids) == 12
        assert len(llm.generate("def", PARAMS, drafter="suffix").token_ids) == 12
        slow.go.set()
        assert binding.result() is llm.get_proposer(slow)
    assert slow.ended == [True]


def test_threads_that_bind_one_drafter_get_one_proposer(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow()
    looked_up = set[int]()
    get_current = ProposerCache._get_current

    def observed(*given: Any) -> Proposer[Any] | None:
        found = get_current(*given)
        looked_up.add(threading.get_ident())
        return found

    monkeypatch.setattr(ProposerCache, "_get_current", observed)
    with ThreadPoolExecutor(4) as pool:
        binding = [pool.submit(llm.get_proposer, slow) for _ in range(4)]
        assert eventually(lambda: len(looked_up) == 4), "each thread has found no proposer"
        slow.go.set()
        assert len({id(each.result()) for each in binding}) == 1
    assert len(slow.ended) == 1


def test_a_draft_model_is_added_between_steps(llm: LLM, folders: list[str]) -> None:
    """The draft model's KV cache takes blocks of the target's, so loading waits for the lock of the
    steps.
    """
    want = llm.generate("def", PARAMS).token_ids
    blocks = llm.engine.cache.allocator.num_blocks
    lock = llm.engine.lock
    waits = threading.Event()

    class ObservedLock:
        def __enter__(self) -> None:
            waits.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    object.__setattr__(llm.target, "lock", ObservedLock())  # the class is frozen
    with ThreadPoolExecutor(1) as pool:
        with lock:
            adding = pool.submit(llm.get_proposer, DraftModel(folders[0]))
            assert waits.wait(HUNG)
            assert not adding.done()
            assert llm.engine.cache.allocator.num_blocks == blocks
        proposer = adding.result()
    assert llm.engine.cache.allocator.num_blocks < blocks
    assert llm.generate("def", PARAMS, drafter=proposer).token_ids == want


@dataclass
class Changing(Drafter):
    """Compares equal by its fields, and so is not hashable."""

    name = "changing"
    places: list[int] = field(default_factory=list)

    def bind(self, target: Target) -> Proposer[Any]:
        return Suffix().bind(target)


@dataclass(frozen=True)
class Frozen(Drafter):
    """Hashable but for its list."""

    name = "frozen"
    places: list[int] = field(default_factory=list)

    def bind(self, target: Target) -> Proposer[Any]:
        return Suffix().bind(target)


class Returns(Drafter):
    """Returns a given object instead of a proposer."""

    name = "returns"

    def __init__(self, made: object) -> None:
        self.made = made

    def bind(self, target: Target) -> Any:
        return self.made


class ReturnsChains(Returns):
    """A drafter of chains that returns a given object instead of a proposer."""

    name = "returns_chains"

    def as_chains(self) -> Drafter:
        return self


class Unbindable(Autoregressive):
    """A proposer that fails to bind."""

    def bind(self, target: Target) -> Any:
        return None


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (5, "drafter: expected a name or a drafter, found 5"),
        ([], r"expected a name or a drafter, found \[\]"),
        (["a\nb"] * 99, r"expected a name or a drafter, found \['a"),
        (Suffix, r"expected a name or a drafter, found the class Suffix; write .*Suffix\(\)"),
        (
            Changing(),
            "drafter changing: expected hashable options, found an unhashable type: 'Changing'",
        ),
        (Frozen(), "drafter frozen: expected hashable options, found an unhashable type: 'list'"),
        (Merged((Changing(), PromptLookup())), "drafter merged: expected hashable options"),
        (Returns(None), r"drafter returns: expected bind\(\) to return a Proposer, found NoneType"),
        (
            Returns(Suffix()),
            r"drafter returns: expected bind\(\) to return a Proposer, found Suffix",
        ),
        (
            Returns(Autoregressive),
            r"drafter returns: expected bind\(\) to return a Proposer, found ABCMeta",
        ),
        (
            Merged((PromptLookup(), Returns(None))),
            r"drafter returns: expected bind\(\) to return a Proposer, found NoneType",
        ),
        (
            Threshold((ReturnsChains(None),)),
            "drafter returns_chains: expected bind.. to return a Proposer, found NoneType",
        ),
        (
            Threshold((ReturnsChains(PromptLookup()),)),
            (
                r"drafter prompt_lookup: expected bind\(\) to return a proposer with a method "
                r"chains, "
                r"found PromptLookup"
            ),
        ),
        (
            Unbindable(),
            r"drafter autoregressive: expected bind\(\) to return a Proposer, found NoneType",
        ),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else type(value).__name__,
)
def test_objects_that_are_no_drafter_are_refused(drafter: Any, message: str) -> None:
    llm = LLM()
    for ask in (
        llm.get_proposer,
        lambda drafter: llm.generate("x", drafter=drafter),
        lambda drafter: LLM(drafter=drafter),
    ):
        with pytest.raises(OptionError, match=message) as caught:
            ask(drafter)
        assert "\n" not in str(caught.value)
