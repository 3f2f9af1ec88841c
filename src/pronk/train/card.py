"""The model card: what a model was trained on, how, and what it is not.

The texts are the templates in ``cards/``: one for each kind of card, on top of what they share.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from pronk.train.heads import describe
from pronk.train.lm import TextModel
from pronk.train.loop import Trainer
from pronk.train.served import is_served
from pronk.train.student import Student
from pronk.train.tokenizer import BYTE_VOCAB

__all__ = ["heads_card", "model_card", "render", "student_card"]


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
    config, heads = trainer.objective.config, trainer.objective.options.heads
    return render(
        "model",
        **_run(trainer, name, command),
        library="transformers",
        parameters=_millions(trainer.objective.decoder),
        config=config,
        context=config.context,
        byte_vocab=BYTE_VOCAB,
        heads=heads,
        beside=describe(heads) if heads else "",
        losses=_losses(valid, length),
        share=0,
    )


def student_card(
    trainer: Trainer[Student[Any]], name: str, command: str, figures: Mapping[str, float], length: int
) -> str:
    """The same for a drafter; ``figures`` are those of its evaluation."""
    objective = trainer.objective
    # A drafter of several branches has the number of the branch behind the figure's name.
    pairs = [(each, each.replace(" KL", " same", 1)) for each in figures if " KL" in each]
    own = objective.data / "on-policy.json"
    return render(
        "student",
        **_run(trainer, name, command),
        library=objective.library,
        parameters=_millions(objective.module),
        objective=objective,
        context=objective.options.context,
        length=length,
        divergences=[(kl.replace(" KL", ""), figures[kl], figures[same]) for kl, same in pairs],
        served=_served(figures),
        num_tokens=objective.options.num_tokens,
        share=objective.options.share,
        own_text=json.loads(own.read_text(encoding="utf-8"))["tokens"]
        if objective.options.share and own.exists()
        else 0,
    )


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
    figures = facts.get("figures", {})
    return render(
        "heads",
        name=name,
        what=what,
        fingerprint=fingerprint,
        num_tokens=num_heads,
        command=facts.get("command"),
        losses=_losses(figures, facts.get("length", 0)),
        served=_served(figures),
    )


def render(card: str, package: str = "pronk.train", **facts: Any) -> str:
    """Fill in the template ``cards/NAME.md.j2`` of a package."""
    environment = Environment(  # noqa: S701 - Markdown, from files of the package
        loader=PackageLoader(package, "cards"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "cell": lambda text: str(text).replace("|", "/"),
        "count": lambda tokens: f"{tokens / 1e6:.2f} M" if tokens >= 1e5 else f"{tokens:.0f}",
        "percent": _percent,
    }
    return environment.get_template(f"{card}.md.j2").render(facts)


def _run(trainer: Trainer[Any], name: str, command: str) -> dict[str, Any]:
    """What a card says of any run."""
    summary = json.loads((trainer.folder / "data" / "sources.json").read_text(encoding="utf-8"))
    total = sum(summary["weights"].values())  # a share for dialogues goes to the others where there are none
    packages = [f"{package} {version(package)}" for package in ("torch", "tokenizers", "safetensors", "numpy")]
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


def _percent(share: float, digits: int = 0) -> str:
    return f"{share:.{digits}%}"


def _millions(module: torch.nn.Module) -> str:
    return f"{sum(p.numel() for p in module.parameters()) / 1e6:.2f}"


def _losses(figures: Mapping[str, float], length: int) -> str:
    """Of a language model, in one line, if there are any."""
    losses = ", ".join(f"{each} {loss:.3f}" for each, loss in figures.items() if not is_served(each))
    return f"validation loss in nats per token, on sequences of {length}: {losses}" if losses else ""


def _served(figures: Mapping[str, float]) -> list[dict[str, Any]]:
    """What the engine measured with each kind of decoding."""
    decodings = [name.removesuffix(" S") for name in figures if is_served(name) and name.endswith(" S")]
    return [
        {
            "decoding": each,
            "alpha": figures[f"{each} alpha"],
            "ctar": [share for name, share in figures.items() if name.startswith(f"{each} CTAR(")],
            "S": figures[f"{each} S"],
        }
        for each in decodings
    ]
