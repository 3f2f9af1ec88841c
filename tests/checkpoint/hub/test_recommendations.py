"""Sampling options that are recommended for a model: the same everywhere, by the name in the
model's files.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints import MakeCheckpoint
from gguf_files import convert
from pronk.base.errors import PromptError
from pronk.checkpoint.hub.names import known_models
from pronk.checkpoint.hub.recommendations import add_known_sampling
from pronk.cli.console import TerminalOutput
from pronk.cli.repl import ChatSession
from pronk.engine.request_factory import RequestFactory
from pronk.llm import LLM
from pronk.models.loader import read_config
from pronk.sampling.defaults import RECOMMENDABLE, sampling_values
from pronk.sampling.params import SamplingParams

MESSAGES = [{"role": "user", "content": "x"}]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
SMOLLM2 = dict(known_models()["smollm2"].sampling)


def test_recommendations_of_the_rows() -> None:
    simplified = set()
    for known in known_models().values():
        assert known.names
        assert not known.sampling or "temperature" in known.sampling
        assert known.sampling.keys() <= {*RECOMMENDABLE}
        replace(SamplingParams(), **known.sampling)  # type: ignore[arg-type]  # raises if a value is out of its range
        simplified |= {name.lower() for name in known.names}
    assert len(simplified) == sum(len(known.names) for known in known_models().values())
    table = Path(add_known_sampling.__code__.co_filename).with_name("known_models.json")
    rows = json.loads(table.read_bytes()).values()
    recommended = [row["sampling"] for row in rows if "sampling" in row]
    assert len(recommended) > len(rows) / 2
    assert all(sampling["source"] for sampling in recommended)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("Smollm2 135M 8k Lc100K Mix1 Ep2", "smollm2"),
        ("SmolLM2 135M Instruct", "smollm2"),
        ("smollm2_135m_instruct", "smollm2"),
        ("qwen2.5-0.5b-instruct", "qwen2.5-0.5b"),
        ("Qwen2.5 Coder 7B Instruct GGUF", "qwen2.5-coder-7b"),
        ("Qwen3 0.6B", "qwen3-0.6b"),
        ("Meta Llama 3.1 8B Instruct", "llama-3.1-8b"),
        ("SmolLM2 135M", None),  # the base model
        ("SmolLM2 135M Instruct Pirate", None),  # a fine-tuned one
        ("GGUF", None),
        ("", None),
    ],
)
def test_rows_are_found_by_the_name_in_the_files(
    checkpoint: MakeCheckpoint, name: str, row: str | None
) -> None:
    config = replace(read_config(checkpoint("llama")), name=name)
    found = add_known_sampling(config)
    assert found.sampling == ({} if row is None else known_models()[row].sampling)
    assert found == config
    assert found.digest == config.digest  # a recommendation makes no other model


def folder(checkpoint: MakeCheckpoint, path: Path, **changes: Any) -> Path:
    shutil.copytree(checkpoint("llama"), path)
    config = json.loads((path / "config.json").read_text())
    config["_name_or_path"] = changes.pop("name", None)
    (path / "config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    if changes:
        (path / "generation_config.json").write_text(json.dumps(changes))
    return path


def gguf(checkpoint: MakeCheckpoint, path: Path, name: str | None, **values: float) -> Path:
    def add(writer: Any) -> None:
        writer.add_chat_template(TEMPLATE)
        if name is not None:
            writer.add_name(name)
        for key, value in values.items():
            writer.add_float32(f"general.sampling.{key}", value)

    return convert(checkpoint("llama"), path, change=add)


Make = Callable[[MakeCheckpoint, Path], Path]
KNOWN = "SmolLM2 135M Instruct"
MODELS: dict[str, tuple[Make, dict[str, float]]] = {
    "a GGUF file of a known model": (
        lambda make, path: gguf(make, path / "renamed.gguf", KNOWN),
        SMOLLM2,
    ),
    "a folder of a known model": (
        lambda make, path: folder(make, path / "x", name="HuggingFaceTB/SmolLM2-135M-Instruct"),
        SMOLLM2,
    ),
    "files that recommend an option": (
        lambda make, path: gguf(make, path / "x.gguf", KNOWN, temp=0.5),
        {**SMOLLM2, "temperature": 0.5},
    ),
    "a folder that recommends greedy decoding": (
        lambda make, path: folder(make, path / "x", name=KNOWN, do_sample=False),
        {**SMOLLM2, "temperature": 0.0},
    ),
    "an unknown model that recommends": (
        lambda make, path: folder(make, path / "x", top_k=7, do_sample=True),
        {"temperature": 1.0, "top_k": 7},
    ),
    "an unknown model": (
        lambda make, path: gguf(make, path / "x.gguf", None),
        {},
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_the_library_and_the_command_line_have_the_same_defaults(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    make, options = MODELS[case]
    llm = LLM(make(checkpoint, tmp_path), threads=1, kv_memory="16MiB")
    want = SamplingParams(**options)  # type: ignore[arg-type]
    assert llm.get_default_sampling_params() == want
    assert llm.get_default_sampling_params(temperature=0.9) == replace(want, temperature=0.9)
    used: list[SamplingParams] = []

    def record(_: RequestFactory, _prompts: object, params: Any, *_rest: object) -> Any:
        used.extend(params)
        msg = "the parameters are recorded"
        raise PromptError(msg)

    monkeypatch.setattr(RequestFactory, "create_batch", record)
    for ask in (llm.chat, llm.stream_chat):
        with pytest.raises(PromptError, match="recorded"):
            ask(MESSAGES)
    session = ChatSession(llm, SamplingParams(), TerminalOutput(stats=False))
    session._run_line("hello")
    monkeypatch.undo()
    assert [sampling_values(params) for params in used] == [sampling_values(want)] * 3
