"""Multi-token heads at work: what they guess against a pass over the whole text, and that no text depends on it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drafters.drafting import assert_plain, plain_output
from drafters.from_draft.drafts import draft_folder
from drafters.from_target.trained_multi_token import SHAPE, dense_heads, heads_folder
from drafters.test_conformance import Stage
from pronk.drafters import DraftContext, Outcome, Proposer, make_drafter
from pronk.drafters.from_target.modules.heads import HeadsShape
from pronk.drafters.from_target.multi_token import MultiToken, MultiTokenProposer
from pronk.drafters.shared.chain import Chain
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.errors import OptionError
from pronk.models.decoder import Decoder
from pronk.sampling.params import SamplingParams
from pronk.speculation.tree import TokenTree
from tiny_models import VOCAB, make_engine, make_request, run, samples, tiny_decoder

BIAS = {3: 100.0, 5: 100.0}
VARIANTS = [
    SHAPE,
    replace(SHAPE, layer=1),
    replace(SHAPE, order="causal"),
    replace(SHAPE, order="anticausal"),
    replace(SHAPE, kind="linear"),
    replace(SHAPE, unembeddings="replicated"),
]
TARGETS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"windows": (24, 24)},
    "mixed": {"windows": (24, None)},
    "classic": {"classic": True},
}
PROMPTS = [[(7 * i * i + 3 * i + j) % VOCAB for i in range(length)] for j, length in enumerate((1, 2, 40, 75))]
Seen = list[tuple[list[int], list[int]]]


def dense_guesses(
    decoder: Decoder, shape: HeadsShape, text: Sequence[int], *, classic: bool = False
) -> list[list[int]]:
    """For each head, its likeliest token at every place of the text."""
    return [rows.argmax(-1).tolist() for rows in dense_heads(decoder, shape, text, classic=classic)]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Every proposal that is made: the text, and the guesses."""
    found: Seen = []
    chains = MultiTokenProposer.chains

    def watched(self: MultiTokenProposer, contexts: Any, stop: Any = None) -> list[Chain]:
        made = chains(self, contexts, stop)
        found.extend((list(each.context.tokens), each.tokens) for each in made)
        return made

    monkeypatch.setattr(MultiTokenProposer, "chains", watched)
    return found


class CrossAttentionSource(Proposer[Any]):
    """Asks heads, and guesses otherwise: below the root a wrong token, and beside it up to three right ones."""

    name = "beside"

    def __init__(self, heads: MultiTokenProposer, text: Sequence[int]) -> None:
        self.heads, self.text, self.capabilities = heads, text, heads.capabilities

    def start(self, prompt: Sequence[int]) -> Any:
        return self.heads.start(prompt)

    def propose(self, contexts: Sequence[DraftContext[Any]]) -> list[TokenTree]:
        self.heads.propose(contexts)
        trees = []
        for context in contexts:
            place = len(context.tokens)
            right = tuple(self.text[place : place + 1 + place % 3])
            wrong = (right[0] + 1) % VOCAB if right else 0
            parents = (-1, 0, 0, *range(2, len(right) + 1))
            trees.append(TokenTree((context.tokens[-1], wrong, *right), parents[: len(right) + 2]))
        return trees

    def observe(self, outcome: Outcome[Any]) -> None:
        self.heads.observe(outcome)

    def stop(self, state: Any) -> None:
        self.heads.stop(state)


def decode(
    engine: Engine, spec: str, params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS
) -> list[Request]:
    """The prompts in one batch; where sampling is coupled, their texts are those of plain decoding."""
    drafter = make_drafter(spec).bind(engine.target)
    requests = [make_request(list(prompt), params, drafter) for prompt in prompts]
    run(engine, requests)
    if not params.rejects:
        assert_plain(engine, requests)
    return requests


def check(seen: Seen, shape: HeadsShape, **target: Any) -> None:
    """Greedy guesses are those of a pass over the whole text; ``target`` says which tiny one it is."""
    decoder, classic = tiny_decoder(**target, packed=False), target.get("classic", False)
    for text, draft_tokens in seen:
        if draft_tokens:
            rows = dense_guesses(decoder, shape, text, classic=classic)
            assert draft_tokens == [row[len(text) - 2] for row in rows][: len(draft_tokens)]


@pytest.mark.parametrize("shape", VARIANTS, ids=lambda s: f"{s.kind}-{s.order}-{s.unembeddings}-{s.layer}")
def test_guesses_are_those_of_a_pass_over_the_whole_text(shape: HeadsShape, seen: Seen) -> None:
    decoder, params = tiny_decoder(), SamplingParams(max_tokens=12)
    decode(make_engine(decoder, prefill_chunk=16), f"multi_token(model={heads_folder(shape)!r})", params)
    check(seen, shape)
    assert sum(len(draft_tokens) == 3 for *_, draft_tokens in seen) > 20
    assert sum(len(set(draft_tokens)) > 1 for *_, draft_tokens in seen) > 10


@pytest.mark.parametrize("target", TARGETS)
def test_windows_and_learned_positions(target: str, seen: Seen) -> None:
    decoder, classic = tiny_decoder(**TARGETS[target]), target == "classic"
    params = SamplingParams(max_tokens=40)
    requests = decode(make_engine(decoder), f"multi_token(model={heads_folder(classic=classic)!r})", params)
    check(seen[::4], SHAPE, **TARGETS[target])
    assert sum(each.stats.drafted for each in requests) > 100


def test_below_others_guesses_there_is_nothing_to_guess_from() -> None:
    """The target has said nothing of them yet, so the heads are silent; and it does them no harm to be asked."""
    stage, text = Stage("multi_token"), [1, 2, 3, 4, 5, 6]
    state = stage.start(text)
    (before,) = stage.drafter.propose([stage.context(state, text)])
    assert before.num_draft_tokens == 3
    for guessed in (1, 2):
        (below,) = stage.drafter.propose([stage.context(state, [*text, 7, 8][: 6 + guessed], guessed)])
        assert below.num_draft_tokens == 0
    (after,) = stage.drafter.propose([stage.context(state, text)])
    assert after == before
    stage.stop(state)


def test_as_the_smaller_drafter_of_a_draft_model(seen: Seen) -> None:
    decoder, params = tiny_decoder(), SamplingParams(max_tokens=12)
    spec = f"staged(draft_model(model={draft_folder()!r}), multi_token(model={heads_folder()!r}))"
    decode(make_engine(decoder), spec, params)
    check(seen, SHAPE)
    assert {bool(draft_tokens) for _, draft_tokens in seen} == {True, False}


def test_greedy_guesses_below_what_was_moved(seen: Seen) -> None:
    decoder, text = tiny_decoder(), PROMPTS[2]
    # What the target will say, beside another token that comes first: accepted, and moved onto the main chain.
    engine, params = make_engine(decoder), SamplingParams(max_tokens=40, seed=0)
    drafter = CrossAttentionSource(MultiToken(heads_folder()).bind(engine.target), [*text, *plain_output(text, params)])
    request = make_request(text, params, drafter)
    run(engine, [request])
    assert_plain(engine, [request])
    assert request.stats.moved > 10
    assert sum(bool(draft_tokens) for _, draft_tokens in seen) > 5
    check(seen, SHAPE)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_rules_know_what_guesses_were_drawn_from(rule: str) -> None:
    params = SamplingParams(max_tokens=40, logit_bias=BIAS, temperature=0.8, seed=4, rule=rule)
    requests = decode(make_engine(tiny_decoder()), f"multi_token(model={heads_folder()!r})", params)
    assert all(len(each.output) == 40 for each in requests)
    assert sum(each.stats.accepted for each in requests) > 20


def test_several_samples_share_the_prompt() -> None:
    decoder = tiny_decoder()
    params = SamplingParams(max_tokens=20, n=3, temperature=0.8, seed=5, logit_bias=BIAS)
    engine = make_engine(decoder)
    requests = samples(PROMPTS[2], params, MultiToken(heads_folder()).bind(engine.target))
    run(engine, requests)
    assert_plain(engine, requests)
    assert len({tuple(each.output) for each in requests}) == 3


@pytest.mark.parametrize("count", [1, 2, 3, None])
def test_so_many_heads_guess_as_are_asked_for(count: int | None, seen: Seen) -> None:
    decoder = tiny_decoder()
    for order in ("parallel", "causal", "anticausal"):
        shape = replace(SHAPE, order=order)
        seen.clear()
        spec = f"multi_token(model={heads_folder(shape)!r}, num_tokens={count})"
        decode(make_engine(decoder), spec, SamplingParams(max_tokens=12), PROMPTS[1:3])
        check(seen, shape)
        assert max(len(draft_tokens) for *_, draft_tokens in seen) == (count or 3)


def test_more_heads_than_there_are_is_an_error() -> None:
    drafter = make_drafter(f"multi_token(model={heads_folder()!r}, num_tokens=4)")
    with pytest.raises(OptionError, match="expected num_tokens of at most 3, the heads, found 4"):
        drafter.bind(make_engine(tiny_decoder()).target)


def test_heads_beside_the_target_are_the_default(tmp_path: Path) -> None:
    (tmp_path / "heads").symlink_to(heads_folder())
    engine = make_engine(tiny_decoder())
    target = replace(engine.target, folder=tmp_path)
    vars(target)["fingerprint"] = None  # nobody knows its files
    drafter = MultiToken().bind(target)
    assert drafter.loaded.heads.shape == SHAPE
    assert drafter.bind(target) is drafter


def test_nothing_is_drafted_where_there_is_no_room(seen: Seen) -> None:
    decoder = tiny_decoder()
    engine = make_engine(decoder)
    drafter = make_drafter(f"multi_token(model={heads_folder()!r})").bind(engine.target)
    assert isinstance(drafter, MultiTokenProposer)
    drafter.loaded.side_cache.cache.resize(2)  # 32 tokens
    requests = [make_request(list(prompt), SamplingParams(max_tokens=12), drafter) for prompt in PROMPTS]
    run(engine, requests)
    assert_plain(engine, requests)
    assert not any(draft_tokens for text, draft_tokens in seen if len(text) > 40)
    assert any(draft_tokens for *_, draft_tokens in seen)
    assert not drafter.loaded.side_cache.cache.in_use
