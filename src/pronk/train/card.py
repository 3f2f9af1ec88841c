"""The model card: what a model was trained on, how, and what it is not."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from pronk.train.lm import Trainer

__all__ = ["model_card"]

_INTENT = """\
A small language model to try decoding methods on: it writes plausible Python, simple prose and worked sums in the
style of its training text, and it is wrong about facts and arithmetic most of the time. Do not rely on what it says.
"""

_LIMITS = """\
Context {context} tokens. English and Python only. The text was not filtered for bias or offence. It answers a chat in
form, not in substance.
"""

_TEXT = """\
Mixture by bytes: {weights}. {duplicates} exact copies were dropped, and {excluded} documents that were empty or shared
a run of 13 words with the excluded prompts; one document in 100 was held out. The table counts what the sources
offered after that; the run read {tokens:.2f} M tokens of it.

| source | origin | licence | documents | text, MB |
|---|---|---|---|---|
{rows}
"""


def model_card(trainer: Trainer, name: str, command: str, valid: Mapping[str, float], length: int) -> str:
    """The text of ``README.md``.

    Args:
        trainer: the run.
        name: of the model.
        command: the one that started the run, without folders of the machine.
        valid: validation losses in nats per token.
        length: tokens per sequence that they were measured on.
    """
    summary = json.loads((trainer.folder / "data" / "sources.json").read_text(encoding="utf-8"))
    sections = [
        _front_matter(summary),
        f"# {name}\n\n{_INTENT}",
        "## Model\n\n" + _model(trainer),
        "## Training\n\n" + _training(trainer) + _losses(trainer, valid, length) + f"\n```\n{command}\n```\n",
        "## Text\n\n" + _text(trainer, summary),
        "## Limits\n\n" + _LIMITS.format(context=trainer.config.context),
    ]
    return "\n".join(sections)


def _front_matter(summary: Mapping[str, Any]) -> str:
    licenses = json.dumps(sorted({record["license"] for record in summary["origins"]}))
    lines = ("library_name: transformers", "pipeline_tag: text-generation", f"training_text_licenses: {licenses}")
    return "\n".join(("---", *lines, "---", ""))


def _model(trainer: Trainer) -> str:
    c = trainer.config
    parameters = sum(p.numel() for p in trainer.decoder.parameters())
    return (
        f"Llama architecture, {parameters / 1e6:.2f} M parameters: {c.num_layers} layers, hidden size {c.hidden_size}, "
        f"{c.num_heads} heads of {c.head_dim} over {c.num_kv_heads} key/value heads, MLP {c.intermediate_size}, "
        f"tied embeddings. Byte-level BPE vocabulary of {c.vocab_size} tokens with GPT-2 pre-tokenization. "
        "Weights are bfloat16. Chat format: `<|user|>…<|end|><|assistant|>…<|end|>`.\n"
    )


def _training(trainer: Trainer) -> str:
    o = trainer.options
    where = f"{torch.get_num_threads()} CPU threads" if o.device == "cpu" else o.device
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "tokenizers", "safetensors", "numpy"))
    return (
        f"- {trainer.tokens / 1e6:.2f} M tokens in {trainer.step} steps of {o.batch} tokens, seed {o.seed}\n"
        f"- sequences of {o.length} tokens, in the last {o.final_share:.0%} of the run of {o.final_length}\n"
        f"- {o.optimizer}, peak learning rate {o.rate:g} after {o.warmup} warm-up steps, then a cosine to "
        f"{o.floor * o.rate:g}; weight decay {o.weight_decay:g}, bfloat16 autocast\n"
        f"- {trainer.seconds / 60:.0f} minutes on {where} ({platform.machine()})\n"
        f"- Python {platform.python_version()}, {versions}\n"
    )


def _losses(trainer: Trainer, valid: Mapping[str, float], length: int) -> str:
    lines = [f"- training loss {trainer.history[-1]['loss']:.3f} nats per token at the end"] if trainer.history else []
    if valid:
        losses = ", ".join(f"{name} {loss:.3f}" for name, loss in valid.items())
        lines.append(f"- validation loss in nats per token, on sequences of {length}: {losses}")
    return "".join(f"{line}\n" for line in lines)


def _text(trainer: Trainer, summary: Mapping[str, Any]) -> str:
    columns = ("source", "origin", "license", "documents")
    rows = [
        " | ".join(("", *(str(r[c]).replace("|", "/") for c in columns), f"{r['bytes'] / 1e6:.2f}", "")).strip()
        for r in summary["origins"]
    ]
    return _TEXT.format(
        weights=", ".join(f"{name} {weight:.1%}" for name, weight in summary["weights"].items()),
        duplicates=summary["duplicates"],
        excluded=summary["excluded"],
        tokens=trainer.tokens / 1e6,
        rows="\n".join(rows),
    )
