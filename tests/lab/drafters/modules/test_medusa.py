"""Medusa heads against slow ones, and their sizes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab.drafters.modules.programs import export_weights, run_program
from pronk import LLM
from pronk.base.convert import to_array
from pronk.base.errors import OptionError
from pronk.lab.drafters.modules.heads import MedusaHeads, MedusaShape
from pronk.models.linear import Norm
from pronk.train.modules.drafters import MedusaModule
from train.tiny_modules import tiny_module


def random_heads(shape: MedusaShape) -> MedusaModule:
    decoder = tiny_module()
    heads = MedusaModule(shape, decoder.config)
    heads.initialize(decoder.head.weight)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in heads.layers.parameters():
            parameter.normal_(0.0, 0.1, generator=generator)
        for own in heads.unembeddings:
            own.weight += 0.1 * torch.randn(own.weight.shape, generator=generator)
    return heads


@pytest.mark.parametrize("unembeddings", ["shared", "replicated"])
@torch.no_grad()
def test_heads_equal_a_slow_reference(unembeddings: str, tmp_path: Path) -> None:
    decoder = tiny_module()
    shape = MedusaShape(3, 2, unembeddings)
    config = decoder.config
    module = random_heads(shape)
    read = export_weights(module, tmp_path / "drafter")
    core = MedusaHeads(shape, config, read)
    read.check_all_read()
    before = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(1))
    norm = Norm(to_array(decoder.norm.weight), None, config.norm_eps)
    hidden = decoder.norm(before)
    own = module.unembeddings if unembeddings == "replicated" else [decoder.head] * 3
    logits = torch.stack(
        [last(head(hidden)) for head, last in zip(module.layers, own, strict=True)]
    )
    weights = module.state_dict()
    for number in range(3):
        rows = run_program(
            lambda program, n=number: core.compile(n, norm, program), config, before.numpy()
        )
        for row in range(5):
            h = hidden[row]
            for block in range(2):
                z = (
                    weights[f"layers.{number}.blocks.{block}.weight"] @ h
                    + weights[f"layers.{number}.blocks.{block}.bias"]
                )
                h = h + z / (1 + (-z).exp())
            last = (
                decoder.head.weight
                if unembeddings == "shared"
                else weights[f"unembeddings.{number}.weight"]
            )
            assert torch.allclose(logits[number, row], last @ h, atol=1e-3)
            np.testing.assert_allclose(rows[row], h.numpy(), rtol=1e-4, atol=1e-4)
        if core.unembeddings:
            assert np.array_equal(core.unembeddings[number].packed.unpack(), last.numpy())
    assert len({int(each.argmax()) for each in logits[:, 0]}) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "heads: expected an integer in 1..16, found 0"),
        ({"num_heads": True}, "heads: expected an integer in 1..16, found True"),
        ({"blocks": 9}, "blocks: expected an integer in 1..8, found 9"),
        (
            {"unembeddings": "tied"},
            "unembeddings: expected one of shared, replicated, found 'tied'",
        ),
        (
            {"num_heads": 2, "accuracies": ((0.5,),)},
            "accuracies: expected those of 2 heads, found 1",
        ),
    ],
)
def test_invalid_shapes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        MedusaShape(**options)


def test_lists_become_tuples() -> None:
    shape = MedusaShape(2, tree=[[0], [0, 1]], accuracies=[[0.5, 0.1], [0.2]])  # type: ignore[arg-type]
    assert shape == MedusaShape(2, tree=((0,), (0, 1)), accuracies=((0.5, 0.1), (0.2,)))


def test_the_heads_of_pronk_tiny_are_small() -> None:
    heads = MedusaModule(MedusaShape(), LLM().config)
    assert 2 * sum(parameter.numel() for parameter in heads.parameters()) <= 4_000_000
