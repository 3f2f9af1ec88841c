"""Medusa's tree against what the heads say without an engine; equality with plain decoding; what is refused."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.drafting import assert_plain, bound, decode, paths, watched
from drafters.from_draft.drafts import draft_folder
from drafters.from_target.trained_medusa import SHAPE, TREE, medusa_folder, plain_heads, spec, write_heads
from drafters.helpers import context
from engine.cases import total
from engine.test_rejection_law import DRAW, PROMPT, SMALL, law_of, p_value
from pronk.drafters import DraftContext, Medusa, Outcome, make_drafter
from pronk.drafters.from_target.medusa import MedusaProposer, MedusaState
from pronk.drafters.from_target.modules.medusa import MedusaHeads
from pronk.drafters.shared.rank_tree import best_paths
from pronk.errors import CheckpointError, OptionError
from pronk.models.fingerprint import Fingerprint
from pronk.sampling.noise import gumbel_noise
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import Sampler
from pronk.speculation.tree import TokenTree
from pronk.train.attention import dense_hidden
from pronk.train.export import export_drafter
from tiny_models import VOCAB, context_of, make_engine, make_request, run, samples, tiny_config, tiny_decoder

PROMPTS = [[1, 2, 3], [5] * 20, [9, 8, 7, 9, 8, 7, 9, 8]]
# Few tokens are likely, so that a tree of nine finds some of them.
LIKELY = dict.fromkeys(range(5), 30.0)


def with_heads(**options: Any) -> str:
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"medusa(model={medusa_folder()!r}{given})"


@cache
@torch.no_grad()
def last_hidden(text: tuple[int, ...]) -> Tensor:
    """``[hidden]`` of the target at the last token of ``text``, after the final norm, by torch."""
    decoder = tiny_decoder(packed=False)
    return decoder.norm(dense_hidden(decoder, torch.tensor([text])))[-1]


def ranking(text: list[int], params: SamplingParams, depth: int) -> list[int]:
    """Tokens by falling score as head number ``depth`` has them, from the state before the last token of ``text``."""
    hidden, head = last_hidden(tuple(text[:-1]))[None], tiny_decoder(packed=False).head
    logits = plain_heads(medusa_folder()).logits(hidden, head)[depth - 1, 0].clone()
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if params.greedy:
        return logits.argsort(descending=True).tolist()
    ids = torch.arange(len(logits))
    noise = 0.0 if params.rejects else gumbel_noise(params.seed or 0, len(text) + depth - 1, ids)
    return ((logits / params.temperature).double() + noise).argsort(descending=True).tolist()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9}, {"temperature": 0.9, "logit_bias": LIKELY}])
def test_nodes_are_the_tokens_of_their_ranks(options: dict[str, Any]) -> None:
    """From the last accepted node's hidden state, with the target's noise; the first pass is the prompt's."""
    engine, drafter = watched(spec())
    requests = decode(engine, drafter, PROMPTS, **options)
    for request in requests:
        asked = drafter.of(request)
        assert asked[0].tree.num_draft_tokens > 0
        for each in asked:
            order = [ranking(each.tokens, request.params, depth) for depth in (1, 2, 3)]
            kept = [path for path in (*TREE[:1], *TREE[2:3], *TREE[6:7], *TREE) if len(path) <= each.depth]
            want = {tuple(order[i][rank] for i, rank in enumerate(path)) for path in dict.fromkeys(kept)}
            assert paths(each.tree) == want
    if "logit_bias" in options:
        assert total(requests, "accepted") > 20
        assert total(requests, "moved") > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_output_is_that_of_plain_decoding(temperature: float) -> None:
    """For windows, several samples of a prompt, heads with unembeddings of their own, and less precise weights."""
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=24, logit_bias=LIKELY, n=3)
    accepted = 0
    for model, variant in (
        (medusa_folder(), {"windows": (16, 16)}),
        (medusa_folder(), {"dtype": torch.bfloat16}),
        (medusa_folder("replicated"), {}),
    ):
        engine = make_engine(tiny_decoder(**variant))
        drafter = make_drafter(f"medusa(model={model!r})").bind(engine.target)
        for prompt in (PROMPTS[0], PROMPTS[1] * 3):
            got = samples(prompt, params, drafter)
            run(engine, got)
            assert_plain(engine, got)
            assert total(got, "drafted") > 0
            accepted += total(got, "accepted")
    assert accepted > 20


@pytest.mark.parametrize("rule", [pytest.param("rejection", marks=pytest.mark.slow), "block"])
def test_strings_have_the_law_of_the_model(rule: Any) -> None:
    decoder = tiny_decoder(vocab=SMALL)
    engine = make_engine(decoder, max_batch=600, num_blocks=3000)
    drafter = make_drafter(f"medusa(model={medusa_folder(vocab=SMALL)!r})").bind(engine.target)
    given = replace(DRAW, rule=rule)
    strings = [make_request(PROMPT, replace(given, seed=seed), drafter, vocab=SMALL) for seed in range(600)]
    run(engine, strings)
    assert p_value(strings, law_of("temperature")) > 1e-3
    assert len(strings) / 5 < total(strings, "accepted") < total(strings, "drafted") / 2
    assert total(strings, "moved") > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_guesses_are_point_masses_and_know_nothing_of_the_draws(rule: Any) -> None:
    trees = {proposal(bound(spec()), SamplingParams(temperature=0.9, seed=seed, rule=rule)) for seed in range(5)}
    assert {tree.probs for tree in trees} == {None}
    assert len({tree.tokens for tree in trees}) == 1
    coupled = {proposal(bound(spec()), SamplingParams(temperature=0.9, seed=seed)).tokens for seed in range(5)}
    assert len(coupled) > 1


def heard(
    drafter: MedusaProposer, tokens: list[int], tree: TokenTree | None = None, path: tuple[int, ...] = ()
) -> MedusaState:
    """The state after a pass over ``tree``, which hangs below the text ``tokens``."""
    state, tree = drafter.start(tokens[:1]), tree or TokenTree.chain(tokens[-1:])
    rows = [[*tokens, *(tree.tokens[i] for i in tree.path(node))] for node in range(len(tree))]
    hidden = {2: torch.stack([torch.full((tiny_config().hidden_size,), float(sum(row))) for row in rows])}
    drafter.observe(Outcome(state, tree, path, (), len(tokens) - 1, SamplingParams(), hidden=hidden))
    return state


def seen(
    drafter: MedusaProposer, state: MedusaState, tokens: list[int], params: SamplingParams, **limits: int
) -> TokenTree:
    sampler = Sampler(params, params.seed or 0, tokens, VOCAB)
    (tree,) = drafter.propose([replace(context(state, tokens, params=params, **limits), sampler=sampler)])
    assert context_of(sampler) == tokens
    return tree


def proposal(drafter: MedusaProposer, params: SamplingParams | None = None, **limits: int) -> TokenTree:
    return seen(drafter, heard(drafter, [4]), [4, 6], params or SamplingParams(), **limits)


def test_the_state_is_that_of_the_last_accepted_node() -> None:
    drafter = bound(spec())
    tree = TokenTree((2, 5, 6, 7), (-1, 0, 0, 2))
    for path, row, position in (((), 3, 1), ((1,), 8, 2), ((2, 3), 16, 3)):
        state = heard(drafter, [1, 2], tree, path)
        assert state.hidden is not None
        assert state.hidden.tolist() == [float(row)] * tiny_config().hidden_size
        assert state.position == position
        text = [1, 2, *(tree.tokens[i] for i in path), 9]
        assert seen(drafter, state, text, SamplingParams()).num_draft_tokens == len(TREE)
        # The target took back what was provisional, or wrote on without a word.
        for other in (text[:-1], [*text, 3]):
            assert seen(drafter, state, other, SamplingParams()).tokens == (other[-1],)
    assert seen(drafter, drafter.start([1, 2]), [1, 2], SamplingParams()).tokens == (2,)


def test_the_chain_comes_first_and_gains_are_products() -> None:
    drafter = bound(spec())
    state = heard(drafter, [4])
    tree = seen(drafter, state, [4, 6], SamplingParams(temperature=0.7, seed=1))
    assert tree.parents == (-1, 0, 1, 2, 0, 0, 1, 4, 0, 2)
    assert tree.main_chain == 4
    assert tree.gain is not None
    assert tree.origin is not None
    for node in range(1, len(tree)):
        parent, depth = tree.parents[node], tree.depths[node]
        assert tree.origin[node][0] == f"medusa {depth}"
        rate = state.calibrations[depth - 1].rate(tree.origin[node])
        assert tree.gain[node] == pytest.approx(tree.gain[parent] * rate)
    before = [each.bias for each in state.calibrations]
    drafter.observe(Outcome(state, tree, (1,), (), 1, SamplingParams(), hidden={2: torch.ones(len(tree), 64)}))
    after = [each.bias for each in state.calibrations]
    assert after[0] != before[0]
    assert after[1] < before[1]
    assert after[2] == before[2]


def test_it_rests_where_the_engine_keeps_nothing() -> None:
    """After a tree in vain 2 steps, then 4, up to 32; others' guesses are no reason; without a budget it goes on."""
    drafter = bound(spec())
    state, text = heard(drafter, [4]), [4, 6]

    def offers(*, thrifty: bool) -> bool:
        (tree,) = drafter.propose([replace(context(state, text), prune_unprofitable=thrifty)])
        return tree.num_draft_tokens > 0

    def hear(tree: TokenTree, *path: int) -> None:
        hidden = {2: torch.ones(len(tree), tiny_config().hidden_size)}
        drafter.observe(Outcome(state, tree, path, (), len(text) - 1, SamplingParams(), hidden=hidden))
        text.append(1)

    rests, steps = list[int](), 0
    while len(rests) < 6:
        assert offers(thrifty=False)
        if offers(thrifty=True):
            rests, steps = [*rests, steps], 0
        else:
            steps += 1
        hear(TokenTree.chain(text[-1:]))
    assert rests == [0, 2, 4, 8, 16, 32]
    hear(TokenTree.chain([text[-1], 5, 5]))  # another drafter's, which counts as one more step
    while not offers(thrifty=True):
        hear(TokenTree.chain(text[-1:]))
    for _ in range(3):
        hear(TokenTree.chain([text[-1], 5, 5]))
        assert offers(thrifty=True)
    (tree,) = drafter.propose([context(state, text)])
    hear(tree)
    hear(TokenTree.chain(text[-1:]))
    assert state.backoff.steps == 2


def test_limits() -> None:
    drafter = bound(spec())
    whole = proposal(drafter)
    assert proposal(drafter, depth=1).parents == (-1, 0, 0, 0, 0)
    assert proposal(drafter, depth=0).num_draft_tokens == proposal(drafter, nodes=0).num_draft_tokens == 0
    for nodes in range(1, len(TREE)):
        assert proposal(drafter, nodes=nodes).tokens == whole.tokens[: nodes + 1]
    assert max(proposal(bound(with_heads(num_tokens=2))).depths) == 2
    assert proposal(bound(with_heads(num_tokens=16))) == whole


def test_tokens_that_cannot_be_chosen_are_no_guesses() -> None:
    """Fewer tokens are left than the tree has ranks."""
    params = SamplingParams(temperature=1.0, top_k=2, seed=3)
    tree = proposal(bound(spec()), params)
    assert tree.parents == (-1, 0, 1, 2, 0, 1, 4, 2)
    assert proposal(bound(spec()), replace(params, top_k=1)).parents == (-1, 0, 1, 2)


def test_trees_of_one_s_own(tmp_path: Path) -> None:
    assert proposal(bound(with_heads(tree=((1,), (0,), (1, 2))))).parents == (-1, 0, 0, 2)
    assert make_drafter(with_heads(tree=[[0], [0, 1]])) == Medusa(medusa_folder(), tree=((0,), (0, 1)))
    accuracies = ((0.6, 0.2, 0.1), (0.4, 0.1), (0.3,))
    model = write_heads(tmp_path / "heads", replace(SHAPE, accuracies=accuracies))
    tree = proposal(bound(f"medusa(model={model!r}, tree=6)"))
    assert sorted(tree.depths[1:]) == sorted(len(path) for path in best_paths(accuracies, 6)) == [1, 1, 1, 2, 2, 3]


def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    with pytest.raises(OptionError, match=r"tree: expected paths of 1\.\.3 ranks in 0\.\.63, found \(0, 0, 0, 0\)"):
        bound(with_heads(tree=((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    def refused(folder: Path, message: str) -> None:
        with pytest.raises(CheckpointError, match=message) as caught:
            bound(f"medusa(model={str(folder)!r})")
        assert "\n" not in str(caught.value)

    folder = tmp_path / "heads"
    write_heads(folder, replace(SHAPE, tree=((0, 1),)))
    refused(folder, r"drafter\.json: medusa: tree: expected each path once .* found \(0, 1\) without")
    write_heads(folder, replace(SHAPE, tree=()))
    refused(folder, r"drafter\.json: medusa: tree: expected 1\.\.127 paths of ranks")
    write_heads(folder)
    document = json.loads((folder / "drafter.json").read_text())
    (folder / "drafter.json").write_text(json.dumps(document | {"shape": document["shape"] | {"blocks": 0}}))
    refused(folder, r"drafter\.json: blocks: expected 1 to 8, found 0")
    export_drafter(folder, MedusaHeads(replace(SHAPE, num_heads=2), tiny_config()), document, "")
    refused(folder, r"tensor layers\.2\.blocks\.0\.bias: expected shape \(64,\), found None")


def test_another_target_is_refused(tmp_path: Path) -> None:
    mine, other = Path(draft_folder(0.3)), Path(draft_folder(0.03))
    model = write_heads(tmp_path / "heads", target=Fingerprint.of(mine))
    drafter = make_drafter(f"medusa(model={model!r})")
    drafter.bind(make_engine(tiny_decoder(), folder=mine).target)
    with pytest.raises(OptionError, match=r"medusa: expected the target that .* was trained on") as caught:
        drafter.bind(make_engine(tiny_decoder(), folder=other).target)
    for folder in (mine, other):
        assert Fingerprint.of(folder).weights in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_batch_is_read_at_once() -> None:
    """All heads of all requests, and each request's tree is the one that it has alone."""
    drafter = bound(spec())
    texts = [[4, 6], [7, 7, 1], [2, 9]]
    contexts: list[DraftContext[Any]] = [context(heard(drafter, text[:-1]), text) for text in texts]
    calls = []
    drafter.loaded = Counting(drafter.loaded, calls)
    together = drafter.propose(contexts)
    assert calls == [3]
    assert together == [drafter.propose([each])[0] for each in contexts]


class Counting:
    """Counts the requests of each batch."""

    def __init__(self, loaded: Any, calls: list[int]) -> None:
        self.loaded, self.calls = loaded, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loaded, name)

    def logits(self, hidden: list[Tensor]) -> Tensor:
        self.calls.append(len(hidden))
        logits: Tensor = self.loaded.logits(hidden)
        return logits
