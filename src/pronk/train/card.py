"""The model card: what a model was trained on, how, and what it is not."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from pronk.model.config import ModelConfig
from pronk.train.draft import Draft
from pronk.train.lm import LanguageModel
from pronk.train.loop import Trainer

__all__ = ["draft_card", "model_card"]

_INTENT = """\
A small language model to try decoding methods on: it writes plausible Python, simple prose and worked sums in the
style of its training text, and it is wrong about facts and arithmetic most of the time. Do not rely on what it says.
"""

_LIMITS = """\
Context {context} tokens. English and Python only. The text was not filtered for bias or offence. It answers a chat in
form, not in substance.
"""

_DRAFT_INTENT = """\
A draft model for {target}: it guesses the next few tokens, and the target, which has the last word, checks them in one
pass. It was distilled from the target, has its tokenizer, and is of little use for anything else. Use it with
`drafter="draft_model(model='{name}')"`.
"""

_DRAFT_LIMITS = """\
Context {context} tokens. Its guesses are as good as its text was like yours; the target's own text is never changed by
them. Another target with the same tokenizer can be served, at a lower acceptance rate.
"""

_DIVERGENCE = """\
Divergence from the target in nats per token, and share of positions where both have the same likeliest token, on
held-out sequences of {length} tokens; `on-policy` is the target's own text.
"""

_SERVED = """
Guessing {num_tokens} tokens a step for the target in pronk's engine, after held-out prompts: acceptance rate of the
first guess, and tokens per pass of the target.
"""

_TARGET = """\
- {name}
- SHA-256 of its weights and `config.json`: `{weights}`
- fingerprint of its tokenizer: `{tokenizer}`
"""

_TEXT = """\
Mixture by bytes: {weights}. {duplicates} exact copies were dropped, and {excluded} documents that were empty or shared
a run of 13 words with the excluded prompts; one document in 100 was held out. The table counts what the sources
offered after that; the run read {tokens:.2f} M tokens of it.

| source | origin | licence | documents | text, MB |
|---|---|---|---|---|
{rows}
"""

_OWN_TEXT = """\
{read:.2f} M more tokens were read from {tokens:.2f} M that the target wrote itself, after beginnings and stretches of
the same documents, a third of it greedily and the rest at temperatures 0.7 and 1.

"""


def model_card(
    trainer: Trainer[LanguageModel], name: str, command: str, valid: Mapping[str, float], length: int
) -> str:
    """The text of ``README.md``.

    Args:
        trainer: the run.
        name: of the model.
        command: the one that started the run, without folders of the machine.
        valid: validation losses in nats per token.
        length: tokens per sequence that they were measured on.
    """
    summary, config = _summary(trainer), trainer.objective.config
    chat = "Chat format: `<|user|>…<|end|><|assistant|>…<|end|>`."
    tokens = f"Byte-level BPE vocabulary of {config.vocab_size} tokens with GPT-2 pre-tokenization."
    losses = ", ".join(f"{each} {loss:.3f}" for each, loss in valid.items())
    figures = f"- validation loss in nats per token, on sequences of {length}: {losses}\n" if valid else ""
    sections = [
        _front_matter(summary),
        f"# {name}\n\n{_INTENT}",
        "## Model\n\n" + _model(trainer, config, f"{tokens} Weights are bfloat16. {chat}"),
        "## Training\n\n" + _training(trainer) + figures + f"\n```\n{command}\n```\n",
        "## Text\n\n" + _text(summary, trainer.tokens),
        "## Limits\n\n" + _LIMITS.format(context=config.context),
    ]
    return "\n".join(sections)


def draft_card(trainer: Trainer[Draft], name: str, command: str, figures: Mapping[str, float], length: int) -> str:
    """The same for a draft model; ``figures`` are those of its evaluation."""
    summary, objective = _summary(trainer), trainer.objective
    config, teacher, share = objective.config, objective.teacher, objective.options.share
    tokens = f"The target's tokenizer, {config.vocab_size} tokens."
    own = _own_text(objective, share * trainer.tokens)
    sections = [
        _front_matter(summary),
        f"# {name}\n\n" + _DRAFT_INTENT.format(target=teacher.name, name=name),
        "## Model\n\n" + _model(trainer, config, f"{tokens} Weights are bfloat16."),
        "## Target\n\n" + _TARGET.format(name=teacher.name, **teacher.fingerprints),
        "## Figures\n\n" + _draft_figures(objective, figures, length),
        "## Training\n\n" + _training(trainer) + f"\n```\n{command}\n```\n",
        "## Text\n\n" + own + _text(summary, (1 - share) * trainer.tokens),
        "## Limits\n\n" + _DRAFT_LIMITS.format(context=config.context),
    ]
    return "\n".join(sections)


def _summary(trainer: Trainer[Any]) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((trainer.folder / "data" / "sources.json").read_text(encoding="utf-8"))
    return summary


def _front_matter(summary: Mapping[str, Any]) -> str:
    licenses = json.dumps(sorted({record["license"] for record in summary["origins"]}))
    lines = ("library_name: transformers", "pipeline_tag: text-generation", f"training_text_licenses: {licenses}")
    return "\n".join(("---", *lines, "---", ""))


def _model(trainer: Trainer[Any], c: ModelConfig, more: str) -> str:
    parameters = sum(p.numel() for p in trainer.objective.module.parameters())
    return (
        f"Llama architecture, {parameters / 1e6:.2f} M parameters: {c.num_layers} layers, hidden size {c.hidden_size}, "
        f"{c.num_heads} heads of {c.head_dim} over {c.num_kv_heads} key/value heads, MLP {c.intermediate_size}, "
        f"tied embeddings. {more}\n"
    )


def _training(trainer: Trainer[Any]) -> str:
    o = trainer.options
    where = f"{torch.get_num_threads()} CPU threads" if o.device == "cpu" else o.device
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "tokenizers", "safetensors", "numpy"))
    loss = f"- training loss {trainer.history[-1]['loss']:.3f} nats per token at the end\n" if trainer.history else ""
    return (
        f"- {trainer.tokens / 1e6:.2f} M tokens in {trainer.step} steps of {o.batch} tokens, seed {o.seed}\n"
        f"- sequences of {o.length} tokens, in the last {o.final_share:.0%} of the run of {o.final_length}\n"
        f"- {o.optimizer}, peak learning rate {o.rate:g} after {o.warmup} warm-up steps, then a cosine to "
        f"{o.floor * o.rate:g}; weight decay {o.weight_decay:g}, bfloat16 autocast\n"
        f"- {trainer.seconds / 60:.0f} minutes on {where} ({platform.machine()})\n"
        f"- Python {platform.python_version()}, {versions}\n"
        f"{loss}"
    )


def _draft_figures(objective: Draft, figures: Mapping[str, float], length: int) -> str:
    sets = [name.removesuffix(" KL") for name in figures if name.endswith(" KL")]
    served = [name.removesuffix(" S") for name in figures if name.endswith(" S")]
    lines = [
        _DIVERGENCE.format(length=length),
        "| text | KL | same |",
        "|---|---|---|",
        *(f"| {name} | {figures[f'{name} KL']:.3f} | {figures[f'{name} same']:.3f} |" for name in sets),
    ]
    if served:
        lines += [
            _SERVED.format(num_tokens=objective.options.num_tokens),
            "| decoding | alpha | S |",
            "|---|---|---|",
            *(f"| {name} | {figures[f'{name} alpha']:.3f} | {figures[f'{name} S']:.2f} |" for name in served),
        ]
    return "\n".join(lines) + "\n"


def _own_text(objective: Draft, read: float) -> str:
    file = objective.data / "on-policy.json"
    if not read or not file.exists():
        return ""
    tokens = json.loads(file.read_text(encoding="utf-8"))["tokens"]
    return _OWN_TEXT.format(read=read / 1e6, tokens=tokens / 1e6)


def _text(summary: Mapping[str, Any], tokens: float) -> str:
    columns = ("source", "origin", "license", "documents")
    rows = [
        " | ".join(("", *(str(r[c]).replace("|", "/") for c in columns), f"{r['bytes'] / 1e6:.2f}", "")).strip()
        for r in summary["origins"]
    ]
    return _TEXT.format(
        weights=", ".join(f"{name} {weight:.1%}" for name, weight in summary["weights"].items()),
        duplicates=summary["duplicates"],
        excluded=summary["excluded"],
        tokens=tokens / 1e6,
        rows="\n".join(rows),
    )
