"""``pronk info`` states what the headers of a model's files say."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from checkpoints import MakeCheckpoint
from command_line import Command, assert_mistake
from gguf_files import finish, write_bytes_bpe
from pronk.checkpoint.hub import cache
from pronk.checkpoint.hub.clone_models import tiny_model
from pronk.checkpoint.hub.names import known_models
from pronk.text.tokenizer import Tokenizer

CONTEXT = 64


def write_model(path: Path) -> Path:
    """Write the header of a Llama with two layers, and two of its tensors."""
    backend = Tokenizer.load(tiny_model()).backend
    writer = gguf.GGUFWriter(path, "llama")
    write_bytes_bpe(writer, backend, "gpt-2")
    writer.add_license("apache-2.0")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((4096, 32), np.float16))
    writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))
    finish(writer)
    return path


def test_facts(command: Command, tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf")
    code, out, err = command("info", path, "--context", CONTEXT, "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["weights"] == [
        {"part": "embedding", "type": "F16", "tensors": 1, "bytes": 4096 * 32 * 2},
        {"part": "norms", "type": "F32", "tensors": 1, "bytes": 32 * 4},
    ]
    # keys and values of 2 layers with 2 heads of 8 numbers
    kv_bytes = 2 * 2 * 2 * 8 * 2 * CONTEXT
    assert facts["kv_cache_bytes"] == kv_bytes
    assert facts["memory_bytes"] == facts["weights_bytes"] + kv_bytes
    assert (facts["family"], facts["license"], facts["context"]) == ("llama", "apache-2.0", CONTEXT)
    assert facts["tool_calls"] == "no chat template"
    assert facts["drafters"] == []


def test_lines(command: Command, tmp_path: Path) -> None:
    code, out, err = command("info", write_model(tmp_path / "a.gguf"))
    assert (code, err) == (0, "")
    assert "context      256 tokens" in out
    assert "  embedding  F16 262 kB" in out
    assert max(map(len, out.splitlines())) <= 80


def test_lines_on_a_narrow_terminal(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long values are wrapped between words, beside the labels."""
    path = write_model(tmp_path / "a.gguf")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = command("info", path)
    lines = out.splitlines()
    assert code == 0
    assert max(map(len, lines)) <= 40
    start = next(i for i, line in enumerate(lines) if line.startswith("memory"))
    assert lines[start].endswith("request of")
    assert lines[start + 1] == " " * 13 + "the whole context"


def test_a_folder_without_reading_its_weights(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder has the facts of its config, its tensors' headers and its chat template."""

    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("pronk.checkpoint.tensors.Checkpoint.tensor", refuse)
    monkeypatch.setattr("pronk.text.tokenizer._read_backend", refuse)
    folder = shutil.copytree(tiny_model(), tmp_path / "tiny")
    template = (
        "{{ tools }}{% for message in messages %}{{ message.tool_calls }}{% endfor %}</think>"
    )
    (folder / "chat_template.jinja").write_text(template)
    code, out, err = command("info", folder, "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    parts = {row["part"]: row for row in facts["weights"]}
    assert [*parts] == ["embedding", "attention", "MLP", "norms"]
    assert parts["attention"]["tensors"] == 4 * facts["layers"]
    assert parts["MLP"]["tensors"] == 3 * facts["layers"]
    assert {row["type"] for row in facts["weights"]} == {"BF16"}
    assert (facts["format"], facts["path"]) == ("safetensors", str(folder))
    assert facts["tied_output"]
    assert (facts["tool_calls"], facts["thoughts"]) == ("no known format", "think")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"README.md": "---\nlanguage: en\nlicense: apache-2.0\n---\nlicense: mit\n"}, "apache-2.0"),
        ({"README.md": '---\r\nlicense: "mit"\r\n---\r\n'}, "mit"),
        ({"README.md": "---\nlicense: other\nlicense_name: lfm1.0\n---\n"}, "lfm1.0"),
        ({"README.md": "---\nlicense: other\n---\n", "LICENSE": "X"}, "other"),
        ({"README.md": "# no card\nlicense: mit\n", "LICENSE": "\n\n  MIT License\n\nx"}, "MIT License"),
        ({"README.md": "---\nlicense:\n---\n", "LICENSE.md": "# Apache\x1b[31m 2"}, "Apache[31m 2"),
        ({"COPYING": "y" * 200}, "y" * 80),
        ({"LICENSE": "\n \n", "COPYING": "GPL"}, "GPL"),
        ({}, None),
    ],
)  # fmt: skip
def test_license_of_a_folder(
    files: dict[str, str], expected: str | None, command: Command, tmp_path: Path
) -> None:
    """A folder has the license of its model card, or the first line of its LICENSE."""
    folder = shutil.copytree(tiny_model(), tmp_path / "tiny")
    for name in ("README.md", "LICENSE"):
        (folder / name).unlink(missing_ok=True)
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    code, out, _ = command("info", folder, "--json")
    assert code == 0
    assert json.loads(out)["license"] == expected


def test_memory_of_windows(command: Command, checkpoint: MakeCheckpoint) -> None:
    """A model whose layers all have a window stores the window and a chunk of the prompt."""
    folder = checkpoint("mistral", sliding_window=64, max_position_embeddings=8192)
    sizes = {}
    for context in (256, 1024, 8192):
        code, out, _ = command("info", folder, "--context", context, "--json")
        assert code == 0
        sizes[context] = json.loads(out)["kv_cache_bytes"]
    # 64 + 512 + 1 tokens need 19 blocks, and the window may begin inside another one
    assert sizes[8192] == sizes[1024] == 20 * 32 * sizes[256] // (9 * 32)


def test_drafters_that_fit(command: Command, checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Drafters are an MTP head in the checkpoint, and heads in the folder ``eagle3``."""
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    (folder / "eagle3").mkdir()
    (folder / "eagle3" / "config.json").write_text("{}")
    code, out, _ = command("info", folder, "--json")
    assert code == 0
    head = {"drafter": "eagle3", "source": str(folder / "eagle3"), "here": True}
    assert json.loads(out)["drafters"] == [head]
    code, out, _ = command("info", folder)
    assert "drafters     eagle3: eagle3\n" in out


def test_a_name_in_the_cache(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short name and a name on the Hub mean the file in the cache; the table has its license."""
    monkeypatch.setattr(cache, "cache_folder", lambda: tmp_path)
    known = known_models()["qwen3-4b"]
    command_line = ("info", "qwen3-4b", "--json")
    pull = "expected a model on this machine, found no qwen3-4b; `pronk pull qwen3-4b` downloads it"
    assert_mistake(command(*command_line), pull)
    folder = cache.repo_folder(known.model.repo) / "snapshots" / "1234"
    folder.mkdir(parents=True)
    path = write_model(folder / "m-Q4_K_M.gguf")
    for name in ("qwen3-4b", str(known.model)):
        code, out, err = command("info", name, "--json")
        assert (code, err) == (0, "")
        assert json.loads(out)["path"] == str(path)


def test_mistakes(command: Command, tmp_path: Path) -> None:
    """Each mistake is one line that names the file, and says what was expected and found."""
    missing = tmp_path / "none.gguf"
    assert_mistake(command("info", missing), "expected a GGUF file", "no such file", str(missing))
    assert_mistake(command("info", tmp_path), f"{tmp_path}: expected a model folder with config")
    path = write_model(tmp_path / "a.gguf")
    whole = path.read_bytes()
    damages = {
        "expected a GGUF file, found one that begins with": b"FUGG" + whole[4:],
        "the file is truncated or damaged": whole[:-200],
        "found 3 bytes": whole[:3],
    }
    for expected, data in damages.items():
        path.write_bytes(data)
        assert_mistake(command("info", path), f"{path}: ", expected)
    too_long = command("info", write_model(tmp_path / "b.gguf"), "--context", 257)
    assert_mistake(too_long, "context: ", "257")
