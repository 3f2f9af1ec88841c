"""GLIDE beside a target: the draft model's logits, which depend on the target's KV cache."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from drafting.drafting import assert_no_blocks, bound, decode, watch_draft, watched
from drafting.helpers import within
from lab.drafters.trained_glide import PROMPTS, DenseGlide, glide_folder, spec
from pronk.base.arrays import Array
from pronk.base.errors import CheckpointError, OptionError
from pronk.drafting import DraftContext, Proposer, make_drafter
from pronk.drafting.from_draft.draft_model import ModelProposer
from pronk.drafting.shared.chain import Chain
from pronk.drafting.shared.draft_cache import DraftCache
from pronk.drafting.shared.draft_runner import DraftRunner
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.lab.drafters.modules.glide import GlideShape
from pronk.sampling.tree import TokenTree
from tiny_models import VOCAB, make_engine, tiny_decoder
from train.tiny_modules import tiny_module

# {0} and {1} stand for the specifications of ``glide`` and ``vanilla``.
KINDS = {
    "glide": "{0}",
    "vanilla": "{1}",
    "threshold": "threshold({0})",
    "cape": "cape({0})",
    "staged": "staged({0}, prompt_lookup(min_ngram=1))",
    "smaller": "staged({1}, {0})",
    "beam": "beam({0}, width=3)",
}
LONG = [
    random.Random(seed).choices(range(VOCAB), k=length) for seed, length in enumerate((60, 5, 530))
]


def model_of(drafter: Any) -> DraftRunner:
    return within(drafter, ModelProposer)[0].draft


@dataclass
class DraftRow:
    """A row of the draft: its text, the range ``oldest .. verified - 1`` in the target's cache,
    and its logits.
    """

    text: list[int]
    verified: int
    oldest: int
    logits: Array


def record_rows(draft: DraftRunner) -> list[DraftRow]:
    """Record all rows that the draft computes from now on."""
    notes = list[DraftRow]()
    feed = draft.forward_tokens
    branch = draft.forward_trees
    grow = draft.draft_chain

    def note(context: DraftContext[DraftCache], text: list[int], logits: Array) -> None:
        table = context.block_table
        notes.append(DraftRow(text, table.length, table.num_released * 16, logits.copy()))

    def fed(
        contexts: Sequence[DraftContext[DraftCache]], tokens: Sequence[Sequence[int]]
    ) -> list[Array]:
        rows = feed(contexts, tokens)
        for context, row in zip(contexts, rows, strict=True):
            note(context, list(context.state.tokens), row)
        return rows

    def branched(
        contexts: Sequence[DraftContext[DraftCache]],
        trees: Sequence[TokenTree],
        leads: Sequence[Sequence[int]],
    ) -> list[Array]:
        rows = branch(contexts, trees, leads)
        for context, tree, new in zip(contexts, trees, rows, strict=True):
            for node, row in zip(range(len(tree) - len(new), len(tree)), new, strict=True):
                path = [tree.tokens[i] for i in tree.path(node)]
                note(context, [*context.state.tokens, tree.tokens[0], *path], row)
        return rows

    def grown(chain: Chain) -> None:
        assert chain.context.params.greedy, "with noise the scores are no logits"
        text = list(chain.context.tokens)
        grow(chain)
        for number, drafted in enumerate(chain.draft_tokens):
            note(chain.context, text + chain.tokens[:number], drafted.scores)

    # type: ignore[method-assign]
    draft.forward_tokens = fed
    draft.forward_trees = branched
    draft.draft_chain = grown
    return notes


def assert_right(notes: Sequence[DraftRow], dense: DenseGlide) -> None:
    for each in random.Random(0).sample(notes, min(len(notes), 60)):
        want = dense(each.text, each.verified, each.oldest)
        assert np.allclose(each.logits, want, rtol=1e-4, atol=1e-4)


def serve(
    engine: Engine, drafter: Proposer[Any], prompts: Sequence[Sequence[int]], **options: Any
) -> list[Request]:
    """Decode the prompts in one batch, with draft tokens for all requests; the texts must equal
    plain decoding.
    """
    made = decode(engine, drafter, prompts, **options)
    assert all(request.stats.drafted for request in made)
    return made


@pytest.mark.few(1)
@pytest.mark.parametrize("layers", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", ["glide", "vanilla", "beam", "smaller"])
def test_logits_equal_the_dense_module_with_a_delayed_cache(name: str, layers: int) -> None:
    """The draft's cache is right after accepted and rejected draft tokens, its own or those of
    ``staged``.
    """
    kind = "vanilla" if name == "vanilla" else "glide"
    folder = glide_folder(layers=layers, cross=kind == "glide")
    own = f"{kind}(model={folder!r}, num_tokens=4)"
    wrapped = {"beam": f"beam({own}, width=2)", "smaller": f"staged({spec('vanilla')}, {own})"}
    engine = make_engine(tiny_decoder())
    drafter = bound(wrapped.get(name, own), engine)
    notes = record_rows(within(drafter, ModelProposer)[-1].draft)
    made = serve(engine, drafter, [*PROMPTS, *LONG], max_tokens=16)
    assert_right(notes, DenseGlide(folder, tiny_module(), layers, cross=kind == "glide"))
    delays = {len(each.text) - each.verified for each in notes}
    assert {1, 2, 3, 4} <= delays
    assert sum(request.stats.accepted for request in made) > 0


@pytest.mark.parametrize(
    "windows", [pytest.param((12, 12), marks=pytest.mark.slow), (None, 12), (12, None)], ids=str
)
def test_sliding_windows(windows: tuple[int | None, ...]) -> None:
    """Most tokens of the long prompts are outside the windows, so some rows may attend to no
    token.
    """
    folder = glide_folder(windows=windows)
    engine = make_engine(tiny_decoder(windows=windows), prefill_chunk=32)
    drafter = bound(f"glide(model={folder!r}, num_tokens=6)", engine)
    notes = record_rows(model_of(drafter))
    made = serve(engine, drafter, [*PROMPTS, *LONG], max_tokens=20)
    assert_right(notes, DenseGlide(folder, tiny_module(windows=windows)))
    assert any(each.oldest > 0 for each in notes) == (windows == (12, 12))
    assert sum(request.stats.accepted for request in made) > 0
    assert_no_blocks(drafter)


@pytest.mark.few(1)
@pytest.mark.parametrize("number", range(3))
def test_released_blocks_are_not_read(number: int) -> None:
    """The draft reads a prompt after the target has released its first blocks, which other
    requests may use.
    """
    windows = (12, 12)
    folder = glide_folder(layers=2, windows=windows)
    engine = make_engine(tiny_decoder(windows=windows), prefill_chunk=32)
    drafter = bound(f"glide(model={folder!r}, num_tokens=1)", engine)
    notes = record_rows(model_of(drafter))
    serve(engine, drafter, LONG[number : number + 1], max_tokens=3)
    dense = DenseGlide(folder, tiny_module(windows=windows), 2)
    first = [each for each in notes if len(each.text) == len(LONG[number]) + 1]
    assert_right(first, dense)
    assert [each.oldest > 0 for each in first] == [len(LONG[number]) > 30]


def test_learned_positions() -> None:
    target = tiny_decoder(classic=True)
    folder = glide_folder(classic=True)
    engine = make_engine(target)
    drafter = bound(f"glide(model={folder!r}, num_tokens=3)", engine)
    notes = record_rows(model_of(drafter))
    serve(engine, drafter, PROMPTS)
    assert_right(notes, DenseGlide(folder, tiny_module(classic=True)))


@pytest.mark.parametrize("kind", KINDS)
def test_wrappers_keep_the_text_and_the_acceptance(kind: str) -> None:
    engine, drafter = watched(KINDS[kind].format(spec(), spec("vanilla")))
    watch_draft(model_of(drafter.inner))
    requests = decode(engine, drafter, PROMPTS)
    assert sum(request.stats.accepted for request in requests) > 30
    assert_no_blocks(drafter)


def test_only_several_layers_compute_accepted_draft_tokens_again() -> None:
    rows = {}
    for layers in (1, 2):
        engine, drafter = watched(f"glide(model={glide_folder(layers=layers)!r}, num_tokens=4)")
        passes = watch_draft(model_of(drafter.inner))
        (request,) = decode(engine, drafter, PROMPTS[:1])
        assert request.stats.accepted > 8
        texts = [text for each in passes for rows_of_one in each.texts for text in rows_of_one]
        rows[layers] = (len(texts), len(set(texts)))
    assert rows[1][0] == rows[1][1]
    assert rows[2][0] > rows[2][1]


@pytest.mark.parametrize(
    ("kind", "other"),
    [("glide", "vanilla"), ("vanilla", "glide")],
    ids=["vanilla as glide", "glide as vanilla"],
)
def test_folders_of_the_other_kind_are_refused(kind: str, other: str) -> None:
    folder = glide_folder(cross=other == "glide")
    with pytest.raises(
        OptionError, match=f"{kind}: expected a folder of this kind of drafter, found {other}"
    ):
        make_drafter(f"{kind}(model={folder!r})").bind(make_engine(tiny_decoder()).target)


def test_a_target_with_other_heads_is_refused() -> None:
    """The shapes differ. The fingerprint cannot show that here, because the tiny target has no
    files.
    """
    other = make_engine(tiny_decoder(heads=4, kv_heads=4))
    with pytest.raises(
        CheckpointError, match=r"cross_query.weight: expected shape \(64, 32\), found \(96, 32\)"
    ):
        make_drafter(spec()).bind(other.target)


@pytest.mark.parametrize("name", ["glide", "vanilla"])
def test_chains_are_by_default_as_long_as_a_block_in_training(name: str) -> None:
    made: Any = make_drafter(name)
    assert made.num_tokens == GlideShape().block == 5
