"""The device ``cuda``: what it refuses, and a whole model on it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import MakeCheckpoint, transformers_logits
from gpu.tiny_gpu import DEVICE, gpu_engine
from pronk import LLM, OptionError, SamplingParams
from pronk.base.arrays import FLOAT32
from pronk.cache.blocks import BlockTable
from pronk.cli.main import main
from pronk.drafting import load_draft_model
from pronk.engine.options import LLMOptions
from pronk.gpu import device
from pronk.gpu.device import GpuDevice, open_gpu
from pronk.gpu.runner import GpuRunner
from pronk.models.forward_batch import BatchEntry, ForwardBatch
from pronk.models.loader import load_decoder, read_config
from pronk.sampling.tree import TokenTree
from pronk.testing import tiny_checkpoint
from tiny_models import kernels

pytestmark = pytest.mark.usefixtures("small_tiles")

PLAIN = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "smollm3",
    "phi3",
    "gemma2",
    "gemma3_text",
    "granite",
]
TOKENS = [5, 17, 200, 31, 9, 64]


def runner_of(folder: Path, weights: str = "plain") -> GpuRunner:
    """Return the runner of a checkpoint, on the CPU."""
    config = read_config(folder)
    opened = GpuDevice(LLMOptions(folder, weights=weights), folder, config, kernels(), DEVICE)
    pool = opened.pool(config, kernels=kernels(), num_blocks=4, block_size=16, dtype=FLOAT32)
    decoder = load_decoder(folder, config, dtype=FLOAT32, kernels=kernels(), weights=weights)
    made = opened.make_runner(decoder, pool)
    assert isinstance(made, GpuRunner)
    return made


@pytest.mark.parametrize("family", PLAIN)
def test_logits_are_those_of_transformers(family: str, checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint(family)
    runner = runner_of(folder)
    table = BlockTable()
    runner.cache.prepare(table, len(TOKENS))
    entry = BatchEntry(table, TokenTree.chain(TOKENS), range(len(TOKENS)))
    got = runner.forward(ForwardBatch([entry])).logits[0][:]
    want = transformers_logits(folder, TOKENS)
    assert abs(got - want).max() < 1e-3 * abs(want).max()


def test_a_machine_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    folder = tiny_checkpoint(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "--model", str(folder), "--device", "cuda", "x"])
    line = "device: expected an NVIDIA GPU for 'cuda', found none; use device='cpu'"
    assert capsys.readouterr().err == f"pronk: error: {line}\n"
    with pytest.raises(OptionError, match="for 'cuda:x', found none"):
        LLM(folder, device="cuda:x")


def test_a_gpu_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.find_gpu("cuda:0") == device.find_gpu("cuda") == torch.device("cuda", 0)
    message = "^device: expected 'cuda', found 'cuda:1'; choose a GPU by CUDA_VISIBLE_DEVICES$"
    with pytest.raises(OptionError, match=message):
        device.find_gpu("cuda:1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_dtype": "int8"}, "kv_dtype: expected the default with device='cuda', found 'int8'"),
        ({"workers": 2}, "workers: expected the default with device='cuda', found 2"),
        ({"adapters": {"a": "b"}}, "adapters: expected the default with device='cuda'"),
        ({"prompt_cache": "x"}, "prompt_cache: expected the default with device='cuda'"),
    ],
)
def test_options_that_need_the_cpu(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "find_gpu", lambda name: DEVICE)
    folder = tiny_checkpoint(tmp_path)
    given = LLMOptions(folder, device="cuda", **options)
    with pytest.raises(OptionError, match=f"^{message}"):
        open_gpu(given, folder, FLOAT32, read_config(folder), kernels())


@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("mixtral", "mixtures of experts of mixtral"),
        ("lfm2", "short convolutions of lfm2"),
        ("qwen3_5_text", "recurrent layers of qwen3_5_text"),
    ],
)
def test_other_models_are_refused(
    family: str, found: str, checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "find_gpu", lambda name: DEVICE)
    folder = checkpoint(family)
    with pytest.raises(OptionError, match=f"found {found}; use device='cpu'$"):
        open_gpu(LLMOptions(folder), folder, FLOAT32, read_config(folder), kernels())


def test_draft_models_of_other_families_are_refused(checkpoint: MakeCheckpoint) -> None:
    target = gpu_engine(heads=2, kv_heads=1).target
    message = "^draft_model: device: expected a plain model .* found mixtures of experts of mixtral"
    with pytest.raises(OptionError, match=message):
        load_draft_model(target, checkpoint("mixtral"), drafter="draft_model")


def test_a_model_on_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tokens of the CPU, with weights in 4 bits and a drafter, in one step of two requests."""
    monkeypatch.setattr(device, "find_gpu", lambda name: DEVICE)
    folder = tiny_checkpoint(tmp_path, layers=1, hidden=32)
    params = [SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, temperature=0.8, seed=1)]
    prompts = [[5, 6, 5], [7]]
    want = LLM(folder, weights="int8").generate(prompts, params)
    llm = LLM(folder, weights="int8", device="cuda", drafter="prompt_lookup(min_ngram=1)")
    got = llm.generate(prompts, params)
    assert isinstance(llm.engine.runner, GpuRunner)
    assert llm.exact
    assert [each.token_ids for each in got] == [each.token_ids for each in want]
