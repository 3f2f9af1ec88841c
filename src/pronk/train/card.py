"""Model cards with training, text, measurements and limits of a model.

Templates are in ``cards/``.
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
    """Return the ``README.md`` of a language model, called ``name``, of the run ``trainer``.

    ``facts`` has ``figures`` (validation losses), the ``length`` of the sequences that they were
    measured on, and the ``command`` of the run, without paths of the machine.
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
    """Return the ``README.md`` of a drafter; the arguments are those of :func:`model_card`."""
    objective = trainer.objective
    figures = facts["figures"]
    # Names of figures: "TEXT KL" and "TEXT same", with several branches also "TEXT KL 2" and "TEXT
    # same 2".
    pairs = [
        (name_of_kl, name_of_kl.replace(" KL", " same", 1))
        for name_of_kl in figures
        if " KL" in name_of_kl
    ]
    own_text = objective.data / "on-policy.json"
    uses_own_text = objective.options.share > 0
    return render_card(
        "pronk.train",
        "student",
        **_run_variables(trainer, name, facts["command"]),
        library=objective.library,
        parameters=sum(p.numel() for p in objective.module.parameters()),
        objective=objective,
        context=objective.options.context,
        length=facts["length"],
        divergences=[(kl.replace(" KL", ""), figures[kl], figures[same]) for kl, same in pairs],
        served=_served(figures),
        num_tokens=objective.options.num_tokens,
        share=objective.options.share,
        own_text=json.loads(own_text.read_text("utf-8"))["tokens"]
        if uses_own_text and own_text.exists()
        else 0,
    )


def head_card(trainer: Trainer[Any], name: str, facts: Mapping[str, Any]) -> str:
    """Return the ``README.md`` of an EAGLE-3 or MTP head.

    The arguments are those of :func:`model_card`.
    """
    objective = trainer.objective
    own = {"head": objective, "figures": facts["figures"], "command": facts["command"]}
    return render_card(
        "pronk.train", "eagle", name=name, trainer=trainer, options=trainer.options, **own
    )


def heads_card(
    name: str, shape: HeadsShape, fingerprint: Fingerprint, facts: Mapping[str, Any]
) -> str:
    """Return the ``README.md`` of the multi-token heads of the language model ``name``.

    ``fingerprint`` is that of the model. ``facts`` are as for :func:`model_card`, or empty for an
    evaluation.
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
    summary = json.loads((trainer.folder / "data" / "sources.json").read_text(encoding="utf-8"))
    # less than 1 if the text has no dialogues: their pool is dropped
    total = sum(summary["weights"].values())
    packages = [
        f"{package} {version(package)}"
        for package in ("torch", "tokenizers", "safetensors", "numpy")
    ]
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
    """Return a language model's losses as one line, or an empty text without losses."""
    losses = ", ".join(
        f"{name} {loss:.3f}" for name, loss in figures.items() if not is_served(name)
    )
    return (
        f"validation loss in nats per token, on sequences of {length}: {losses}" if losses else ""
    )


def _served(figures: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return alpha, CTAR and S of each decoding method (greedy, sampled), as measured in the engine."""
    return [
        {
            "decoding": method,
            "alpha": figures[f"{method} alpha"],
            "ctar": [
                share for name, share in figures.items() if name.startswith(f"{method} CTAR(")
            ],
            "S": figures[f"{method} S"],
        }
        for method in (
            name.removesuffix(" S") for name in figures if is_served(name) and name.endswith(" S")
        )
    ]
