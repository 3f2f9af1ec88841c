"""Multi-token heads: chains and trees against a forward pass over the whole text."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafting.drafting import (
    LIKELY,
    Asked,
    Turns,
    assert_plain,
    bound,
    decode,
    paths,
    plain_output,
    watched,
)
from drafting.from_draft.drafts import draft_folder
from drafting.test_conformance import Stage
from drafting.trees import TreeDrafter, off_chain
from engine.cases import total
from lab.drafters.trained_multi_token import SHAPE, dense_heads, heads_folder, spec
from pronk.base.arrays import Array
from pronk.base.errors import OptionError
from pronk.drafting import make_drafter
from pronk.drafting.shared.chain import Chain
from pronk.lab.drafters.modules.heads import HeadsShape
from pronk.lab.drafters.multi_token import MultiToken, MultiTokenProposer
from pronk.sampling.params import SamplingParams
from pronk.train.modules.decoder import DecoderModule
from softmax import softmax
from tiny_models import VOCAB, make_engine, make_request, run, tiny_decoder
from train.tiny_modules import tiny_module

PROMPTS = [[1, 2, 3], [5] * 20, [9, 8, 7, 9, 8, 7, 9, 8]]
TREE = ((0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0))
TWO_LETTERS = {3: 100.0, 5: 100.0}
TARGETS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"windows": (24, 24)},
    "mixed": {"windows": (24, None)},
    "classic": {"classic": True},
}
LONG_PROMPTS = [
    [(7 * i * i + 3 * i + j) % VOCAB for i in range(length)]
    for j, length in enumerate((1, 2, 40, 75))
]
Seen = list[tuple[list[int], list[int]]]


def dense_tokens(
    target: DecoderModule, shape: HeadsShape, text: Sequence[int], *, classic: bool = False
) -> list[list[int]]:
    """Return each head's likeliest token at every position of the text."""
    return [rows.argmax(-1).tolist() for rows in dense_heads(target, shape, text, classic=classic)]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Record the text and the draft tokens of every proposal."""
    found: Seen = []
    chains = MultiTokenProposer.chains

    def watched(self: MultiTokenProposer, contexts: Any, stop: Any = None) -> list[Chain]:
        made = chains(self, contexts, stop)
        found.extend((list(each.context.tokens), each.tokens) for each in made)
        return made

    monkeypatch.setattr(MultiTokenProposer, "chains", watched)
    return found


def check_chains(seen: Seen, shape: HeadsShape, **target: Any) -> None:
    """Compare greedy chains with a pass over the whole text; ``target``: options of
    :func:`tiny_module`.
    """
    module = tiny_module(**target)
    classic = target.get("classic", False)
    for text, draft_tokens in seen:
        if draft_tokens:
            rows = dense_tokens(module, shape, text, classic=classic)
            assert draft_tokens == [row[len(text) - 2] for row in rows][: len(draft_tokens)]


@pytest.mark.few(2)
@pytest.mark.parametrize("target", TARGETS)
def test_chains_equal_a_forward_pass_over_the_whole_text(target: str, seen: Seen) -> None:
    engine = make_engine(tiny_decoder(**TARGETS[target]))
    drafter = bound(f"multi_token(model={heads_folder(classic=target == 'classic')!r})", engine)
    requests = decode(engine, drafter, LONG_PROMPTS, max_tokens=40)
    check_chains(seen[::4], SHAPE, **TARGETS[target])
    assert sum(each.stats.drafted for each in requests) > 100


def test_no_draft_tokens_below_those_of_another_drafter() -> None:
    """Proposals below another drafter's draft tokens are empty and do not change later
    proposals.
    """
    stage = Stage(spec())
    text = [1, 2, 3, 4, 5, 6]
    state = stage.start(text)
    (before,) = stage.drafter.propose([stage.context(state, text)])
    assert before.num_draft_tokens == 3
    for drafted in (1, 2):
        (below,) = stage.drafter.propose(
            [stage.context(state, [*text, 7, 8][: 6 + drafted], drafted)]
        )
        assert below.num_draft_tokens == 0
    (after,) = stage.drafter.propose([stage.context(state, text)])
    assert after == before
    stage.stop(state)


def test_smaller_drafter_of_a_draft_model(seen: Seen) -> None:
    engine = make_engine(tiny_decoder())
    spec = f"staged(draft_model(model={draft_folder()!r}), multi_token(model={heads_folder()!r}))"
    decode(engine, bound(spec, engine), LONG_PROMPTS, max_tokens=12)
    check_chains(seen, SHAPE)
    assert {bool(draft_tokens) for _, draft_tokens in seen} == {True, False}


def test_chains_after_moved_rows(seen: Seen) -> None:
    engine = make_engine(tiny_decoder())
    text = LONG_PROMPTS[2]
    texts = {(tuple(text), 0): [*text, *plain_output(text, SamplingParams(max_tokens=60, seed=0))]}
    drafter = Turns(TreeDrafter(off_chain, texts), bound(spec(), engine))
    (request,) = decode(engine, drafter, [text], max_tokens=60)
    assert request.stats.moved > 10
    assert sum(bool(draft_tokens) for _, draft_tokens in seen) > 5
    check_chains(seen, SHAPE)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drawn_chains_are_accepted(rule: str) -> None:
    params = SamplingParams(
        max_tokens=40, logit_bias=TWO_LETTERS, temperature=0.8, seed=4, rule=rule
    )
    engine = make_engine(tiny_decoder())
    drafter = bound(spec(), engine)
    requests = [make_request(prompt, params, drafter) for prompt in LONG_PROMPTS]
    run(engine, requests)
    assert all(len(each.output) == 40 for each in requests)
    assert total(requests, "accepted") > 20


@pytest.mark.few(2)
@pytest.mark.parametrize("count", [1, 2, 3, None])
def test_num_tokens_is_the_number_of_heads_used(count: int | None, seen: Seen) -> None:
    for order in ("parallel", "causal", "anticausal"):
        shape = replace(SHAPE, order=order)
        seen.clear()
        engine = make_engine(tiny_decoder())
        drafter = bound(f"multi_token(model={heads_folder(shape)!r}, num_tokens={count})", engine)
        decode(engine, drafter, LONG_PROMPTS[1:3], max_tokens=12)
        check_chains(seen, shape)
        assert max(len(draft_tokens) for *_, draft_tokens in seen) == (count or 3)


def test_num_tokens_beyond_the_heads_is_refused() -> None:
    with pytest.raises(OptionError, match="expected num_tokens of at most 3, the heads, found 4"):
        bound(spec(num_tokens=4))


def test_the_default_is_the_folder_beside_the_target(tmp_path: Path) -> None:
    (tmp_path / "heads").symlink_to(heads_folder())
    engine = make_engine(tiny_decoder())
    target = replace(engine.target, folder=tmp_path)
    vars(target)["fingerprint"] = None  # the target's files are unknown
    drafter = MultiToken().bind(target)
    assert drafter.runner.heads.shape == SHAPE
    assert drafter.bind(target) is drafter


def test_no_draft_tokens_without_free_blocks(seen: Seen) -> None:
    engine = make_engine(tiny_decoder())
    drafter = bound(spec(), engine)
    assert isinstance(drafter, MultiTokenProposer)
    drafter.runner.module.pool.resize(2)  # 32 tokens
    decode(engine, drafter, LONG_PROMPTS, max_tokens=12)
    assert not any(draft_tokens for text, draft_tokens in seen if len(text) > 40)
    assert any(draft_tokens for *_, draft_tokens in seen)
    assert not drafter.runner.module.pool.in_use


def off_the_chain(asked: list[Asked]) -> int:
    """Return the number of accepted draft tokens beside the main chain."""
    return sum(node >= each.tree.main_chain for each in asked for node in each.path)


def last_rows(text: list[int]) -> list[Array]:
    """Return each head's logits ``[vocab]`` at the token before the last."""
    return [rows[len(text) - 2] for rows in dense_heads(tiny_module(), SHAPE, text)]


@pytest.mark.parametrize("tree", [12, TREE])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8}, {"temperature": 0.8, "rule": "block"}], ids=str
)
def test_trees(tree: Any, options: dict[str, Any]) -> None:
    """Trees keep ``max_nodes`` and ``max_depth``, and tokens off the main chain are accepted."""
    engine, drafter = watched(spec(tree=tree))
    params = SamplingParams(max_tokens=60, logit_bias=LIKELY, seed=4, **options)
    requests = [make_request(prompt, params, drafter) for prompt in PROMPTS]
    run(engine, requests)
    if not params.rejects:
        assert_plain(engine, requests)
    asked = [each for request in requests for each in drafter.of(request)]
    assert off_the_chain(asked) > 10
    assert total(requests, "moved") > 0
    for each in asked:
        assert each.tree.probs is None
        assert each.tree.num_draft_tokens <= min(len(TREE) if tree == TREE else 12, each.nodes)
        assert max(each.tree.depths) <= min(3, each.depth)


def test_num_tokens_limits_the_depth_of_a_tree() -> None:
    engine, drafter = watched(spec(num_tokens=2, tree=40))
    (request,) = decode(engine, drafter, PROMPTS[:1])
    assert max(depth for each in drafter.of(request) for depth in each.tree.depths) == 2


@pytest.mark.parametrize("size", [1, 5, 40])
def test_a_tree_of_n_nodes_has_the_n_likeliest_paths(size: int) -> None:
    """Only the first proposal's gains are products of probabilities; later ones include measured
    acceptance.
    """
    engine, drafter = watched(spec(tree=size))
    for request in decode(engine, drafter, PROMPTS, logit_bias=LIKELY):
        first = drafter.of(request)[0]
        bias = np.zeros(VOCAB, np.float32)
        bias[list(LIKELY)] = 30.0
        shares = [np.sort(softmax(row + bias))[:-9:-1].tolist() for row in last_rows(first.tokens)]
        shares = [[min(max(round(1000 * share), 1), 999) / 1000 for share in row] for row in shares]
        every = [prod(path) for depth in (1, 2, 3) for path in product(*shares[:depth])]
        assert first.tree.num_draft_tokens == size
        assert first.tree.gain is not None
        assert sum(first.tree.gain[1:]) == pytest.approx(sum(sorted(every)[-size:]), abs=1e-9)


def test_the_main_chain_of_a_tree_has_the_likeliest_tokens() -> None:
    engine, drafter = watched(spec(tree=12))
    for request in decode(engine, drafter, PROMPTS):
        for each in drafter.of(request):
            likeliest = [int(row.argmax()) for row in last_rows(each.tokens)]
            length = sum(tuple(likeliest[:end]) in paths(each.tree) for end in (1, 2, 3))
            assert each.tree.main_chain == 1 + length
            assert list(each.tree.tokens[1 : 1 + length]) == likeliest[:length]
            assert length or not min(each.depth, each.nodes)


def test_wrappers_take_chains_and_no_trees() -> None:
    for wrapper in ("cape", "threshold"):
        with pytest.raises(
            OptionError, match="expected a drafter of chains, found multi_token; leave out its tree"
        ):
            make_drafter(f"{wrapper}({spec(tree=8)})")
        make_drafter(f"{wrapper}({spec()})")


def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    with pytest.raises(
        OptionError, match=r"tree: expected paths of 1\.\.3 ranks in 0\.\.63, found \(0, 0, 0, 0\)"
    ):
        bound(spec(tree=((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))))
