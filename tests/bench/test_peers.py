"""The peers: tokens equal to ours, and every way for a worker to fail is one line and leaves no process behind."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from checkpoints import MakeCheckpoint
from gguf_files import convert
from pronk import LLM, SamplingParams
from pronk.architecture.rope import RotaryEmbedding, parse_rope
from pronk.bench.peers import Peer, PeerError, PeerRequest, PeerResult, PeerSpec
from pronk.bench.peers.engines.checkpoint import ArrayCheckpoint, cached, convert_type
from pronk.bench.peers.engines.contract import Unsupported
from pronk.bench.peers.process import WorkerProcess
from pronk.bench.peers.specs import METHODS
from pronk.errors import OptionError

TOKENS = 20
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}  # for blocks of 32

# A worker that does what the prompt's first token says.
FAKE = """
import json, os, sys, time
for line in sys.stdin:
    request = json.loads(line)
    action = request.get("prompt", [0])[0]
    out = {"token_ids": [1, 2], "seconds": 0.5, "ttft": None, "peak_memory": 1}
    if request["op"] != "generate":
        out = {"versions": {"fake": "1"}, "settings": {}}
    if action == 1:
        print("Traceback ...", "ValueError: of all things", sep="\\n", file=sys.stderr, flush=True)
        os.kill(os.getpid(), 11)
    if action == 2:
        time.sleep(60)
    if action == 3:
        print("Loading weights: 100%", flush=True)
        continue
    if action == 4:
        out["token_ids"] = [1]
    if action == 5:
        out = {"tokens": []}
    if action == 6:
        sys.exit(3)
    answer = {"error": "no module", "missing": "llama_cpp"} if action == 7 else {"ok": out}
    if action == 8:
        answer = {"error": "RuntimeError: out of luck", "missing": None}
    print(json.dumps(answer), flush=True)
"""


class FakePeer(Peer):
    """A peer whose worker is the program above."""

    def _command(self) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", FAKE]


class Successor(Peer):
    """A peer that loads in the worker of the one before, which has imported its engine, and leaves it to the next."""

    def __init__(self, *args: Any, worker: WorkerProcess | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._worker = worker

    def close(self) -> None:
        """Whoever has the worker closes it."""


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, WorkerProcess]]:
    """One worker for each engine; nothing is left running."""
    made: dict[str, WorkerProcess] = {}
    yield made
    for worker in made.values():
        worker.close()
        assert not alive(worker.pid)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the converted pronk-tiny, one for all engines."""
    return tmp_path_factory.mktemp("converted")


@pytest.fixture(scope="module")
def llm() -> LLM:
    torch.set_num_threads(1)
    return LLM(dtype="float32")


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakePeer]:
    with FakePeer(
        PeerSpec("transformers"), tmp_path, draft=None, dtype="float32", threads=1, cache=tmp_path, timeout=20
    ) as peer:
        peer.load()
        yield peer


def request(prompt: list[int], tokens: int = 2, **options: Any) -> PeerRequest:
    return PeerRequest(prompt, tokens, **{"temperature": 0.0, "seed": 0, "ends": [], "ignore_eos": True} | options)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def check_method(method: str, llm: LLM, cache: Path, workers: dict[str, WorkerProcess]) -> None:
    """Greedy tokens are ours, an end token ends, and a sample is as long as it was asked to be."""
    plain = llm.generate("def fibonacci(n):\n", SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    prompt, ours = plain.prompt_token_ids, plain.token_ids
    engine = METHODS[method].engine
    models: dict[str, Any] = {"draft": llm.path, "dtype": "float32", "threads": 1, "cache": cache}
    with Successor(PeerSpec(method), llm.path, **models, worker=workers.get(engine)) as peer:
        peer.load()
        assert peer.versions
        assert peer.settings
        done = peer.generate(request(prompt, TOKENS, ends=[ours[8]]))
        assert done.token_ids == ours
        assert 0 < (done.ttft or 0.01) <= done.seconds
        assert done.peak_memory > 10e6
        end = ours[8]
        stopped = peer.generate(request(prompt, TOKENS, ends=[end], ignore_eos=False))
        assert stopped.token_ids == ours[: ours.index(end) + 1]
        sampled = peer.generate(request(prompt, TOKENS, temperature=0.9, seed=5))
        assert len(sampled.token_ids) == TOKENS
        assert peer._worker is not None
        workers[engine] = peer._worker


@pytest.mark.parametrize("method", [name for name in METHODS if name.startswith("transformers")])
def test_transformers_agrees_with_us(method: str, llm: LLM, converted: Path, workers: dict[str, WorkerProcess]) -> None:
    check_method(method, llm, converted, workers)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "openvino_draft" else ())
        for name in METHODS
        if name.startswith("openvino")
    ],
)
def test_openvino_agrees_with_us(method: str, llm: LLM, converted: Path, workers: dict[str, WorkerProcess]) -> None:
    pytest.importorskip("openvino_genai")
    check_method(method, llm, converted, workers)


@pytest.mark.parametrize("method", [name for name in METHODS if name.startswith("llama_cpp")])
def test_llama_cpp_agrees_with_us(method: str, llm: LLM, converted: Path, workers: dict[str, WorkerProcess]) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    check_method(method, llm, converted, workers)


@pytest.mark.parametrize(
    ("text", "kept", "share"),
    [
        ("llama_cpp(weights=q8_0)", "Q8_0 100%", 0.26),
        ("llama_cpp(weights=q4_k_m)", "Q5_0", 0.19),  # rows of 320 are no multiple of Q4_K's blocks
        ("openvino(weights=int8)", "int8 by rows", 0.26),
        ("openvino(weights=int4)", "int4 in groups of 128 or less", 0.16),
    ],
)
def test_weights_of_their_own(text: str, kept: str, share: float, llm: LLM, tmp_path: Path) -> None:
    """Made by the engine's own tools of the same checkpoint: as small as they should be, and the same model still."""
    pytest.importorskip("llama_cpp" if text.startswith("llama_cpp") else "openvino_genai")
    pytest.importorskip("gguf" if text.startswith("llama_cpp") else "nncf")
    plain = llm.generate("def fibonacci(n):\n", SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    with Peer(PeerSpec.parse(text), llm.path, draft=None, dtype="float32", threads=1, cache=tmp_path) as peer:
        peer.load()
        assert peer.settings["weights"].startswith(kept)
        found = peer.generate(request(plain.prompt_token_ids, TOKENS)).token_ids
    assert len(found) == TOKENS
    if "8" in text:
        assert found[:4] == plain.token_ids[:4]
    (folder,) = tmp_path.iterdir()
    assert f"-{PeerSpec.parse(text).weights}-float32-" in folder.name
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert share < size / (4 * 9_669_440) < share + 0.03


def test_a_gguf_file_is_taken_as_it_is(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    file = convert(checkpoint("llama", **SIZES), tmp_path / "a.gguf", "Q8_0")
    ours = LLM(file, dtype="float32").generate([5, 6, 7, 8], SamplingParams(max_tokens=8, ignore_eos=True))
    with Peer(PeerSpec("llama_cpp"), file, draft=None, dtype="float32", threads=1, cache=tmp_path / "cache") as peer:
        peer.load()
        assert peer.settings["weights"] == "Q8_0 100%"
        assert peer.generate(request([5, 6, 7, 8], 8)).token_ids == ours.token_ids
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("text", ["llama_cpp(weights=Q4_K_M)", " llama_cpp ( weights = 'q4_k_m' ) "])
def test_a_peer_is_read(text: str) -> None:
    assert PeerSpec.parse(text) == PeerSpec("llama_cpp", "q4_k_m")
    assert str(PeerSpec.parse(text)) == "llama_cpp(weights=q4_k_m)"
    assert PeerSpec.parse("openvino_draft()") == PeerSpec("openvino_draft")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm", "unknown peer 'vllm'; expected one of transformers,"),
        ("openvino(int4)", "cannot be read; expected a name, or a name with weights"),
        ("openvino(weights=q8_0)", "expected weights of int8, int4, found 'q8_0'"),
        ("llama_cpp(weights=int4)", "expected weights of q8_0, q6_k, q5_k_m, q4_k_m, q4_0, found 'int4'"),
        ("transformers(weights=int4)", "expected no weights, which only some others have, found 'int4'"),
    ],
)
def test_a_peer_that_there_is_not(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        PeerSpec.parse(text)


@pytest.mark.parametrize("method", ["openvino", "llama_cpp"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_converters_know_the_families(method: str, family: str, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    pytest.importorskip({"openvino": "openvino_genai"}.get(method, method))
    folder = checkpoint(family)
    ours = LLM(str(folder), dtype="float32").generate([5, 6, 7, 8], SamplingParams(max_tokens=12, ignore_eos=True))
    with Peer(PeerSpec(method), folder, draft=None, dtype="float32", threads=1, cache=tmp_path) as peer:
        peer.load()
        assert peer.generate(request([5, 6, 7, 8], 12)).token_ids == ours.token_ids


@pytest.mark.parametrize("method", ["openvino", "llama_cpp"])
def test_a_missing_package_says_what_to_install(method: str, llm: LLM, tmp_path: Path) -> None:
    package = {"openvino": "openvino"}.get(method, method)
    try:
        __import__(package)
    except ModuleNotFoundError:
        peer = Peer(PeerSpec(method), llm.path, draft=None, dtype="float32", threads=1, cache=tmp_path)
        with peer, pytest.raises(PeerError, match=rf"{package} is not installed: pip install 'pronk\[peers\]'"):
            peer.load()
    else:
        pytest.skip(f"{package} is installed")


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (1, "died during generate: SIGSEGV, ValueError: of all things"),
        (3, "expected a JSON answer to generate, found b'Loading weights"),
        (4, "expected 2 tokens, found 1"),
        (5, "unexpected keyword argument 'tokens'"),
        (6, "died during generate: exit status 3"),
        (7, r"llama_cpp is not installed: pip install 'pronk\[peers\]'"),
        (8, "transformers: RuntimeError: out of luck"),
    ],
)
def test_a_failure_is_one_line(fake: FakePeer, action: int, message: str) -> None:
    worker = fake._worker
    assert worker is not None
    assert fake.generate(request([0])) == PeerResult([1, 2], 0.5, None, 1)
    with pytest.raises(PeerError, match=message) as raised:
        fake.generate(request([action]))
    assert "\n" not in str(raised.value)
    # The next prompt is measured: by the same worker after a report, by a new one if it died or talked nonsense.
    assert fake.generate(request([0])) == PeerResult([1, 2], 0.5, None, 1)
    assert fake._worker is not None
    assert (fake._worker.pid == worker.pid) == (action not in (1, 3, 6))
    fake.close()
    assert not alive(worker.pid)


def test_a_worker_that_keeps_dying_is_given_up(fake: FakePeer) -> None:
    for _ in range(3):
        with pytest.raises(PeerError, match=r"exit status 3$"):
            fake.generate(request([6]))
    with pytest.raises(PeerError, match=r"exit status 3 \(not asked again\)"):
        fake.generate(request([0]))


def test_a_hung_worker_is_killed(fake: FakePeer) -> None:
    worker = fake._worker
    assert worker is not None
    fake._timeout = 0.2
    began = time.perf_counter()
    with pytest.raises(PeerError, match=r"no answer to generate within 0\.2 s"):
        fake.generate(request([2]))
    assert time.perf_counter() - began < 10
    assert not alive(worker.pid)


def test_a_peer_that_is_dropped_leaves_no_process(tmp_path: Path) -> None:
    peer = FakePeer(PeerSpec("transformers"), tmp_path, draft=None, dtype="float32", threads=1, cache=tmp_path)
    peer.load()
    assert peer._worker is not None
    pid = peer._worker.pid
    del peer
    assert not alive(pid)


def test_wrong_options_are_refused(tmp_path: Path, llm: LLM) -> None:
    def load(method: str, dtype: str = "float32", python: str | None = None) -> None:
        with Peer(
            PeerSpec(method), llm.path, draft=None, dtype=dtype, threads=1, cache=tmp_path, python=python
        ) as peer:
            peer.load()

    with pytest.raises(PeerError, match="openvino_draft: expected a draft model"):
        load("openvino_draft")
    with pytest.raises(PeerError, match="expected a dtype of bfloat16, float16, float32, found 'int8'"):
        load("transformers", "int8")
    with pytest.raises(PeerError, match="cannot start /no/python: No such file"):
        load("transformers", python="/no/python")


def test_weights_are_read_bit_by_bit(llm: LLM) -> None:
    checkpoint = ArrayCheckpoint(llm.path)
    for name, weight in load_file(llm.path / "model.safetensors").items():
        assert name in checkpoint
        assert torch.equal(torch.from_numpy(checkpoint.tensor(name, "float32")), weight.float())
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    rounded = convert_type(values.numpy(), "F32", "BF16")
    assert torch.equal(torch.from_numpy(rounded.view(np.int16)).view(torch.bfloat16), values.bfloat16())
    assert torch.equal(torch.from_numpy(convert_type(rounded, "BF16", "F32")), values.bfloat16().float())


def test_rotations_are_ours(tmp_path: Path) -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    shape = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 1}
    raw: dict[str, Any] = {"model_type": "llama", "vocab_size": 9, **shape}

    def checkpoint(**rope: Any) -> ArrayCheckpoint:
        raw["rope_scaling"] = rope
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return ArrayCheckpoint(tmp_path)

    for rope in ({"rope_type": "llama3", **llama3}, {"rope_type": "linear", "factor": 4.0}, {"rope_type": "default"}):
        theirs = checkpoint(**rope).shape.inv_freq
        ours = RotaryEmbedding(parse_rope(raw, 64, 2048), torch.device("cpu")).frequencies
        assert np.allclose(theirs, ours.numpy(), rtol=1e-5)
    with pytest.raises(Unsupported, match="cannot convert yarn rotary embeddings"):
        checkpoint(rope_type="yarn", factor=2.0)


def test_a_conversion_is_cached_whole_or_not_at_all(tmp_path: Path) -> None:
    source, cache = tmp_path / "model", tmp_path / "cache"
    source.mkdir()
    (source / "config.json").write_text("{}")
    calls: list[Path] = []

    def write(folder: Path) -> None:
        calls.append(folder)
        (folder / "half").write_text("x")
        if len(calls) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(cache, source, "gguf-float32", write)
    assert list(cache.iterdir()) == []
    first = cached(cache, source, "gguf-float32", write)
    assert (first / "half").exists()
    assert cached(cache, source, "gguf-float32", write) == first
    assert len(calls) == 2
    (source / "config.json").write_text("{ }")
    assert cached(cache, source, "gguf-float32", write) != first
