"""The model card: what a model was trained on, how, and what it is not."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pronk.train.lm import Trainer

__all__ = ["model_card"]

_INTENT = """\
A small language model to try decoding methods on: it writes plausible Python, simple prose and worked sums in the
style of its training text, and it is wrong about facts and arithmetic most of the time. Do not rely on what it says.
"""


def model_card(trainer: Trainer, name: str, command: str) -> str:
    """The text of ``README.md``; ``command`` is the one that started the run, without paths of the machine."""
    summary = json.loads((trainer.folder / "data" / "sources.json").read_text(encoding="utf-8"))
    sections = [
        _front_matter(summary),
        f"# {name}\n\n{_INTENT}",
        "## Model\n\n" + _model(trainer),
        "## Training\n\n" + _training(trainer, command),
        "## Text\n\n" + _text(trainer, summary),
        "## Limits\n\n"
        f"Context {trainer.config.context} tokens. English and Python only. The text was not filtered for bias or offence. "
        "Chat works in form, not in substance.\n",
    ]
    return "\n".join(sections)


def _front_matter(summary: Mapping[str, Any]) -> str:
    licenses = sorted({record["license"] for record in summary["origins"]})
    return f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntraining_text_licenses: {json.dumps(licenses)}\n---\n"


def _model(trainer: Trainer) -> str:
    c = trainer.config
    parameters = sum(p.numel() for p in trainer.decoder.parameters())
    return (
        f"Llama architecture, {parameters / 1e6:.2f} M parameters: {c.num_layers} layers, hidden size {c.hidden_size}, "
        f"{c.num_heads} heads of {c.head_dim} over {c.num_kv_heads} key/value heads, MLP {c.intermediate_size}, "
        f"tied embeddings. Byte-level BPE vocabulary of {c.vocab_size} tokens with GPT-2 pre-tokenization. "
        "Weights are bfloat16. Chat format: `<|user|>…<|end|><|assistant|>…<|end|>`.\n"
    )


def _training(trainer: Trainer, command: str) -> str:
    o, last = trainer.options, trainer.history[-1] if trainer.history else None
    seen = [h for h in trainer.history if h["valid"]]
    lines = [
        f"- {trainer.tokens / 1e6:.2f} M tokens in {trainer.step} steps of {o.batch} tokens, seed {o.seed}, "
        f"{o.optimizer}, peak learning rate {o.rate:g}, cosine schedule with {o.warmup} warm-up steps, bfloat16 autocast",
        f"- sequences of {o.length} tokens, of {o.final_length} in the last {o.final_share:.0%}",
        f"- {trainer.clock.seconds / 60:.0f} minutes on {torch.get_num_threads()} CPU threads ({platform.machine()})",
        f"- Python {platform.python_version()}, "
        + ", ".join(f"{package} {version(package)}" for package in ("torch", "tokenizers", "safetensors", "numpy")),
    ]
    if last is not None:
        lines.append(f"- training loss {last['loss']:.3f} nats per token at the end")
    if seen:
        losses = ", ".join(f"{name} {loss:.3f}" for name, loss in seen[-1]["valid"].items())
        lines.append(f"- validation loss in nats per token: {losses}")
    return "\n".join(lines) + f"\n\n```\n{command}\n```\n"


def _text(trainer: Trainer, summary: Mapping[str, Any]) -> str:
    weights = ", ".join(f"{name} {weight:.1%}" for name, weight in summary["weights"].items())
    rows = [
        f"| {r['source']} | {r['origin']} | {r['license'].replace('|', '/')} | {r['documents']} | {r['bytes'] / 1e6:.2f} |"
        for r in summary["origins"]
    ]
    return (
        f"Mixture by bytes: {weights}. {summary['duplicates']} exact copies and {summary['excluded']} documents that were empty or "
        f"shared 13 words with evaluation prompts were dropped, and one document in 100 was held out. The table counts what the "
        f"sources offered after that; the run read {trainer.tokens / 1e6:.2f} M tokens of it.\n\n"
        "| source | origin | licence | documents | text, MB |\n|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )
