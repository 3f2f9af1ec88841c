"""CAPE against section 4.2 and appendix A of the paper: numbers of siblings, the mask, and forward
passes.
"""

import math
import random
from typing import Any

import numpy as np
import pytest

from drafting.drafting import bound, context, decode, dense, paths, watch_draft, watched
from drafting.from_draft.drafts import draft_folder
from drafting.helpers import bind, within
from drafting.helpers import context as plain_context
from drafting.scripted import Scripted, drafted
from pronk.drafting import make_drafter
from pronk.drafting.from_draft.draft_model import DraftModel, ModelProposer
from pronk.drafting.ledger import RequestLedger
from pronk.lab.drafters.cape import Cape
from pronk.sampling.noise import gumbel_noise
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from softmax import softmax
from tiny_models import VOCAB

FAIR = 0.03
MODEL = f"draft_model(model={draft_folder(FAIR)!r}, num_tokens=4)"
OTHERS = tuple(range(20, 40))


def above(value: float) -> float:
    return math.nextafter(value, 2.0)


def below(value: float) -> float:
    return math.nextafter(value, 0.0)


@pytest.mark.parametrize(
    ("sizes", "confidence", "count"),
    [
        ("paper", 1e-6, 7),
        ("paper", 0.3, 7),
        ("paper", above(0.3), 5),
        ("paper", 0.6, 5),
        ("paper", above(0.6), 3),
        ("paper", 0.8, 3),
        ("paper", above(0.8), 1),
        ("paper", 1.0, 1),
        # Appendix A counts the chain's token, too: 8 8 8 8 6 6 6 6 4 4 2 tokens for floor(10 p) =
        # 0..10.
        ("fine", 1e-6, 7),
        ("fine", below(0.4), 7),
        ("fine", 0.4, 5),
        ("fine", below(0.8), 5),
        ("fine", 0.8, 3),
        ("fine", below(0.9), 3),
        ("fine", 0.95, 3),
        ("fine", below(1.0), 3),
        ("fine", 1.0, 1),
        (4, 1e-6, 4),
        (4, 1.0, 4),
    ],
)
def test_the_number_of_siblings_falls_with_the_confidence(
    sizes: str | int, confidence: float, count: int
) -> None:
    drafter = bind(Cape((Scripted((drafted(1, confidence, *OTHERS, vocab=50),)),), sizes=sizes))
    (tree,) = drafter.propose([plain_context(drafter.start([0]), [0])])
    assert tree.tokens == (0, 1, *OTHERS[:count])
    assert tree.parents == (-1, *(0,) * (count + 1))


def test_impossible_tokens_are_no_siblings() -> None:
    drafter = bind(Cape((Scripted((drafted(1, 0.2, 5, 6, vocab=50), drafted(2, 0.2, vocab=50))),)))
    (tree,) = drafter.propose([plain_context(drafter.start([0]), [0])])
    assert paths(tree) == {(1,), (5,), (6,), (1, 2)}


def linearized(chain: int, expansion: list[int]) -> np.ndarray[Any, Any]:
    """Return the paper's attention mask: rows of the chain, then ``expansion[i]`` siblings of each
    chain token.
    """
    pos = [*range(1, chain + 1)] + [i for i, size in enumerate(expansion, 1) for _ in range(size)]
    beta = len(pos)
    mask = np.zeros((beta, beta), dtype=bool)
    for i in range(1, beta + 1):
        for j in range(1, beta + 1):
            mask[i - 1, j - 1] = (j <= chain and pos[i - 1] > j) or i == j
    return mask


def expanded(confidences: list[float], **options: Any) -> TokenTree:
    script = tuple(drafted(token, c, *OTHERS, vocab=50) for token, c in enumerate(confidences, 1))
    drafter = bind(Cape((Scripted(script),), **options))
    (tree,) = drafter.propose([plain_context(drafter.start([0]), [0])])
    return tree


def test_the_mask_of_the_paper() -> None:
    """The three tokens of the chain have one, three and five siblings; the paper's mask has no row
    for the root.
    """
    tree = expanded([0.9, 0.7, 0.5])
    assert tree.parents == (-1, 0, 1, 2, 0, 1, 1, 1, *(2,) * 5)
    assert tree.visible[:, 0].all()
    assert not tree.visible[0, 1:].any()
    drawn = ["x..", "xx.", "xxx", "...", "x..", "x..", "x..", "xx.", "xx.", "xx.", "xx.", "xx."]
    got = tree.visible[1:, 1:]
    for i in range(12):
        for j in range(12):
            assert got[i, j] == (drawn[i][j] == "x" if j < 3 else i == j), (i, j)
    assert (got == linearized(3, [1, 3, 5])).all()


def test_the_mask_of_random_expansions() -> None:
    dice = random.Random(0)
    for _ in range(100):
        confidences = [1 - dice.random() for _ in range(dice.randint(1, 9))]
        most = dice.randint(len(confidences), 60)
        tree = expanded(confidences, max_nodes=most, sizes=dice.choice(("paper", "fine")))
        counts = [
            sum(parent == depth for parent in tree.parents) - 1 for depth in range(len(confidences))
        ]
        assert (tree.visible[1:, 1:] == linearized(len(confidences), counts)).all()


def test_the_tree_has_32_draft_tokens_at_most_the_chain_first() -> None:
    tree = expanded([0.1] * 9)
    assert tree.num_draft_tokens == 32
    assert tree.tokens[:10] == tuple(range(10))
    assert [sum(parent == depth for parent in tree.parents) - 1 for depth in range(9)] == [
        7,
        7,
        7,
        2,
        0,
        0,
        0,
        0,
        0,
    ]
    assert expanded([0.1] * 9, max_nodes=5).tokens == (0, 1, 2, 3, 4, 5)
    assert expanded([0.1] * 40).tokens == tuple(range(33))


def ranking(tokens: list[int], params: SamplingParams) -> tuple[list[int], float]:
    """Return the draft's tokens after a text by falling score, and the probability of the first
    one.
    """
    scores = dense(FAIR)(tokens) / (params.temperature or 1.0)
    if params.temperature and not params.rejects:
        scores = scores + gumbel_noise(params.seed or 0, len(tokens), np.arange(VOCAB))
    return np.argsort(-scores).tolist(), float(softmax(scores).max())


def size_of(confidence: float) -> int:
    for least, size in ((0.8, 1), (0.6, 3), (0.3, 5)):
        if confidence > least:
            return size
    return 7


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
def test_siblings_are_the_next_likeliest_tokens(temperature: float) -> None:
    """Under the coupled rule the order includes the target's noise."""
    engine, drafter = watched(f"cape({MODEL}, max_nodes=30)")
    (request,) = decode(engine, drafter, [[1, 2, 3]], temperature=temperature)
    siblings = 0
    for asked in drafter.of(request):
        want = set[tuple[int, ...]]()
        here = list(asked.tokens)
        chain = min(4, asked.depth, asked.nodes)
        room = min(30, asked.nodes) - chain
        for _ in range(chain):
            above = tuple(here[len(asked.tokens) :])
            (order, confidence) = ranking(here, request.params)
            count = min(room, size_of(confidence))
            room -= count
            want |= {(*above, token) for token in order[: count + 1]}
            siblings += count
            here.append(order[0])
        assert paths(asked.tree) == want
    assert siblings > 40
    assert (
        sum(
            each.accepted for name, each in request.stats.sources.items() if name.startswith("cape")
        )
        > 0
    )


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_siblings_take_no_forward_pass_of_the_draft(rule: Any) -> None:
    params = SamplingParams(temperature=0.9, seed=3, rule=rule)
    passes = []
    trees = []
    for spec in (MODEL, f"cape({MODEL})", f"cape(threshold({MODEL}, threshold=0.05))"):
        drafter = bound(spec)
        (inner,) = within(drafter, ModelProposer)
        seen = watch_draft(inner.draft)
        trees += drafter.propose([context(drafter, [1, 2, 3], params=params, depth=4)])
        passes.append([each.texts for each in seen])
    assert passes[0] == passes[1]
    assert trees[1].tokens[:5] == trees[0].tokens
    assert trees[1].num_draft_tokens > trees[0].num_draft_tokens == 4
    assert len(passes[2]) == sum(origin.startswith("draft_model") for origin, _ in trees[2].origin)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_siblings_of_drawn_tokens_are_point_masses(rule: Any) -> None:
    """Siblings are the likeliest other tokens; their number depends on the largest probability."""
    drafter = bound(f"cape({MODEL})")
    firsts = set[int]()
    order, confidence = ranking([1, 2, 3], SamplingParams(temperature=1.3, rule="rejection"))
    for seed in range(20):
        params = SamplingParams(temperature=1.3, seed=seed, rule=rule)
        (tree,) = drafter.propose([context(drafter, [1, 2, 3], params=params, depth=1)])
        assert tree.probs is not None
        assert tree.probs[0] is None
        np.testing.assert_allclose(tree.probs[1], softmax(dense(FAIR)([1, 2, 3]) / 1.3), rtol=1e-12)
        assert all(q is None for q in tree.probs[2:])
        others = [token for token in order if token != tree.tokens[1]]
        assert list(tree.tokens[2:]) == others[: size_of(confidence)]
        firsts.add(tree.tokens[1])
    assert len(firsts) > 1


@pytest.mark.parametrize("right", [True, False])
def test_gains_of_siblings_follow_their_acceptance(right: bool) -> None:
    drafter = bind(Cape((Scripted((drafted(1, 0.9, 5, vocab=50), drafted(2, 0.9, 6, vocab=50))),)))
    state = drafter.start([0])
    ledger = RequestLedger()
    gains = list[float]()
    for _ in range(6):
        (tree,) = drafter.propose([plain_context(state, [0], ledger=ledger)])
        assert tree.tokens == (0, 1, 2, 5, 6)
        assert tree.gain is not None
        assert tree.gain[1] < tree.gain[0] == 1.0
        assert tree.gain[4] == pytest.approx(tree.gain[1] * tree.gain[3])
        gains.append(tree.gain[3])
        ledger.acceptance.propose(drafter.label, (), tree)
        ledger.acceptance.advance([5 if right else 9, 9])
    assert gains == sorted(gains, reverse=not right)
    assert gains[-1] > 2 * gains[0] if right else gains[-1] < gains[0]


def test_default_options() -> None:
    made = make_drafter("cape")
    assert made.parts == (DraftModel(),)
    assert (made.sizes, made.max_nodes) == ("paper", 32)
