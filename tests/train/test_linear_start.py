"""The first weights of an EAGLE-3 head: the closed forms, and a head that computes their
prediction.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from drafting.from_target.trained_eagle import HIDDEN
from pronk.base.errors import OptionError
from pronk.drafting.from_target.modules.eagle_config import EagleConfig
from pronk.train.attention import ChainAttention
from pronk.train.corpus.answers import Dialogue
from pronk.train.head_plan import begin_linear, fit
from pronk.train.modules.decoder import DecoderModule
from pronk.train.modules.eagle import EagleModule, LinearStart, low_rank
from pronk.train.target_states import TargetStates
from tiny_models import VOCAB
from train.tiny_modules import tiny_module

SOURCES = 2


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_the_fit_is_that_of_numpy(generator: torch.Generator) -> None:
    x, e = (torch.randn(500, size, generator=generator) for size in (12, 6))
    z = torch.randn(500, 6, generator=generator) + x[:, :6] + 2 * e
    x *= torch.arange(1, 13)  # unequal channels
    z[:, 0] *= 50
    start, balance, channels = fit([(x[:200], e[:200], z[:200]), (x[200:], e[200:], z[200:])])
    torch.testing.assert_close(balance, x.square().mean(0).rsqrt(), rtol=1e-3, atol=0.0)
    torch.testing.assert_close(channels, z.square().mean(0).sqrt(), rtol=1e-3, atol=0.0)
    inputs = torch.cat((x * balance, e), dim=1).numpy()
    wanted = np.linalg.lstsq(inputs, (z / channels).numpy(), rcond=None)[0]
    found = torch.cat((start.from_hidden, start.from_embedding), dim=1).T
    np.testing.assert_allclose(found, wanted, atol=0.01)
    assert start.scale == pytest.approx(np.sqrt(np.square(inputs @ wanted).mean()), rel=0.01)
    torch.testing.assert_close(start.embeddings, e.T @ e / 500)


def test_prompts_as_long_as_the_sequences_are_refused(generator: torch.Generator) -> None:
    target = tiny_module(windows=(None,) * 4)
    module = new_module(target, generator)
    dialogues = [Dialogue(0, 0.0, list(range(80)), [(60, 80)])]

    def states(ids: Sequence[int], first: int) -> TargetStates:
        raise AssertionError

    with pytest.raises(OptionError, match="length: expected more tokens than the prompts of the d"):
        begin_linear(module, target, states, dialogues, 60, generator)  # type: ignore[arg-type]


def test_the_product_of_low_rank_is_the_best_one(generator: torch.Generator) -> None:
    """A little change of either factor never lowers the error; at full rank there is none."""
    matrix = torch.randn(8, 8, generator=generator)
    inputs = torch.randn(300, 8, generator=generator)
    inputs *= torch.arange(1, 9)  # unequal channels
    moments = inputs.T @ inputs / 300

    def error(left: torch.Tensor, right: torch.Tensor) -> float:
        return float((inputs @ (left @ right - matrix).T).square().mean())

    left, right = low_rank(matrix, moments, 3)
    assert left.shape == (8, 3)
    best = error(left, right)
    for _ in range(20):
        change = 0.05 * torch.randn(8, 3, generator=generator)
        assert error(left + change, right) > best
        assert error(left, right + change.T) > best
    u, s, v = torch.linalg.svd(matrix)
    assert best < 0.9 * error(u[:, :3] * s[:3], v[:3])
    assert error(*low_rank(matrix, moments, 20)) < 1e-6


def new_module(target: DecoderModule, generator: torch.Generator) -> EagleModule:
    """Return a head whose values have full rank."""
    config = replace(
        target.config, family="llama", num_layers=1, intermediate_size=48, num_heads=8, num_kv_heads=4, head_dim=16,
        windows=(None,), rope=replace(target.config.rope, dim=16),
    )  # fmt: skip
    eagle = EagleConfig("eagle3", config, 100, HIDDEN, (1, 2), fc_norm=True)
    module = EagleModule(eagle, SOURCES, torch.arange(100))
    module.initialize(target, generator)
    return module


def test_the_first_weights_predict_all_channels(generator: torch.Generator) -> None:
    """One channel of the target's last output is large and nearly constant, as in Gemma 3."""
    target = tiny_module(windows=(None,) * 4)
    module = new_module(target, generator)
    weight = target.norm.get_parameter("weight")
    a = torch.randn(HIDDEN, SOURCES * HIDDEN, generator=generator) / HIDDEN
    b = torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN

    def states(ids: Sequence[int], first: int) -> TargetStates:
        hidden = torch.randn(len(ids), SOURCES * HIDDEN, generator=generator)
        hidden[:, 0] += 5
        x = F.rms_norm(hidden.unflatten(-1, (SOURCES, HIDDEN)), (HIDDEN,)).flatten(1)
        e = F.rms_norm(target.embedding[torch.tensor(ids[first:])], (HIDDEN,))
        output = x[first - 1 : -1] @ a.T + e @ b.T
        output[:, 0] += 80
        last = F.rms_norm(output, (HIDDEN,), weight)
        return TargetStates(hidden, last, torch.zeros(len(last), dtype=torch.int32))

    dialogues = [
        Dialogue(n, 0.0, torch.randint(VOCAB, (60,), generator=generator).tolist(), [(2, 60)])
        for n in range(40)
    ]
    begin_linear(module, target, states, dialogues, 60, generator)  # type: ignore[arg-type]
    ids = dialogues[0].ids
    found = states(ids, 1)
    rows = len(ids) - 1
    with torch.no_grad():
        attend = ChainAttention([rows], [torch.arange(rows)])
        embedding = target.embedding[torch.tensor(ids[1:])]
        feature = module.fuse(found.hidden[:-1])
        out = module(embedding, feature, torch.arange(rows), attend)
        normed, _ = module.read_out(out)
    errors = (normed - found.last).square().mean(0) / found.last.square().mean(0)
    assert errors.max() < 0.2


def test_a_head_begins_with_the_prediction(generator: torch.Generator) -> None:
    """Values of full rank: the output of the head is the prediction, up to the attention to other
    rows.
    """
    target = tiny_module(windows=(None,) * 4)
    module = new_module(target, generator)
    a = 0.1 * torch.randn(HIDDEN, SOURCES * HIDDEN, generator=generator)
    b = 0.2 * torch.randn(HIDDEN, HIDDEN, generator=generator)
    channels = torch.rand(HIDDEN, generator=generator)
    module.begin_linear(LinearStart(a, b, torch.eye(HIDDEN), 0.5), channels, target, generator)
    rows = 40
    hidden, embedding = (
        torch.randn(rows, size, generator=generator) for size in (SOURCES * HIDDEN, HIDDEN)
    )
    with torch.no_grad():
        attend = ChainAttention([rows], [torch.arange(rows)])
        out = module(embedding, module.fuse(hidden), torch.arange(rows), attend)
        x = F.rms_norm(hidden.unflatten(-1, (SOURCES, HIDDEN)), (HIDDEN,)).flatten(1)
        wanted = x @ a.T + F.rms_norm(embedding, (HIDDEN,)) @ b.T
    assert F.cosine_similarity(out, wanted).min() > 0.8
    assert float((out - wanted).square().mean() / wanted.square().mean()) < 0.1
    expected = 0.5 * channels * target.norm.get_parameter("weight")
    torch.testing.assert_close(module.norm.weight, expected)
    assert not module.layers[0].mlp.get_parameter("down_proj.weight").any()
