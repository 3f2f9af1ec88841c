"""The model card: what a model was trained on, how, and what it is not."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from pronk.architecture.config import ModelConfig
from pronk.train.heads import describe
from pronk.train.lm import TextModel
from pronk.train.loop import Trainer
from pronk.train.options import LoopOptions
from pronk.train.served import is_served
from pronk.train.student import Student
from pronk.train.tokenizer import BYTE_VOCAB

__all__ = ["heads_card", "model_card", "student_card"]

_INTENT = """\
A small language model to try decoding methods on: it writes plausible Python, simple prose and worked sums in the
style of its training text, and it is wrong about facts and arithmetic most of the time. Do not rely on what it says.
"""

_LIMITS = """\
Context {context} tokens. English and Python only. The text was not filtered for bias or offence. It answers a chat in
form, not in substance.
"""

_STUDENT_INTENT = """\
{what} for {target}: it guesses the next few tokens, and the target, which has the last word, checks them in one pass.
It was trained on what the target says, and is of little use for anything else. Use it in pronk with
`drafter="{kind}(model='FOLDER')"`, where FOLDER is this one.
"""

_STUDENT_LIMITS = """\
Context {context} tokens. Its guesses are as good as its text was like yours; the target's own text is never changed by
them. {others}
"""

_DIVERGENCE = """\
Divergence from the target in nats per token, and share of positions where both have the same likeliest token, on
held-out sequences of {length} tokens; `on-policy` is the target's own text.
"""

_SERVED = """
Guessing {num_tokens} tokens a step for the target in pronk's engine, after held-out prompts: alpha, the acceptance rate
of the first guess; CTAR(w), the share of the target's passes whose first w guesses were all accepted; S, tokens per
pass.
"""

_BESIDE = """\
It was trained to predict {tokens} tokens at once. The heads of the tokens after the next are in the folder `heads`, for
the drafter `multi_token`: {what}
"""

_HEADS = """\
---
library_name: pronk
---

# Heads of {name}

{what}

They were trained together with the model in the folder above and work with no other one. Use them in pronk with
`drafter="multi_token(model='FOLDER')"`, where FOLDER is this one.

## Target

- {name}
- fingerprint: {fingerprint}
"""

_TARGET = """\
- {name}
- fingerprint: {fingerprint}
- SHA-256 of its weights and `config.json`: `{weights}`
- fingerprint of its tokenizer: `{tokenizer}`
"""

_TEXT = """\
Mixture by bytes: {weights}. {duplicates} exact copies were dropped, and {excluded} documents that were empty or shared
a run of 13 words with the excluded prompts; one document in 100 was held out, or the end of one where there are few.
The table counts what the sources offered after that; the run read {tokens} tokens of it.

| source | origin | licence | documents | text, MB |
|---|---|---|---|---|
{rows}
"""

_OWN_TEXT = """\
{read} more tokens were read from {tokens} that the target wrote itself, after beginnings and stretches of
the same documents, a third of it greedily and the rest at temperatures 0.7 and 1.

"""


def model_card(
    trainer: Trainer[TextModel[Any]], name: str, command: str, valid: Mapping[str, float], length: int
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
    if config.vocab_size == BYTE_VOCAB:
        tokens = f"Its tokens are bytes: a vocabulary of 256 and {BYTE_VOCAB - 256} special tokens."
    heads = trainer.objective.options.heads
    beside = _BESIDE.format(tokens=heads.num_heads + 1, what=describe(heads)) if heads else ""
    losses = _losses(valid, length)
    figures = f"- {losses}\n" if losses else ""
    sections = [
        _front_matter(summary),
        f"# {name}\n\n{_INTENT}",
        "## Model\n\n" + _model(trainer, config, f"{tokens} Weights are bfloat16. {chat}", beside),
        "## Training\n\n" + _training(trainer) + figures + f"\n```\n{command}\n```\n",
        "## Text\n\n" + _text(summary, trainer.tokens),
        "## Limits\n\n" + _LIMITS.format(context=config.context),
    ]
    return "\n".join(sections)


def student_card(
    trainer: Trainer[Student[Any]], name: str, command: str, figures: Mapping[str, float], length: int
) -> str:
    """The same for a drafter; ``figures`` are those of its evaluation."""
    summary, objective = _summary(trainer), trainer.objective
    teacher, share = objective.teacher, objective.options.share
    own = _own_text(objective, share * trainer.tokens)
    parameters = sum(p.numel() for p in objective.module.parameters())
    model = f"{parameters / 1e6:.2f} M parameters, bfloat16: {objective.description}\n"
    intent = _STUDENT_INTENT.format(what=objective.what, target=teacher.name, kind=objective.kind)
    target = _TARGET.format(name=teacher.name, fingerprint=teacher.fingerprint, **teacher.fingerprints)
    limits = _STUDENT_LIMITS.format(context=objective.options.context, others=objective.others)
    sections = [
        _front_matter(summary, objective.library),
        f"# {name}\n\n" + intent,
        "## Model\n\n" + model,
        "## Target\n\n" + target,
        "## Figures\n\n" + _student_figures(objective, figures, length),
        "## Training\n\n" + _training(trainer) + f"\n```\n{command}\n```\n",
        "## Text\n\n" + own + _text(summary, (1 - share) * trainer.tokens),
        "## Limits\n\n" + limits,
    ]
    return "\n".join(sections)


def heads_card(name: str, what: str, fingerprint: str, num_heads: int, facts: Mapping[str, Any]) -> str:
    """The same for the heads of a language model.

    Args:
        name: of the model.
        what: the heads in words.
        fingerprint: of the model.
        num_heads: how many there are.
        facts: the run's ``figures``, the ``length`` of the sequences that they were measured on, and its ``command``;
            an evaluation has none.
    """
    text = _HEADS.format(name=name, what=what, fingerprint=fingerprint)
    if not facts:
        return text
    lines = [_losses(facts["figures"], facts["length"]), *_served(facts["figures"], num_heads)]
    figures = "\n".join(line for line in lines if line)
    return f"{text}\n## Figures\n\n{figures}\n\n## Training\n\n```\n{facts['command']}\n```\n"


def _summary(trainer: Trainer[Any]) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((trainer.folder / "data" / "sources.json").read_text(encoding="utf-8"))
    return summary


def _front_matter(summary: Mapping[str, Any], library: str = "transformers") -> str:
    licenses = json.dumps(sorted({record["license"] for record in summary["origins"]}))
    lines = (f"library_name: {library}", "pipeline_tag: text-generation", f"training_text_licenses: {licenses}")
    return "\n".join(("---", *lines, "---", ""))


def _model(trainer: Trainer[TextModel[Any]], c: ModelConfig, more: str, beside: str) -> str:
    parameters = sum(p.numel() for p in trainer.objective.decoder.parameters())
    return (
        f"Llama architecture, {parameters / 1e6:.2f} M parameters: {c.num_layers} layers, hidden size {c.hidden_size}, "
        f"{c.num_heads} heads of {c.head_dim} over {c.num_kv_heads} key/value heads, MLP {c.intermediate_size}, "
        f"tied embeddings. {more}\n" + (f"\n{beside}" if beside else "")
    )


def _training(trainer: Trainer[Any]) -> str:
    o = trainer.options
    where = f"{o.device}, CPU threads: {torch.get_num_threads()}"
    where += f", processes: {trainer.processes.count}" if trainer.processes.count > 1 else ""
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "tokenizers", "safetensors", "numpy"))
    loss = f"- training loss {trainer.history[-1]['loss']:.3f} nats per token at the end\n" if trainer.history else ""
    return (
        f"- {_count(trainer.tokens)} tokens in {trainer.step} steps of {o.batch} tokens, seed {o.seed}\n"
        f"- {_sequences(o)}\n"
        f"- {o.optimizer}, peak learning rate {o.rate:g} after {o.warmup} warm-up steps, then a cosine to "
        f"{o.floor * o.rate:g}; weight decay {o.weight_decay:g}, bfloat16 autocast\n"
        f"- {trainer.seconds / 60:.1f} minutes on {where} ({platform.machine()})\n"
        f"- Python {platform.python_version()}, {versions}\n"
        f"{loss}"
    )


def _sequences(options: LoopOptions) -> str:
    first, last = options.first_length, options.last_length
    if len(options.lengths) == 1:
        return f"sequences of {first} tokens"
    return f"sequences of {first} tokens, in the last {options.final_share:.0%} of the run of {last}"


def _losses(figures: Mapping[str, float], length: int) -> str:
    """Of a language model, in one line, if there are any."""
    losses = ", ".join(f"{each} {loss:.3f}" for each, loss in figures.items() if not is_served(each))
    return f"validation loss in nats per token, on sequences of {length}: {losses}" if losses else ""


def _student_figures(objective: Student[Any], figures: Mapping[str, float], length: int) -> str:
    # A drafter of several branches has the number of the branch behind the figure's name.
    pairs = [(name, name.replace(" KL", " same", 1)) for name in figures if " KL" in name]
    lines = [
        _DIVERGENCE.format(length=length),
        "| text | KL | same |",
        "|---|---|---|",
        *(f"| {kl.replace(' KL', '')} | {figures[kl]:.3f} | {figures[same]:.3f} |" for kl, same in pairs),
    ]
    return "\n".join([*lines, *_served(figures, objective.options.num_tokens)]) + "\n"


def _served(figures: Mapping[str, float], num_tokens: int) -> list[str]:
    """Lines on what the engine measured, if it did."""
    served = [name.removesuffix(" S") for name in figures if is_served(name) and name.endswith(" S")]
    ctar = {each: [v for name, v in figures.items() if name.startswith(f"{each} CTAR(")] for each in served}
    rows = [
        f"| {name} | {figures[f'{name} alpha']:.3f} | {', '.join(f'{v:.3f}' for v in ctar[name])} | "
        f"{figures[f'{name} S']:.2f} |"
        for name in served
    ]
    head = ["| decoding | alpha | CTAR(1), CTAR(2), … | S |", "|---|---|---|---|"]
    return [_SERVED.format(num_tokens=num_tokens), *head, *rows] if rows else []


def _own_text(objective: Student[Any], read: float) -> str:
    file = objective.data / "on-policy.json"
    if not read or not file.exists():
        return ""
    tokens = json.loads(file.read_text(encoding="utf-8"))["tokens"]
    return _OWN_TEXT.format(read=_count(read), tokens=_count(tokens))


def _text(summary: Mapping[str, Any], tokens: float) -> str:
    columns = ("source", "origin", "license", "documents")
    rows = [
        " | ".join(("", *(str(r[c]).replace("|", "/") for c in columns), f"{r['bytes'] / 1e6:.2f}", "")).strip()
        for r in summary["origins"]
    ]
    total = sum(summary["weights"].values())  # a share for dialogues goes to the others where there are none
    return _TEXT.format(
        weights=", ".join(f"{name} {weight / total:.1%}" for name, weight in summary["weights"].items()),
        duplicates=summary["duplicates"],
        excluded=summary["excluded"],
        tokens=_count(tokens),
        rows="\n".join(rows),
    )


def _count(tokens: float) -> str:
    """In millions where there are many."""
    return f"{tokens / 1e6:.2f} M" if tokens >= 1e5 else f"{tokens:.0f}"
