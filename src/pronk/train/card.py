"""Model cards (``README.md``): training, text, figures and limits of a model.

The texts are templates in the folder ``cards/``.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from pronk.base import render_card
from pronk.checkpoint import Fingerprint
from pronk.lab import HeadsShape
from pronk.train.data import BYTE_VOCAB
from pronk.train.heads import describe
from pronk.train.lm import TextModel
from pronk.train.loop import Trainer
from pronk.train.served import is_served
from pronk.train.students import Student


def model_card(trainer: Trainer[TextModel[Any]], name: str, facts: Mapping[str, Any]) -> str:
    """Return the model card of the language model ``name`` that ``trainer`` has trained.

    ``facts`` has ``figures`` (validation losses by text), ``length`` (number of tokens of the
    sequences on which the losses were measured), and ``command`` (the command of the run, without
    paths of the machine).
    """
    config = trainer.objective.config
    heads = trainer.objective.options.heads
    return render_card(
        "pronk.train",
        "model",
        **_run_variables(trainer, name, facts["command"]),
        library="transformers",
        parameters=sum(p.numel() for p in trainer.objective.decoder.parameters()),
        config=config,
        context=config.context,
        byte_vocab=BYTE_VOCAB,
        heads=heads,
        initial=trainer.objective.initial,
        beside=describe(heads) if heads else "",
        losses=_losses(facts["figures"], facts["length"]),
        share=0,
    )


def student_card(trainer: Trainer[Student[Any]], name: str, facts: Mapping[str, Any]) -> str:
    """Return the model card of the drafter ``name`` that ``trainer`` has trained.

    ``facts`` has ``figures`` (measurements by name), ``length`` (number of tokens of the held-out
    sequences), and ``command`` (the command of the run, without paths of the machine).
    """
    objective = trainer.objective
    figures = facts["figures"]
    # Figures have names such as "TEXT KL" and "TEXT same", where TEXT is a held-out text. If the
    # drafter has several branches, those of the second one are "TEXT KL 2" and "TEXT same 2".
    divergences: list[tuple[str, float, float]] = []
    for kl_name, divergence in figures.items():
        if " KL" in kl_name:
            same_name = kl_name.replace(" KL", " same", 1)
            divergences.append((kl_name.replace(" KL", ""), divergence, figures[same_name]))
    own_text = objective.data / "on-policy.json"
    num_own_tokens = 0
    if objective.options.share > 0 and own_text.exists():
        num_own_tokens = json.loads(own_text.read_text("utf-8"))["tokens"]
    return render_card(
        "pronk.train",
        "student",
        **_run_variables(trainer, name, facts["command"]),
        library=objective.library,
        parameters=sum(p.numel() for p in objective.module.parameters()),
        objective=objective,
        context=objective.options.context,
        length=facts["length"],
        divergences=divergences,
        served=_served(figures),
        num_tokens=objective.options.num_tokens,
        share=objective.options.share,
        own_text=num_own_tokens,
    )


def head_card(trainer: Trainer[Any], name: str, facts: Mapping[str, Any]) -> str:
    """Return the model card of the EAGLE-3 or MTP head ``name`` that ``trainer`` has trained.

    ``facts`` are those of :func:`student_card`.
    """
    return render_card(
        "pronk.train",
        "eagle",
        name=name,
        trainer=trainer,
        options=trainer.options,
        head=trainer.objective,
        figures=facts["figures"],
        command=facts["command"],
    )


def heads_card(
    name: str, shape: HeadsShape, fingerprint: Fingerprint, facts: Mapping[str, Any]
) -> str:
    """Return the model card of the multi-token heads of the language model ``name``.

    ``fingerprint`` is that of the language model. ``facts`` are those of :func:`model_card`; they
    are empty if the model is exported only to evaluate it.
    """
    figures = facts.get("figures", {})
    return render_card(
        "pronk.train",
        "heads",
        name=name,
        what=describe(shape),
        fingerprint=fingerprint,
        num_tokens=shape.num_heads,
        command=facts.get("command"),
        losses=_losses(figures, facts.get("length", 0)),
        served=_served(figures),
    )


def _run_variables(trainer: Trainer[Any], name: str, command: str) -> dict[str, Any]:
    """Return the variables of a card's template that describe the run, for all kinds of cards."""
    summary = json.loads((trainer.folder / "data" / "sources.json").read_text(encoding="utf-8"))
    # The weights of the sources add up to less than 1 if no text is a dialogue: the dialogues'
    # share is then missing.
    total = sum(summary["weights"].values())
    names = ("torch", "tokenizers", "safetensors", "numpy")
    packages = [f"{name} {version(name)}" for name in names]
    return {
        "name": name,
        "command": command,
        "trainer": trainer,
        "options": trainer.options,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "versions": ", ".join((platform.python_version(), *packages)),
        "summary": summary,
        "licenses": json.dumps(sorted({record["license"] for record in summary["origins"]})),
        "mixture": [(source, weight / total) for source, weight in summary["weights"].items()],
    }


def _losses(figures: Mapping[str, float], length: int) -> str:
    """Return the losses of a language model as one line of the card; empty without losses.

    ``length`` is the number of tokens of the sequences on which the losses were measured.
    """
    losses = [f"{name} {loss:.3f}" for name, loss in figures.items() if not is_served(name)]
    if not losses:
        return ""
    return f"validation loss in nats per token, on sequences of {length}: {', '.join(losses)}"


def _served(figures: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return acceptance rate (alpha), CTAR and S, measured in the engine, for a card's table.

    There is a row for greedy decoding and one for sampled decoding.
    """
    rows: list[dict[str, Any]] = []
    for name, tokens_per_step in figures.items():
        if not (is_served(name) and name.endswith(" S")):
            continue
        decoding = name.removesuffix(" S")
        prefix = f"{decoding} CTAR("
        ctar = [share for other, share in figures.items() if other.startswith(prefix)]
        alpha = figures[f"{decoding} alpha"]
        rows.append({"decoding": decoding, "alpha": alpha, "ctar": ctar, "S": tokens_per_step})
    return rows
