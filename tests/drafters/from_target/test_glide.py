"""GLIDE beside a target: what its guesses see of the target's paged cache, and that they change nothing."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.drafting import assert_no_blocks, assert_plain, bound, context, decode, watch_draft, watched
from drafters.from_target.trained_glide import PROMPTS, DenseGlide, glide_folder, spec
from drafters.helpers import within
from pronk.drafters import DraftContext, Proposer, make_drafter
from pronk.drafters.from_draft.draft_model import ModelProposer
from pronk.drafters.shared.chain import Chain
from pronk.drafters.shared.draft import DraftLane, DraftRunner
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.errors import CheckpointError, OptionError
from pronk.execution.attention import Segment
from pronk.execution.model_runner import ForwardJob
from pronk.kv_cache.blocks import BlockTable
from pronk.sampling.params import SamplingParams
from pronk.speculation.cost_model import CostCurve
from pronk.speculation.tree import TokenTree
from tiny_models import VOCAB, make_engine, make_request, run, samples, tiny_decoder

KINDS = {
    "glide": spec(),
    "vanilla": spec("vanilla"),
    "threshold": f"threshold({spec()})",
    "cape": f"cape({spec()})",
    "staged": f"staged({spec()}, prompt_lookup(min_ngram=1))",
    "for another": f"staged({spec('vanilla')}, {spec()})",
    "beam": f"beam({spec()}, width=3)",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"temperature": 0.9},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.5, "presence_penalty": 0.5},
}
LONG = [random.Random(seed).choices(range(VOCAB), k=length) for seed, length in enumerate((60, 5, 530))]


def model_of(drafter: Any) -> DraftRunner:
    return within(drafter, ModelProposer)[0].draft


@dataclass
class Said:
    """A row of the draft: the text that it ends, what the target's cache had of that, and the logits."""

    text: list[int]
    verified: int
    oldest: int
    logits: Tensor


def listen(draft: DraftRunner) -> list[Said]:
    """All that the draft will say."""
    notes, feed, branch, grow = list[Said](), draft.forward_tokens, draft.forward_trees, draft.draft_chain

    def note(lane: Any, text: list[int], logits: Tensor) -> None:
        notes.append(
            Said(text, lane.target_block_table.length, lane.target_block_table.num_released * 16, logits.clone())
        )

    def fed(lanes: Sequence[DraftLane], tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        rows = feed(lanes, tokens)
        for lane, row in zip(lanes, rows, strict=True):
            note(lane, list(lane.tokens), row)
        return rows

    def branched(
        lanes: Sequence[DraftLane], trees: Sequence[TokenTree], leads: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        rows = branch(lanes, trees, leads)
        for lane, tree, new in zip(lanes, trees, rows, strict=True):
            for node, row in zip(range(len(tree) - len(new), len(tree)), new, strict=True):
                note(lane, [*lane.tokens, tree.tokens[0], *(tree.tokens[i] for i in tree.path(node))], row)
        return rows

    def grown(lane: DraftLane, chain: Chain, is_complete: Callable[[Chain], bool]) -> None:
        assert chain.context.params.greedy, "with noise the scores are not the logits"
        text = list(chain.context.tokens)
        grow(lane, chain, is_complete)
        for number, guess in enumerate(chain.draft_tokens):
            note(lane, text + chain.tokens[:number], torch.from_numpy(guess.scores))

    draft.forward_tokens, draft.forward_trees, draft.draft_chain = fed, branched, grown  # type: ignore[method-assign]
    return notes


def assert_right(notes: Sequence[Said], dense: DenseGlide) -> None:
    for each in random.Random(0).sample(notes, min(len(notes), 60)):
        want = dense(each.text, each.verified, each.oldest)
        assert torch.allclose(each.logits, want, rtol=1e-4, atol=1e-4)


def serve(engine: Engine, drafter: Proposer[Any], prompts: Sequence[Sequence[int]], **options: Any) -> list[Request]:
    """The prompts in one batch; all requests are drafted for, and their texts are those of plain decoding."""
    made = decode(engine, drafter, prompts, **options)
    assert all(request.stats.drafted for request in made)
    return made


@pytest.mark.parametrize("layers", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", ["glide", "vanilla", "beam"])
def test_guesses_are_those_of_the_dense_module_with_a_delayed_cache(name: str, layers: int) -> None:
    """Whatever was accepted before, and for a batch of texts of which one is read in two parts."""
    folder = glide_folder(layers=layers, cross=name != "vanilla")
    kind = "vanilla" if name == "vanilla" else "glide"
    own = f"{kind}(model={folder!r}, num_tokens=4)"
    engine = make_engine(tiny_decoder())
    drafter = bound(f"beam({own}, width=2)" if name == "beam" else own, engine)
    notes = listen(model_of(drafter))
    made = serve(engine, drafter, [*PROMPTS, *LONG], max_tokens=16)
    assert_right(notes, DenseGlide(folder, tiny_decoder(packed=False), layers, cross=kind == "glide"))
    delays = {len(each.text) - each.verified for each in notes}
    assert {1, 2, 3, 4} <= delays
    assert sum(request.stats.accepted for request in made) > 0


@pytest.mark.parametrize("windows", [pytest.param((12, 12), marks=pytest.mark.slow), (None, 12), (12, None)], ids=str)
def test_sliding_windows_of_the_target(windows: tuple[int | None, ...]) -> None:
    """Of the long prompts most has been given back before the first guess; a row there sees nothing at all."""
    folder = glide_folder(windows=windows)
    engine = make_engine(tiny_decoder(windows=windows), prefill_chunk=32)
    drafter = bound(f"glide(model={folder!r}, num_tokens=6)", engine)
    notes = listen(model_of(drafter))
    made = serve(engine, drafter, [*PROMPTS, *LONG], max_tokens=20)
    assert_right(notes, DenseGlide(folder, tiny_decoder(packed=False, windows=windows)))
    assert any(each.oldest > 0 for each in notes) == (windows == (12, 12))
    assert sum(request.stats.accepted for request in made) > 0
    assert_no_blocks(model_of(drafter))


@pytest.mark.parametrize("number", range(3))
def test_what_a_window_has_given_back_is_not_read(number: int) -> None:
    """The prompt's first tokens are read when the target has forgotten them: other texts may lie in their places."""
    windows = (12, 12)
    folder = glide_folder(layers=2, windows=windows)
    engine = make_engine(tiny_decoder(windows=windows), prefill_chunk=32)
    drafter = bound(f"glide(model={folder!r}, num_tokens=1)", engine)
    notes = listen(model_of(drafter))
    serve(engine, drafter, LONG[number : number + 1], max_tokens=3)
    dense = DenseGlide(folder, tiny_decoder(packed=False, windows=windows), 2)
    first = [each for each in notes if len(each.text) == len(LONG[number]) + 1]
    assert_right(first, dense)
    assert [each.oldest > 0 for each in first] == [len(LONG[number]) > 30]


def test_a_target_with_learned_positions() -> None:
    target = tiny_decoder(classic=True)
    folder = glide_folder(classic=True)
    engine = make_engine(target)
    drafter = bound(f"glide(model={folder!r}, num_tokens=3)", engine)
    notes = listen(model_of(drafter))
    serve(engine, drafter, PROMPTS)
    assert_right(notes, DenseGlide(folder, tiny_decoder(packed=False, classic=True)))


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, "greedy") for kind in KINDS), *((kind, options) for kind in ("glide", "cape") for options in OPTIONS)],
)
def test_text_is_that_of_plain_decoding(kind: str, options: str) -> None:
    engine, drafter = watched(KINDS[kind])
    draft = model_of(drafter.inner)
    watch_draft(draft)
    requests = decode(engine, drafter, PROMPTS, **OPTIONS[options])
    accepted = sum(request.stats.accepted for request in requests)
    assert accepted > (30 if options == "greedy" else 0)
    assert_no_blocks(draft)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_chains_are_drawn_where_the_rule_asks_for_it(rule: Any) -> None:
    engine, drafter = watched(KINDS["glide"])
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=1, rule=rule)
    requests = [make_request(prompt, params, drafter) for prompt in PROMPTS]
    run(engine, requests)
    assert sum(request.stats.accepted for request in requests) > 0
    for request in requests:
        for note in drafter.of(request):
            drawn = note.tree.probs
            assert drawn is not None
            assert drawn[0] is None
            for each, token in zip(drawn[1:], note.tree.tokens[1:], strict=True):
                assert each is not None
                assert each[token] > 0


def test_samples_of_a_prompt_read_the_same_blocks() -> None:
    engine, drafter = watched(KINDS["glide"])
    params = SamplingParams(max_tokens=20, temperature=0.8, n=3, seed=2)
    for prompt in PROMPTS:
        made = samples(prompt, params, drafter)
        run(engine, made)
        assert_plain(engine, made)
    assert_no_blocks(model_of(drafter.inner))


def bits(pool: Tensor) -> Tensor:
    """What is there, poison included, which is no number."""
    return pool.view(torch.int32)


class Guarded(Proposer[Any]):
    """Checks that a proposal leaves the target's cache as it was."""

    name = "guarded"

    def __init__(self, inner: Proposer[Any], engine: Engine) -> None:
        self.inner, self.pools, self.asked = inner, [*engine.cache.keys, *engine.cache.values], 0
        self.capabilities = inner.capabilities
        self.start, self.observe, self.stop = inner.start, inner.observe, inner.stop  # type: ignore[method-assign]

    def start(self, prompt: Sequence[int]) -> Any: ...

    def observe(self, outcome: Any) -> None: ...

    def propose(self, contexts: Sequence[DraftContext[Any]]) -> list[TokenTree]:
        before = [bits(pool).clone() for pool in self.pools]
        lengths = [(each.block_table.length, list(each.block_table.blocks)) for each in contexts]
        trees = self.inner.propose(contexts)
        assert all(torch.equal(one, bits(other)) for one, other in zip(before, self.pools, strict=True))
        assert lengths == [(each.block_table.length, list(each.block_table.blocks)) for each in contexts]
        self.asked += sum(tree.num_draft_tokens for tree in trees)
        return trees


@pytest.mark.parametrize("kind", ["glide", "staged", "beam"])
def test_the_targets_cache_is_never_written(kind: str) -> None:
    engine = make_engine(tiny_decoder())
    guarded = Guarded(bound(KINDS[kind], engine), engine)
    serve(engine, guarded, [*PROMPTS, LONG[0]], max_tokens=12)
    assert guarded.asked > 20


def propose(engine: Engine, drafter: Any, tokens: Sequence[int], guessed: int = 0, state: Any = None) -> TokenTree:
    """The proposal after ``tokens``, of which ``guessed`` at the end are others' guesses.

    The target has computed the text, but for its last token.
    """
    block_table, held = BlockTable(), len(tokens) - guessed - 1
    engine.cache.prepare(block_table, len(tokens) + 64)
    engine.runner.forward([ForwardJob(Segment(block_table, TokenTree.chain(tokens[:held])), range(0), held)])
    block_table.length = held
    asked = context(drafter, tokens, state=state, guessed=guessed)
    (tree,) = drafter.propose([replace(asked, block_table=block_table)])
    engine.cache.release(block_table)
    if state is None:
        drafter.stop(asked.state)
    return tree


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", ["glide", "beam"])
def test_guesses_depend_on_the_text_and_not_on_guesses_before(kind: str, layers: int) -> None:
    """Whatever was accepted or rejected, and whatever was asked about guesses of others; to the last bit."""
    own = f"glide(model={glide_folder(layers=layers)!r}, num_tokens=4)"
    engine = make_engine(tiny_decoder())
    drafter = bound(own if kind == "glide" else f"beam({own}, width=2)", engine)
    notes, dice = listen(model_of(drafter)), random.Random(1)
    tokens = list(PROMPTS[0])
    state = drafter.start(tokens)
    for number in range(15):
        tree = propose(engine, drafter, tokens, state=state)
        last = notes[-1]
        assert propose(engine, drafter, tokens) == tree
        assert notes[-1].text == last.text
        assert torch.equal(notes[-1].logits, last.logits)
        chain = [tree.tokens[node] for node in tree.first_chain(0)]
        new = [*chain[: dice.randint(0, len(chain))], *(dice.randrange(VOCAB) for _ in range(dice.randint(1, 2)))]
        if number % 2:
            draft_tokens = [*new[:1], dice.randrange(VOCAB), 5]
            propose(engine, drafter, [*tokens, *draft_tokens], len(draft_tokens), state)
        tokens = [*tokens, *new]
    drafter.stop(state)
    assert_no_blocks(model_of(drafter))


def test_only_several_layers_run_accepted_guesses_again() -> None:
    rows = {}
    for layers in (1, 2):
        engine, drafter = watched(f"glide(model={glide_folder(layers=layers)!r}, num_tokens=4)")
        passes = watch_draft(model_of(drafter.inner))
        (request,) = decode(engine, drafter, PROMPTS[:1])
        assert request.stats.accepted > 8
        texts = [text for each in passes for lane in each.texts for text in lane]
        rows[layers] = (len(texts), len(set(texts)))
    assert rows[1][0] == rows[1][1]
    assert rows[2][0] > rows[2][1]


def test_thrifty_requests_know_what_its_passes_cost() -> None:
    engine = make_engine(tiny_decoder(), costs=CostCurve((1, 64), (1.0, 1.0)))
    drafter = bound(KINDS["glide"], engine)
    requests = [make_request(prompt, SamplingParams(max_tokens=20), drafter) for prompt in PROMPTS]
    run(engine, requests)
    costs = model_of(drafter).costs(0, len(PROMPTS))
    assert costs is not None
    assert costs.at(1) > 0
    assert_no_blocks(model_of(drafter))


def test_drafters_of_a_target_share_one_model() -> None:
    engine = make_engine(tiny_decoder())
    one, other = (bound(spec(), engine) for _ in range(2))
    assert model_of(one) is model_of(other)
    assert one.bind(engine.target) is one
    assert model_of(bound(spec())) is not model_of(one)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"glide(model={glide_folder(cross=False)!r})", "glide: expected a folder of this kind of drafter, found van"),
        (f"vanilla(model={glide_folder()!r})", "vanilla: expected a folder of this kind of drafter, found glide"),
        (f"glide(model={glide_folder()!r}, num_tokens=0)", "glide: num_tokens: expected"),
        (f"staged(prompt_lookup, {spec()})", "staged: expected a draft_model and a smaller drafter"),
        (f"beam({spec()}, {spec()})", "beam: expected draft_model, glide or vanilla alone, found glide, glide"),
    ],
    ids=["vanilla as glide", "glide as vanilla", "no tokens", "nothing smaller", "two"],
)
def test_what_does_not_fit_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_drafter(text).bind(make_engine(tiny_decoder()).target)


def test_a_target_with_other_heads_is_refused() -> None:
    """Also where nobody knows the target's files."""
    other = make_engine(tiny_decoder(heads=4, kv_heads=4))
    with pytest.raises(CheckpointError, match=r"cross_out.weight: expected shape \(32, 64\), found \(32, 96\)"):
        make_drafter(spec()).bind(other.target)
