"""Two-stage heads of EAGLE-3 and MTP: draft tokens against a slow loop over the formulas."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafting.drafting import Asked, Watched, decode, sampler_at, text
from drafting.from_target.trained_eagle import (
    Head,
    Reference,
    bigram_decoder,
    bigram_module,
    copying_form,
    copying_head,
    write_head,
)
from drafting.helpers import CHECKPOINTS
from engine.cases import total
from pronk.base.arrays import Array
from pronk.base.errors import CheckpointError, OptionError
from pronk.drafting import make_drafter
from pronk.drafting.from_target._eagle_runner import EagleRunner
from pronk.drafting.shared.chain import Chain
from pronk.drafting.shared.token_clusters import cluster_means, cluster_rows
from pronk.engine.request import Request
from tiny_models import VOCAB, make_engine

PROMPTS = [[1, 2, 3], [5], text(7, 40)]
CLUSTERS = 20
BEST = 4


COUNT = 120  # tokens of the head, a part of the target's


@cache
def rows() -> Array:
    """Return the rows of the head's LM head: those of the target's first tokens."""
    return bigram_module().head.weight.float().numpy()[:COUNT]


@cache
def head_of(kind: str) -> Head:
    """Return a copying head; EAGLE-3's has an LM head of its own, MTP's is the target's."""
    head = copying_head(bigram_module(), copying_form(kind), noise=0.02)
    if kind == "mtp":
        return head
    own = {
        "lm_head.weight": rows(),
        "d2t": np.zeros(COUNT, np.int64),
        "t2d": np.arange(VOCAB) < COUNT,
    }
    form = replace(head.form, own_head=True, draft=COUNT)
    return replace(head, form=form, tensors={**head.tensors, **own})


@cache
def folder_of(kind: str) -> str:
    layout = "speculators" if kind == "eagle3" else "mtp"
    return str(write_head(head_of(kind), CHECKPOINTS / f"two-stages-{kind}", layout))


class TwoStageReference(Reference):
    """Outputs of a head, with the logits of the tokens in the best clusters only."""

    def __init__(self, kind: str, clusters: Array, num_best: int) -> None:
        super().__init__(head_of(kind), bigram_module())
        self.clusters = clusters
        self.means = cluster_means(rows(), clusters)
        self.num_best = num_best

    def logits(self, text: Sequence[int], drafted: Sequence[int] = ()) -> Array:
        whole = super().logits(text, drafted)
        scores = self.means @ self.last_output(text, drafted)
        order = np.argsort(-scores, kind="stable")[: self.num_best]
        allowed = self.clusters[order].reshape(-1)
        logits = np.full(len(whole), -np.inf)
        logits[allowed] = whole[allowed]
        return logits


def spec(kind: str, folder: str | None = None, **options: Any) -> str:
    own = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"{kind}(model={folder or folder_of(kind)!r}, draft_vocab={COUNT}{own})"


def finite(logits: Array) -> Array:
    """Return logits with a small number for tokens that cannot be drafted."""
    return np.maximum(logits, -1e30).astype(np.float32)


def check_chain(reference: TwoStageReference, request: Request, asked: Asked) -> int:
    """Compare draft tokens with those of the slow loop; return how many the whole head misses."""
    drafted = list[int]()
    sampler = sampler_at(request, asked.tokens)
    missed = 0
    for token in asked.tree.tokens[1:]:
        assert token == sampler.choose(finite(reference.logits(asked.tokens, drafted)))
        whole = Reference.logits(reference, asked.tokens, drafted)
        missed += token != sampler.choose(finite(whole))
        drafted.append(token)
        sampler.advance(token)
    return missed


@pytest.mark.few(3)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[2:]], ids=["batch", "alone"])
def test_chains_equal_a_slow_loop(
    kind: str, temperature: float, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request alone is drafted in one call of the kernels."""
    calls = list[Chain]()
    draft_in_one_call = EagleRunner.draft_in_one_call

    def counted(runner: EagleRunner, chains: Sequence[Chain]) -> None:
        draft_in_one_call(runner, chains)
        calls.extend(chains)

    monkeypatch.setattr(EagleRunner, "draft_in_one_call", counted)
    reference = TwoStageReference(kind, cluster_rows(rows(), CLUSTERS), BEST)
    engine = make_engine(bigram_decoder())
    made = spec(kind, num_clusters=CLUSTERS, num_best=BEST, num_tokens=4)
    drafter = Watched(make_drafter(made).bind(engine.target))
    requests = decode(engine, drafter, prompts, max_tokens=12, temperature=temperature)
    assert calls or len(prompts) > 1
    missed = 0
    for request in requests:
        for asked in drafter.of(request):
            missed += check_chain(reference, request, asked)
    assert total(requests, "drafted") > 10
    assert total(requests, "accepted") > 0
    assert missed or not temperature, "no token was outside the best clusters"


def test_with_all_clusters_the_drafts_are_those_of_the_whole_head() -> None:
    trees = []
    for options in ({}, {"num_clusters": CLUSTERS, "num_best": CLUSTERS}):
        engine = make_engine(bigram_decoder())
        drafter = Watched(make_drafter(spec("eagle3", **options)).bind(engine.target))
        requests = decode(engine, drafter, PROMPTS, max_tokens=12, temperature=0.8)
        trees.append([asked.tree.tokens for each in requests for asked in drafter.of(each)])
    assert trees[0] == trees[1]
    assert any(len(tokens) > 1 for tokens in trees[0])


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_number_that_does_not_divide_the_tokens_is_refused(kind: str) -> None:
    engine = make_engine(bigram_decoder())
    drafter = make_drafter(spec(kind, num_clusters=7))
    expected = f"{kind}: num_clusters: expected a divisor of the {COUNT} tokens .*, found 7"
    with pytest.raises(OptionError, match=expected):
        drafter.bind(engine.target)


def clustered(folder: Path, clusters: Array, **changes: Any) -> Path:
    """Write an EAGLE-3 head with centroids of its own."""
    head = head_of("eagle3")
    tensors = {
        **head.tensors,
        "masked_embedding.centroids.weight": cluster_means(rows(), clusters),
        "masked_embedding.token_ordering": clusters.reshape(-1).astype(np.int64),
    }
    sizes = {"num_centroids": len(clusters), "centroid_intermediate_top_k": BEST}
    return write_head(replace(head, tensors=tensors), folder, **(sizes | changes))


def test_centroids_of_the_file_are_used(tmp_path: Path) -> None:
    clusters = np.random.default_rng(3).permutation(COUNT).reshape(10, -1).astype(np.int32)
    folder = clustered(tmp_path / "head", clusters)
    reference = TwoStageReference("eagle3", clusters, BEST)
    engine = make_engine(bigram_decoder())
    drafter = Watched(make_drafter(spec("eagle3", str(folder))).bind(engine.target))
    requests = decode(engine, drafter, PROMPTS[2:], max_tokens=16, temperature=0.8)
    missed = 0
    for asked in drafter.of(requests[0]):
        missed += check_chain(reference, requests[0], asked)
    assert missed


def test_damaged_clusters_are_refused(tmp_path: Path) -> None:
    clusters = np.arange(COUNT, dtype=np.int32).reshape(10, -1)
    engine = make_engine(bigram_decoder())
    twice = clusters.copy()
    twice[0, 0] = 1
    folder = clustered(tmp_path / "twice", twice)
    with pytest.raises(CheckpointError, match=f"expected each of {COUNT} tokens once"):
        make_drafter(spec("eagle3", str(folder))).bind(engine.target)
    folder = clustered(tmp_path / "size", clusters, num_centroids=7)
    with pytest.raises(CheckpointError, match="num_centroids: expected a divisor"):
        make_drafter(spec("eagle3", str(folder))).bind(engine.target)
