"""``pronk info`` states what the header of a GGUF file says."""

import json
from pathlib import Path

import gguf
import numpy as np

from command_line import Command, assert_mistake
from gguf_files import finish, write_bytes_bpe
from pronk.checkpoint.hub.clone_models import tiny_model
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
    assert facts["kinds"] == {
        "F16": {"tensors": 1, "bytes": 4096 * 32 * 2},
        "F32": {"tensors": 1, "bytes": 32 * 4},
    }
    # keys and values of 2 layers with 2 heads of 8 numbers
    kv_bytes = 2 * 2 * 2 * 8 * 2 * CONTEXT
    assert facts["kv_cache_bytes"] == kv_bytes
    assert facts["memory_bytes"] == facts["weights_bytes"] + kv_bytes
    assert (facts["family"], facts["license"], facts["context"]) == ("llama", "apache-2.0", CONTEXT)
    assert facts["tool_calls"] == "no chat template"


def test_lines(command: Command, tmp_path: Path) -> None:
    code, out, err = command("info", write_model(tmp_path / "a.gguf"))
    assert (code, err) == (0, "")
    assert "context         256" in out
    assert max(map(len, out.splitlines())) <= 80


def test_folders_are_refused(command: Command) -> None:
    assert_mistake(command("info", tiny_model()), "expected a GGUF file, found a model folder")
