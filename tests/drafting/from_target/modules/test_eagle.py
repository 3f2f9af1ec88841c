"""Heads of every layout, with every flag, against a reference written from the formulas."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from drafting.from_target.trained_eagle import (
    HIDDEN,
    LAYERS,
    Form,
    Reference,
    random_head,
    write_head,
)
from pronk.base.arrays import Array
from pronk.cache.blocks import BlockTable
from pronk.drafting.from_target._eagle_runner import EagleRunner, HeadDraft
from pronk.drafting.from_target.modules.eagle import load_head
from pronk.drafting.proposer import DraftContext
from pronk.drafting.shared.draft_cache import DraftCache
from pronk.engine.engine import Engine
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.sampling.draft_token import DraftLogits
from pronk.sampling.logits_processors import TokenContext
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.sampling.tree import TokenTree
from tiny_models import VOCAB, make_engine, tiny_decoder, tiny_module

WINDOWS = (None,) * LAYERS
TEXT = [(7 * i * i + 3 * i) % VOCAB for i in range(23)]
EAGLE = Form()
MTP = Form("mtp", draft=VOCAB, norm_output=True)
FORMS = {
    "plain": ("speculators", EAGLE),
    "fc_norm": ("speculators", replace(EAGLE, fc_norm=True)),
    "norm_before_fc": ("speculators", replace(EAGLE, norm_before_fc=True)),
    "norm_before_residual": ("speculators", replace(EAGLE, norm_before_residual=True)),
    "norm_output": ("speculators", replace(EAGLE, norm_output=True)),
    "all flags": (
        "eagle",
        replace(EAGLE, fc_norm=True, norm_before_residual=True, norm_output=True),
    ),
    "eagle": ("eagle", EAGLE),
    "other layers": ("eagle", replace(EAGLE, sources=(4, 0, 3, 1))),
    "biases": ("speculators", replace(EAGLE, bias=True)),
    "head norms": ("speculators", replace(EAGLE, qk_norm=True)),
    "own sizes": (
        "speculators",
        replace(EAGLE, hidden=96, own_embedding=True, head_dim=32, heads=2, kv_heads=1),
    ),
    "borrowed": ("speculators", replace(EAGLE, own_head=False, draft=VOCAB)),
    "ordinary layers": ("speculators", replace(EAGLE, layers=3)),
    "deepspec": (
        "deepspec",
        replace(
            EAGLE,
            sources=(0, 2, 4),
            qk_norm=True,
            layers=2,
            wide=2,
            draft=VOCAB,
            own_embedding=True,
        ),
    ),
    "mtp": ("mtp", replace(MTP, own_head=False)),
    "mimo": (
        "mimo",
        replace(MTP, own_head=False, bias=True, embedding_first=False, zero_first=True),
    ),
    "deepseek": ("deepseek", replace(MTP, norm_output=False)),
    "qwen": ("qwen", replace(MTP, own_head=False, qk_norm=True)),
}
ALL = pytest.mark.parametrize("name", FORMS)


class Stage:
    """A head beside a target that has computed a text."""

    def __init__(
        self, folder: Path, kind: str, engine: Engine | None = None, weights: str = "plain"
    ) -> None:
        engine = engine or make_engine(tiny_decoder(windows=WINDOWS))
        self.engine = engine
        target = engine.target
        self.runner = EagleRunner(target, load_head(kind, folder, target.decoder, weights))

    def compute(self, text: Sequence[int], chunks: Sequence[int] = ()) -> BlockTable:
        """Have the target compute a text without its last token, in chunks of these sizes."""
        cache = self.engine.cache
        table = BlockTable()
        cache.prepare(table, len(text) + 40)
        while (start := table.length) < len(text) - 1:
            size = chunks[0] if chunks else len(text)
            tree = TokenTree.chain(text[start : min(start + size, len(text) - 1)])
            self.engine.runner.forward(ForwardBatch([BatchEntry(table, tree, range(0), len(text))]))
            cache.commit_slots(table, range(len(tree)))
        return table

    def make_cache(self) -> DraftCache:
        return self.runner.module.make_cache()

    def context(
        self, text: Sequence[int], table: BlockTable, cache: DraftCache | None = None
    ) -> DraftContext[DraftCache]:
        params = SamplingParams(max_tokens=60)
        sampler = Sampler(params, 0, TokenContext(list(text)), VOCAB)
        return DraftContext(cache or self.make_cache(), list(text), 20, 40, params, sampler, table)

    def begin(self, contexts: Sequence[DraftContext[DraftCache]], rows: int) -> list[HeadDraft]:
        return [*self.runner.begin(dict(enumerate(contexts)), rows).values()]


def check(stage: Stage, found: DraftLogits, wanted: Array) -> None:
    """Compare logits of the draft vocabulary with those of all tokens, of which the others are
    -inf.
    """
    proposed = proposed_logits(stage, wanted)
    assert np.isfinite(wanted).sum() == len(proposed)
    np.testing.assert_allclose(found.values, proposed, rtol=1e-4, atol=1e-4)


def proposed_logits(stage: Stage, logits: Array) -> Array:
    ids = stage.runner.head.draft_ids
    return logits if ids is None else logits[ids]


@pytest.mark.few(6)
@ALL
def test_steps_and_trees_equal_the_formulas(name: str, tmp_path: Path) -> None:
    layout, form = FORMS[name]
    head = random_head(form)
    stage = Stage(write_head(head, tmp_path, layout), form.kind)
    reference = Reference(head, tiny_module(windows=WINDOWS))
    cache = stage.make_cache()
    text = TEXT[:14]
    (draft,) = stage.begin([stage.context(text, stage.compute(text, (5,)), cache)], 20)
    check(stage, draft.logits[0], reference.logits(text))
    # 0 ┬ 1 ┬ 3 ─ 5
    #   │   └ 4
    #   └ 2 ─ 6
    levels = [[(0, 3), (0, 8)], [(1, 3), (1, 9)], [(3, 77), (2, 5)]]
    for level in levels:
        for parent, token in level:
            draft.add(parent, token)
        stage.runner.extend([draft])
    tree = TokenTree(tuple(draft.tokens), tuple(draft.parents))
    for node in range(1, len(tree)):
        check(
            stage,
            draft.logits[node],
            reference.logits(text, [tree.tokens[i] for i in tree.path(node)]),
        )
    stage.runner.end([draft])
    assert cache.tokens == text[1:]
    # The next step, after two accepted tokens and a bonus token: rows with true features replace
    # those of draft tokens.
    longer = [*text, 3, 9, 40]
    (again,) = stage.begin([stage.context(longer, stage.compute(longer), cache)], 20)
    check(stage, again.logits[0], reference.logits(longer))


@pytest.mark.parametrize("name", ["plain", "mimo", "deepspec"])
def test_rows_do_not_depend_on_the_batch_or_on_chunks(name: str, tmp_path: Path) -> None:
    layout, form = FORMS[name]
    stage = Stage(write_head(random_head(form), tmp_path, layout), form.kind)
    texts = [TEXT[:3], TEXT, TEXT[5:9]]

    def last_logits(chunks: Sequence[int], *, together: bool) -> list[Array]:
        contexts = [stage.context(text, stage.compute(text, chunks)) for text in texts]
        batches = [contexts] if together else [[context] for context in contexts]
        drafts = [draft for batch in batches for draft in stage.begin(batch, 4)]
        for draft in drafts:
            draft.add(0, 17)
        for batch in [drafts] if together else [[draft] for draft in drafts]:
            stage.runner.extend(batch)
        return [scores.values for draft in drafts for scores in draft.logits]

    for one, other in zip(
        last_logits((), together=True), last_logits((4,), together=False), strict=True
    ):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_heads_are_close(weights: str, tmp_path: Path) -> None:
    head = random_head(EAGLE)
    stage = Stage(write_head(head, tmp_path), "eagle3", weights=weights)
    assert stage.runner.head.layers[0].qkv.packed.format.startswith(weights)
    (draft,) = stage.begin([stage.context(TEXT, stage.compute(TEXT))], 4)
    wanted = Reference(head, tiny_module(windows=WINDOWS)).logits(TEXT)
    wanted = proposed_logits(stage, wanted)
    error = np.abs(draft.logits[0].values - wanted).max() / np.abs(wanted).max()
    assert 1e-6 < error < (0.05 if weights == "int8" else 0.4)


@pytest.mark.parametrize("most", [5, 64])
def test_reading_gives_the_logits_of_all_rows_but_the_last(most: int, tmp_path: Path) -> None:
    """These choices are counted when the history is scored; the next proposal is as without them."""
    head = random_head(EAGLE)
    stage = Stage(write_head(head, tmp_path), "eagle3")
    reference = Reference(head, tiny_module(windows=WINDOWS))
    cache = stage.make_cache()
    asked = stage.context(TEXT, stage.compute(TEXT), cache)
    found = stage.runner.read(asked, most)
    assert found is not None
    logits, first = found
    assert first + len(logits) == len(TEXT)
    assert len(logits) == min(most, len(TEXT) - 2)
    for row, position in zip(logits, range(first, len(TEXT)), strict=True):
        check(stage, row, reference.logits(TEXT[:position]))
    (draft,) = stage.begin([asked], 4)
    check(stage, draft.logits[0], reference.logits(TEXT))


def test_draft_tokens_of_another_drafter_get_rows(tmp_path: Path) -> None:
    head = random_head(EAGLE)
    stage = Stage(write_head(head, tmp_path), "eagle3")
    reference = Reference(head, tiny_module(windows=WINDOWS))
    table = stage.compute(TEXT)
    caches = [stage.make_cache() for _ in range(3)]
    tails = [[], [4], [4, 90, 4]]
    contexts = [
        stage.context([*TEXT, *tail], table, cache)
        for tail, cache in zip(tails, caches, strict=True)
    ]
    drafts = stage.begin(contexts, 4)
    stage.runner.end(drafts)
    for number, tail in enumerate(tails):
        check(stage, drafts[number].logits[-1], reference.logits(TEXT, tail))
        assert caches[number].tokens == TEXT[1:]


def test_the_targets_embedding_and_head_are_borrowed_not_copied(tmp_path: Path) -> None:
    form = replace(EAGLE, own_head=False, draft=VOCAB)
    stage = Stage(write_head(random_head(form), tmp_path), "eagle3")
    target = stage.engine.target.decoder
    assert stage.runner.head.head is target.head
    assert stage.runner.head.embedding is target.embedding
    assert stage.runner.feature.width == HIDDEN
