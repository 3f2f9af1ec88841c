"""Small models of the multi-token paper, trained on synthetic tasks.

The training can be stopped and continued. A *cell* is one model: its size, number of tokens
predicted at once, seed and task. The cell's folder in the state folder has the checkpoint of
:mod:`pronk.train.loop`, and ``result.json`` with the accuracy at each evaluation.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from multi_token_tasks import IGNORED, Task
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pronk.base.errors import OptionError
from pronk.base.files.atomic import write_json
from pronk.lab.bench.machine import describe_hardware
from pronk.train.future import FutureTokens, future_shape, without_head_layers
from pronk.train.heads import head_by_head, shifted_rows
from pronk.train.lm import LanguageModel, TextModel, model_config
from pronk.train.loop import PassResult, Report, Trainer, find_device
from pronk.train.losses import autocast, text_loss
from pronk.train.options import ModelShape, TrainOptions

__all__ = [
    "SIZES",
    "Cell",
    "Deadline",
    "Heads",
    "TaskModel",
    "Trainable",
    "model_shape",
    "train_cell",
]

# Hidden size, layers and attention heads by millions of weights besides the embedding; 1M to 10M
# are from table S14. The MLP is gated, and its width is 8/3 of the hidden size.
SIZES = {
    "tiny": (32, 4, 2),
    "0.3M": (64, 6, 4),
    "1M": (128, 5, 4),
    "3M": (256, 4, 8),
    "10M": (384, 6, 8),
}


def model_shape(size: str, vocab: int) -> ModelShape:
    """Return the shape of a model with a size in ``SIZES``, without further heads."""
    hidden, layers, heads = SIZES[size]
    return ModelShape(hidden, layers, heads, heads, -(-8 * hidden // 24) * 8, vocab, 1024)


@dataclass(frozen=True)
class Heads:
    """Number of tokens that a model predicts at once, and kind of its heads (appendix B)."""

    tokens: int = 1
    kind: str = "transformer"
    order: str = "parallel"
    unembeddings: str = "shared"
    equal: bool = True  # whether the heads replace layers, where they have layers of their own

    @property
    def name(self) -> str:
        """Number of tokens and architecture as text."""
        if self.tokens == 1:
            return "n=1"
        words = [f"n={self.tokens}", self.kind, self.order]
        if self.unembeddings == "replicated":
            words.append("replicated")
        if self.adds_layers:
            words.append("equal" if self.equal else "added")
        return " ".join(words)

    @property
    def adds_layers(self) -> bool:
        """Whether each further head adds a layer."""
        return self.kind == "transformer" and self.order != "anticausal"

    def plan(self, shape: ModelShape) -> tuple[ModelShape, Any]:
        """Return the shapes of the decoder and of the further heads.

        Raises:
            OptionError: the model has too few layers.
        """
        if self.tokens > 1 and self.equal and self.adds_layers:
            shape = without_head_layers(shape, self.tokens, self.kind, self.order)
        return shape, future_shape(shape, self.tokens, self.kind, self.order, self.unembeddings)


@dataclass(frozen=True)
class Cell:
    """One model to train on a task."""

    size: str
    heads: Heads
    task: Task
    steps: int  # number of optimizer steps
    texts: int = 32  # number of texts per step
    # Peak learning rate at hidden size 128. The rate is inversely proportional to the hidden size,
    # because models of 3 M weights did not form induction at the rate of those of 1 M weights.
    rate: float = 3e-3
    evaluations: int = 20  # number of evaluations during the training
    count: int = 200  # number of test texts per group
    labels: Mapping[str, Any] = field(default_factory=dict)  # further columns of the result
    device: str = "cpu"

    @property
    def name(self) -> str:
        """Name of the model's folder."""
        labels = (f"{key}={value}" for key, value in self.labels.items())
        numbers = (f"seed={self.task.seed}", f"steps={self.steps}", f"rate={self.peak:.4g}")
        return " ".join((self.size, self.heads.name, *labels, *numbers))

    @property
    def peak(self) -> float:
        """Peak learning rate of the model's size."""
        return self.rate * SIZES["1M"][0] / SIZES[self.size][0]

    @property
    def facts(self) -> dict[str, Any]:
        """Columns of the result that identify the model."""
        heads = self.heads
        model = {"size": self.size, "n": heads.tokens, "heads": vars(heads), "seed": self.task.seed}
        return {**model, "base_rate": self.rate, **self.labels}

    def objective(self, folder: Path, options: TrainOptions) -> TextModel[Any]:
        """Return the objective of a model without or with further heads."""
        kind = _NextToken if options.heads is None else _SeveralTokens
        return kind(folder, options, self.task, self.count)

    def options(self) -> TrainOptions:
        """Return the options of the training.

        Raises:
            OptionError: the heads do not fit the model.
        """
        shape, further = self.heads.plan(model_shape(self.size, len(self.task.words)))
        return TrainOptions(
            shape=shape,
            heads=further,
            steps=self.steps,
            batch=self.texts * self.task.length,
            micro=self.texts * self.task.length,
            length=self.task.length,
            final_share=0.0,
            rate=self.peak,
            floor=0.03,
            warmup=min(50, self.steps // 10),
            seed=self.task.seed,
            threads=1,
            device=self.device,
            evaluate_every=max(1, self.steps // self.evaluations),
            save_every=max(1, self.steps // 40),
            log_every=max(1, self.steps // self.evaluations),
        )


class TaskModel(TextModel[Any]):
    """Objective of a model on a task instead of text files.

    The accuracy is measured on ``count`` test texts per group.
    """

    def __init__(self, folder: Path, options: TrainOptions, task: Task, count: int) -> None:
        self.folder = folder
        self.options = options
        self.initial = None
        self.task = task
        self.count = count
        self.config = model_config(options.shape, None, (0,))
        self.device = find_device(options.device)
        self.module = self.build().to(self.device)
        # A task has all attributes of a series of batches that the training loop reads.
        self.phases = (task, task)  # type: ignore[assignment]
        self.identity = {"kind": "multi_token"} | task.identity

    def evaluate(self, length: int, seconds: float = math.inf) -> dict[str, float]:  # noqa: ARG002
        """Return the accuracy in each group of the task."""
        accuracies = self.task.measure(self.decoder, self.count)
        return {str(group): accuracy for group, accuracy in accuracies.items()}

    def judge(self, figures: Mapping[str, float]) -> float:
        """Return the negative mean accuracy, of which the training loop keeps the smallest."""
        return -fmean(figures.values()) if figures else math.nan


class _NextToken(TaskModel, LanguageModel):
    """Objective of a model that predicts the next token."""


class _SeveralTokens(TaskModel, FutureTokens):
    """Objective of a model that predicts several tokens; targets without a loss are left out."""

    def backward(self, inputs: Tensor, targets: Tensor, scale: float) -> PassResult:
        """Add ``scale`` times the gradient of the heads' summed losses; return the mean loss."""
        inputs = inputs.to(self.device)
        targets = targets.to(self.device)
        with autocast(self.device):
            trunk = self._trunk(inputs)
            stages = self.module.stages(inputs)
        z = trunk.detach().requires_grad_()
        losses = list[float]()
        labels = targets.reshape(-1)
        outputs = head_by_head(stages, z, chained=self.module.heads.shape.is_chained)
        for number, out in outputs:
            rows, own_rows = shifted_rows(*inputs.shape, number, inputs.device)
            kept = labels[own_rows] != IGNORED
            with autocast(self.device):
                hidden, weight = self.module.norm_and_unembedding(number, out[rows[kept]])
            loss, _ = text_loss(hidden, weight, labels[own_rows[kept]])
            (loss * scale).backward()
            losses.append(float(loss.detach()))
        trunk.backward(z.grad)
        return PassResult(fmean(losses))


class Deadline:
    """Time limit of a command, in minutes from the creation of the object."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def __call__(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() >= self._end


class Trainable(Protocol):
    """A model of an experiment, and how it is trained."""

    @property
    def name(self) -> str:
        """Name of the model's folder."""

    @property
    def facts(self) -> dict[str, Any]:
        """Columns of the result that identify the model, such as ``n`` and ``seed``."""

    def options(self) -> TrainOptions:
        """Return the options of the training."""

    def objective(self, folder: Path, options: TrainOptions) -> TextModel[Any]:
        """Return the module with its text and evaluation."""


def restore_results(state: Path, report: Path, command: str, settings: Mapping[str, Any]) -> None:
    """Write the results of the finished models in a report to ``state``.

    The models are not trained again then.

    Raises:
        OptionError: the file is no report of ``command``, or its models were trained with other
            ``settings``.
    """
    try:
        document = json.loads(report.read_text(encoding="utf-8"))
        found = {name: document["settings"][name] for name in ("command", *settings)}
        results = {Path(result["name"]).name: result for result in document["results"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        msg = (
            f"report: expected a JSON file of {command} at {report}, found none ({error!r}); "
            "check the path"
        )
        raise OptionError(msg) from error
    expected = {"command": command, **settings}
    if found != expected:
        msg = (
            f"report: expected one with {expected}, found {found}; "
            "give the options with which it was made"
        )
        raise OptionError(msg)
    for name, result in results.items():
        file = state / name / "result.json"
        if result["finished"] and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, result)


def train_cell(
    state: Path, cell: Trainable, stop: Callable[[], bool], say: Callable[[str], None]
) -> dict[str, Any] | None:
    """Train a model to its end, or until ``stop`` returns True; return its result.

    A finished model is not trained again. The result is written after each evaluation, so that a
    killed process loses only the steps since its last checkpoint. The result has the processor time
    of all calls for the model.

    Returns:
        The result, or ``None`` if the model has not been trained for a single step.
    """
    folder = state / cell.name
    file = folder / "result.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    if stop() or (before is not None and before["finished"]):
        return before
    try:
        options = cell.options()
    except OptionError as error:
        say(f"{cell.name}: skipped, {error}")
        return None
    started = time.process_time()
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(cell.objective(folder, options))
    hardware = describe_hardware(options.device)
    say(f"{cell.name}: from step {trainer.step} of {options.steps}")

    def write_result() -> dict[str, Any]:
        seconds = time.process_time() - started
        if before is not None:
            seconds += before["cpu_seconds"]
        evaluations = [entry for entry in trainer.history if entry["valid"]]
        result = {
            "name": cell.name,
            **cell.facts,
            "processor": hardware.get("accelerator", hardware["processor"]),
            "parameters": sum(each.numel() for each in trainer.objective.module.parameters()),
            "step": trainer.step,
            "steps": options.steps,
            "tokens": trainer.tokens,
            "finished": trainer.is_finished,
            "curve": [[entry["step"], entry["valid"]] for entry in evaluations],
            "cpu_seconds": seconds,
        }
        write_json(file, result)
        return result

    def evaluated(_: Report) -> None:
        # The checkpoint is written first: a result that says finished before its checkpoint would
        # keep the model from ever being trained to its end.
        trainer.save()
        write_result()

    # With heads of 32 to 48 dimensions, the backward pass of torch's fused attention takes up to
    # half of a step on a processor; with plain matrix products, attention takes a tenth.
    with sdpa_kernel(SDPBackend.MATH) if options.device == "cpu" else nullcontext():
        trainer.train(lambda _: None, evaluated, stop)
    if not trainer.step:
        return None
    result = write_result()
    seconds = f"{result['cpu_seconds']:.0f} CPU-seconds"
    say(f"{cell.name}: step {trainer.step} of {options.steps}, {seconds}")
    return result
