"""Peers: greedy tokens equal pronk's; a worker's failure gives a one-line error and leaves no
process.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gguf_files import convert
from pronk import LLM, SamplingParams
from pronk.base.errors import OptionError
from pronk.lab.bench.peers.engines.contract import PeerRequest, PeerResult
from pronk.lab.bench.peers.process import PEERS, Peer, PeerError, choose_peers
from waiting import HUNG

TOKENS = 20

# A worker process whose behaviour depends on the prompt's first token, e.g. 1 crashes and 2 hangs.
FAKE = """
import json, os, signal, sys
for line in sys.stdin:
    request = json.loads(line)
    action = request.get("prompt", [0])[0]
    out = {"token_ids": [1, 2], "seconds": 0.5, "ttft": None, "peak_memory": 1}
    if request["op"] != "generate":
        out = {"fake": "1"}
    if action == 1:
        print("Traceback ...", "ValueError: of all things", sep="\\n", file=sys.stderr, flush=True)
        os.kill(os.getpid(), 11)
    if action == 2:
        signal.pause()
    if action == 3:
        print("Loading weights: 100%", flush=True)
        continue
    if action == 4:
        out["token_ids"] = [1]
    if action == 6:
        sys.exit(3)
    answer = {"error": "no module", "missing": "llama_cpp"} if action == 7 else {"ok": out}
    if action == 8:
        answer = {"error": "RuntimeError: out of luck", "missing": None}
    print(json.dumps(answer), flush=True)
"""


class FakePeer(Peer):
    """A peer whose worker is the program above."""

    _timeout = HUNG

    def _command(self) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", FAKE]


class Successor(Peer):
    """A peer that continues with the worker process of an earlier peer, so that the engine is
    imported once.
    """

    def __init__(self, *args: Any, before: Peer | None, **options: Any) -> None:
        super().__init__(*args, **options)
        if before is not None:
            self._process = before._process
            self._log = before._log
            self._lines = before._lines
            self._reader = before._reader


@pytest.fixture(scope="module")
def peers() -> Iterator[dict[str, Peer]]:
    """Return the last peer of each engine, closed at the end."""
    made: dict[str, Peer] = {}
    yield made
    for peer in made.values():
        peer.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundled model as a GGUF file."""
    path = tmp_path_factory.mktemp("gguf") / "bundled.gguf"
    return convert(
        LLM(dtype="float32").path, path, "F16", change=lambda writer: writer.add_file_type(1)
    )


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", threads=1)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakePeer]:
    made = FakePeer(PEERS["transformers"], tmp_path, dtype="float32", threads=1)
    with closing(made) as peer:
        peer.load()
        yield peer


def request(prompt: list[int], tokens: int = 2, **options: Any) -> PeerRequest:
    return PeerRequest(
        prompt,
        tokens,
        **{"temperature": 0.0, "seed": 0, "stop_token_ids": [], "ignore_eos": True} | options,
    )


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def check_method(method: str, model: Path, llm: LLM, peers: dict[str, Peer]) -> None:
    """Check greedy tokens against pronk's, a stop token, and the length of a sample."""
    plain = llm.generate("def fibonacci(n):\n", SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    prompt = plain.prompt_token_ids
    ours = plain.token_ids
    engine = PEERS[method].engine
    peer = peers[engine] = Successor(
        PEERS[method], model, dtype="float32", threads=1, before=peers.get(engine)
    )
    notes = {
        "transformers": {"transformers", "torch", "attention"},
        "openvino": {"openvino", "openvino-genai", "backend"},
        "llama_cpp": {"llama-cpp-python", "kv_cache"},
        "llama_server": {"llama-server", "flash_attention"},
    }
    assert notes[engine] <= set(peer.load())
    done = peer.generate(request(prompt, TOKENS, stop_token_ids=[ours[8]]))
    assert done.token_ids == ours
    assert 0 < (done.ttft or 0.01) <= done.seconds
    assert done.peak_memory > 10e6
    end = ours[8]
    stopped = peer.generate(request(prompt, TOKENS, stop_token_ids=[end], ignore_eos=False))
    assert stopped.token_ids == ours[: ours.index(end) + 1]
    sampled = peer.generate(request(prompt, TOKENS, temperature=0.9, seed=5))
    assert len(sampled.token_ids) == TOKENS


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("method", [name for name, spec in PEERS.items() if not spec.reads_gguf])
def test_tokens_of_peers_that_read_folders(method: str, llm: LLM, peers: dict[str, Peer]) -> None:
    check_method(method, llm.path, llm, peers)


@pytest.mark.parametrize("method", [name for name, spec in PEERS.items() if spec.reads_gguf])
def test_tokens_of_peers_that_read_gguf_files(
    method: str, file: Path, peers: dict[str, Peer]
) -> None:
    engine = PEERS[method].engine
    if engine == "llama_server":
        if shutil.which("llama-server") is None:
            pytest.skip("expected llama-server on PATH, found none")
    else:
        pytest.importorskip({"openvino": "openvino_genai"}.get(engine, engine))
    check_method(method, file, LLM(file, dtype="float32"), peers)


def test_all_means_the_peers_that_read_the_model() -> None:
    folder = Path("model")
    file = Path("a.gguf")
    assert [spec.name for spec in choose_peers(["all"], [folder])] == [
        "transformers",
        "transformers_prompt_lookup",
    ]
    assert {spec.engine for spec in choose_peers(["all"], [file])} == {
        "openvino",
        "llama_cpp",
        "llama_server",
    }
    assert choose_peers(["llama_cpp", "llama_cpp"], [file]) == (PEERS["llama_cpp"],)


@pytest.mark.parametrize(
    ("name", "models", "message"),
    [
        ("vllm", ["a"], "peer: expected one of all, transformers, .*, found 'vllm'"),
        (
            "llama_cpp",
            ["a"],
            (
                "peer llama_cpp: expected a GGUF file as --model, found a folder .*, a; "
                "give the model in"
            ),
        ),
        (
            "transformers",
            ["a.gguf"],
            "peer transformers: expected a folder .*, found a GGUF file, a.gguf; give",
        ),
        (
            "all",
            ["a.gguf", "b"],
            "peer openvino: expected a GGUF file as --model, found a folder .*, b",
        ),
    ],
)
def test_unknown_peers_and_unreadable_models_are_refused(
    name: str, models: list[str], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        choose_peers([name], list(map(Path, models)))


@pytest.mark.parametrize("method", ["openvino", "llama_cpp"])
def test_a_missing_package_is_named_with_its_installation(
    method: str, llm: LLM, tmp_path: Path
) -> None:
    package = {"openvino": "openvino"}.get(method, method)
    try:
        __import__(package)
    except ModuleNotFoundError:
        peer = Peer(PEERS[method], llm.path, dtype="float32", threads=1)
        with (
            closing(peer),
            pytest.raises(
                PeerError, match=rf"{package} is not installed; run pip install '\.\[peers\]'"
            ),
        ):
            peer.load()
    else:
        pytest.skip(f"{package} is installed")


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (1, "died during generate: SIGSEGV, ValueError: of all things"),
        (3, "expected a JSON answer to generate, found b'Loading weights"),
        (4, "expected 2 tokens, found 1"),
        (6, "died during generate: exit status 3"),
        (7, r"llama_cpp is not installed; run pip install '\.\[peers\]' in a clone of pronk"),
        (8, "transformers: RuntimeError: out of luck"),
    ],
)
def test_a_failure_is_one_line(fake: FakePeer, action: int, message: str) -> None:
    worker = fake._process
    assert worker is not None
    assert fake.generate(request([0])) == PeerResult([1, 2], 0.5, None, 1)
    with pytest.raises(PeerError, match=message) as raised:
        fake.generate(request([action]))
    assert "\n" not in str(raised.value)
    # The next prompt goes to the same worker after an error, to a new one after a crash or an
    # answer without JSON.
    assert fake.generate(request([0])) == PeerResult([1, 2], 0.5, None, 1)
    assert (fake._process is worker) == (action not in (1, 3, 6))
    fake.close()
    assert not alive(worker.pid)


def test_a_worker_that_dies_again_and_again_is_not_started_forever(fake: FakePeer) -> None:
    for _ in range(3):
        with pytest.raises(PeerError, match="died during generate"):
            fake.generate(request([6]))
    with pytest.raises(PeerError, match="found 3 that ended"):
        fake.generate(request([0]))
    assert fake._process is None


def test_a_hung_worker_is_killed(fake: FakePeer) -> None:
    worker = fake._process
    assert worker is not None
    fake._timeout = 0.2
    with pytest.raises(PeerError, match=r"no answer to generate within 0\.2 s"):
        fake.generate(request([2]))
    assert not alive(worker.pid)


def test_a_program_that_cannot_be_started_is_refused(tmp_path: Path) -> None:
    peer = Peer(PEERS["transformers"], tmp_path, dtype="float32", threads=1, python="/no/python")
    with closing(peer), pytest.raises(PeerError, match="cannot start /no/python: No such file"):
        peer.load()


# A server that answers as llama-server: two tokens in a first event, and the last one in another.
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(400 if body["prompt"] == [0] else 200)
        self.end_headers()
        tokens = [*body["prompt"], body["n_predict"]]
        for event in ({"tokens": tokens[:2]}, {"tokens": tokens[2:], "stop": True}):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")

    def log_message(self, *_):
        pass

if "--version" in sys.argv:
    sys.exit("version: 7")
memory = bytearray(b"1" * 100_000_000)
port = int(sys.argv[sys.argv.index("--port") + 1])
context = int(sys.argv[sys.argv.index("--ctx-size") + 1])
assert context in (1024, 4096)
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_tokens_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f"#!{sys.executable}\n{SERVER}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    spec = PEERS["llama_server_ngram_simple"]
    with closing(Peer(spec, tmp_path, dtype="float32", threads=1)) as peer:
        assert peer.load() == {
            "llama-server": "7",
            "flash_attention": "auto",
            "speculation": "ngram-simple",
        }
        done = peer.generate(request([5, 6], 3))
        assert done.token_ids == [5, 6, 3]
        assert done.peak_memory > 100e6, "the server's memory, not that of its client"
        stopped = request([5, 6], 3, stop_token_ids=[6], ignore_eos=False)
        assert peer.generate(stopped).token_ids == [5, 6]
        # needs the server with a larger context
        longer = request([5, 6, *[1] * 1200, 3], 1204)
        assert peer.generate(longer).token_ids == [*longer.prompt, 1204]
        with pytest.raises(PeerError, match="RuntimeError"):
            peer.generate(request([0], 1))


@pytest.mark.long
def test_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    spec = PEERS["llama_server"]
    with (
        closing(Peer(spec, tmp_path, dtype="float32", threads=1)) as peer,
        pytest.raises(PeerError, match="expected the command llama-server, found none"),
    ):
        peer.load()
