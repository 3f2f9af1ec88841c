"""Trained heads on the device, against their programs of the processor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafting.drafting import Watched
from drafting.from_target.trained_eagle import (
    Form,
    bigram_module,
    copying_folder,
    random_head,
    write_head,
)
from gpu.tiny_gpu import gpu_engine
from pronk import OptionError
from pronk.cache.blocks import BlockTable
from pronk.drafting import make_drafter
from pronk.drafting.from_target._eagle_runner import EagleRunner
from pronk.engine.engine import Engine
from pronk.gpu import head as module
from pronk.gpu.chains import Chains
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from tiny_models import VOCAB, decoder_of, kernels, make_engine, make_request, run

pytestmark = pytest.mark.usefixtures("small_tiles")

PROMPTS = ([1, 2, 3, 9, 4], [5, 8])
# Texts that the first pass of a chain reads; a head reads the rows of longer ones before.
SHORT = ([2, 9, 4], [5, 8])
FORMS = {
    "flags": Form(
        fc_norm=True,
        norm_before_residual=True,
        qk_norm=True,
        bias=True,
        layers=2,
        own_embedding=True,
    ),
    "wide": Form(norm_before_fc=True, norm_output=True, layers=2, wide=2, embedding_first=False),
    "mtp": Form("mtp", draft=VOCAB, own_head=False, norm_output=True, zero_first=True),
}


def decode(engine: Engine, spec: str, prompts: Sequence[Sequence[int]], **options: Any) -> Watched:
    """Decode prompts in one batch with a drafter, and return its proposals."""
    drafter = Watched(make_drafter(spec).bind(engine.target))
    requests = [
        make_request(prompt, SamplingParams(seed=seed, **options), drafter)
        for seed, prompt in enumerate(prompts)
    ]
    run(engine, requests)
    assert sum(request.stats.accepted for request in requests) > len(prompts)
    return drafter


def processor() -> Engine:
    return make_engine(decoder_of(bigram_module(), kernels()))


def device() -> Engine:
    return gpu_engine(module=bigram_module())


@pytest.mark.parametrize(("kind", "count"), [("eagle3", 2), ("mtp", 1)])
def test_the_chains_of_a_step_are_one_graph(
    kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft tokens are those of the processor, without a pass of the head for each of them."""
    options = {"max_tokens": 5, "temperature": 0.8}
    spec = f"{kind}(model={copying_folder(kind)!r}, num_tokens=3)"
    want = decode(processor(), spec, SHORT[:count], **options)
    monkeypatch.setattr(Chains, "draft", padded(Chains.draft))
    monkeypatch.setattr(module.GpuHead, "run", lambda *_: pytest.fail("expected no single pass"))
    got = decode(device(), spec, SHORT[:count], **options)
    assert [*got.asked.values()] == [*want.asked.values()]


def padded(draft: Any) -> Any:
    """Return :meth:`Chains.draft` with the sizes that it has on a GPU."""

    def draft_padded(chains: Chains, *arguments: Any) -> Any:
        chains.pads = True
        return draft(chains, *arguments)

    return draft_padded


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_trees_of_a_batch_are_those_of_the_processor(kind: str) -> None:
    spec = f"{kind}(model={copying_folder(kind)!r}, num_tokens=2, num_nodes=5, beam=2)"
    want = decode(processor(), spec, PROMPTS, max_tokens=6)
    got = decode(device(), spec, PROMPTS, max_tokens=6)
    assert [*got.asked.values()] == [*want.asked.values()]


def head_runner(engine: Engine, folder: Path, kind: str, weights: str) -> EagleRunner:
    spec = f"{kind}(model={str(folder)!r}, weights={weights!r})"
    drafter: Any = make_drafter(spec).bind(engine.target)
    runner: EagleRunner = drafter.runner
    return runner


@pytest.mark.parametrize(
    ("form", "weights", "tolerance"),
    [
        *[(form, "plain", 1e-3) for form in FORMS],
        # the processor rounds the factors of quantized weights to 8 bits
        ("flags", "int8", 0.03),
        ("mtp", "int4", 0.03),
    ],
)
def test_passes_are_those_of_the_processor(
    form: str, weights: str, tolerance: float, tmp_path: Path
) -> None:
    """Outputs and logits of two texts, and the features that the target saves for the head."""
    kind = FORMS[form].kind
    layout = "speculators" if kind == "eagle3" else "mtp"
    folder = write_head(random_head(FORMS[form]), tmp_path, layout)
    found = []
    for engine in (processor(), device()):
        runner = head_runner(engine, folder, kind, weights)
        tables = [BlockTable(), BlockTable()]
        entries = list[BatchEntry]()
        for table, tokens in zip(tables, PROMPTS, strict=True):
            engine.cache.prepare(table, len(tokens))
            entries.append(BatchEntry(table, TokenTree.chain(tokens)))
        engine.runner.forward(ForwardBatch(entries))
        features = [
            engine.cache.read_feature(runner.feature, table, 0, len(tokens))
            for table, tokens in zip(tables, PROMPTS, strict=True)
        ]
        pool = runner.module.pool
        own = [BlockTable(), BlockTable()]
        rows = list[BatchEntry]()
        for table, tokens in zip(own, PROMPTS, strict=True):
            pool.prepare(table, len(tokens))
            rows.append(BatchEntry(table, TokenTree.chain(tokens), range(1, len(tokens))))
        outputs, logits = runner._run(ForwardBatch(rows), np.concatenate(features))
        found.append([*features, outputs, np.stack([each.values for each in logits])])
    for want, got in zip(*found, strict=True):
        assert got.shape == want.shape
        assert np.abs(got - want).max() < tolerance * np.abs(want).max()


def test_heads_of_two_stages_are_refused() -> None:
    target = device().target
    spec = f"eagle3(model={copying_folder()!r}, num_clusters=8)"
    with pytest.raises(
        OptionError, match=r"^eagle3: expected a head of one stage for a target on "
    ):
        make_drafter(spec).bind(target)
