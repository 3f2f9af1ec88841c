"""Small models of the multi-token paper, trained on text files.

The text is Python code, as in the paper's main experiments: by default the standard library and the
installed packages. The paper measures models of 0.3 to 13 billion weights by pass@k on MBPP and
HumanEval. A model of a million weights solves none of these problems, so that the figures here are
the loss on held-out text and tokens per forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from multi_token_models import Heads, model_shape
from torch import Tensor

from pronk import LLM, SamplingParams
from pronk.train.attention import dense_hidden
from pronk.train.corpus.sources import parse_source
from pronk.train.data import prepare
from pronk.train.export import InitialModel
from pronk.train.future import FutureTokens
from pronk.train.lm import LanguageModel, TextModel, held_out_sets
from pronk.train.options import DataOptions, TrainOptions
from pronk.train.served import beginnings

__all__ = ["VARIANTS", "TextCell", "choice_points", "measure_batches", "prepare_text"]

CONTEXT = 1024  # context of the models in tokens

# Heads of table S4: the model that predicts one token, and all variants that predict four.
VARIANTS = (
    Heads(1),
    Heads(4, "linear", "parallel"),
    Heads(4, "linear", "causal"),
    Heads(4, "transformer", "anticausal"),
    Heads(4, "transformer", "causal"),
    Heads(4, "transformer", "parallel"),
    Heads(4, "transformer", "parallel", equal=False),
    Heads(4, "transformer", "parallel", "replicated"),
)


def prepare_text(
    folder: Path,
    sources: Sequence[str],
    tokens: int,
    vocab: int,
    say: Callable[[str], None],
    init: str | None = None,
) -> None:
    """Write the token files of a text into a folder, unless the files exist.

    Args:
        folder: folder of the files.
        sources: sources of the text, as in ``pronk train``.
        tokens: number of tokens.
        vocab: size of the vocabulary of a new tokenizer.
        say: called with lines of progress.
        init: checkpoint whose tokenizer is used; ``None`` trains a new tokenizer.
    """
    parsed = tuple(parse_source(each) for each in sources)
    options = DataOptions(parsed, dialogues=0.0, vocab_size=vocab)
    encoder = None if init is None else InitialModel.read(init).encoder
    prepare(options, folder, tokens, CONTEXT, say, encoder)


@dataclass(frozen=True)
class TextCell:
    """One model to train on token files."""

    data: Path  # folder of the token files
    size: str
    heads: Heads
    steps: int  # number of optimizer steps
    seed: int = 0
    vocab: int = 1024
    init: str | None = None  # checkpoint to begin with; None begins with random weights
    batch: int = 2048  # tokens per step
    length: int = 256  # tokens per sequence
    rate: float = 3e-3  # peak learning rate
    evaluations: int = 2  # number of evaluations during the training
    labels: dict[str, Any] = field(default_factory=dict)  # further columns of the result
    device: str = "cpu"

    @property
    def name(self) -> str:
        """Name of the model's folder."""
        labels = (f"{key}={value}" for key, value in self.labels.items())
        numbers = (f"seed={self.seed}", f"steps={self.steps}")
        return " ".join((self.size, self.heads.name, *labels, *numbers))

    @property
    def facts(self) -> dict[str, Any]:
        """Columns of the result that identify the model."""
        heads = self.heads
        model = {"size": self.size, "n": heads.tokens, "heads": vars(heads), "seed": self.seed}
        return {**model, **self.labels}

    def options(self) -> TrainOptions:
        """Return the options of the training.

        Raises:
            OptionError: the heads do not fit the model.
        """
        if self.init is None:
            shape, further = self.heads.plan(model_shape(self.size, self.vocab))
        else:
            initial = InitialModel.read(self.init)
            shape = initial.shape
            further = initial.heads_for(self.heads.tokens)
            if not further:
                _, further = Heads(self.heads.tokens, equal=False).plan(shape)
        return TrainOptions(
            shape=shape,
            heads=further,
            steps=self.steps,
            batch=self.batch,
            micro=self.batch,
            length=self.length,
            final_share=0.0,
            rate=self.rate,
            floor=0.03,
            warmup=min(50, self.steps // 10),
            seed=self.seed,
            threads=1,
            device=self.device,
            evaluate_every=max(1, self.steps // self.evaluations),
            save_every=max(1, self.steps // 40),
        )

    def objective(self, folder: Path, options: TrainOptions) -> TextModel[Any]:
        """Return the objective of ``pronk train lm``, with a link to the shared token files."""
        if not (folder / "data").exists():
            (folder / "data").symlink_to(self.data.resolve())
        initial = None if self.init is None else InitialModel.read(self.init)
        kind = LanguageModel if options.heads is None else FutureTokens
        return kind(folder, options, initial)


@torch.no_grad()
def token_losses(model: TextModel[Any], inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Return the losses of each head in nats, float32 ``[count, length]``.

    The loss of a target token stands at its own place. Head ``i`` predicts a token ``i`` places
    after that of head 0, so that its first ``i`` losses are NaN.
    """
    count, length = inputs.shape
    inputs = inputs.to(model.device)
    targets = targets.to(model.device)
    if isinstance(model, FutureTokens):
        trunk = model.module.trunk(inputs)
        outputs = {}
        x = trunk
        chained = model.module.heads.shape.is_chained
        for number, apply in model.module.stages(inputs):
            out = apply(x)
            outputs[number] = out
            x = out if chained else trunk
        read = model.module.norm_and_unembedding
    else:
        decoder = model.decoder
        outputs = {0: dense_hidden(decoder, inputs)}

        def read(_: int, x: Tensor) -> tuple[Tensor, Tensor]:
            return decoder.norm(x), decoder.embedding

    losses = []
    for number in sorted(outputs):
        hidden, weight = read(number, outputs[number])
        log_q = (hidden @ weight.T).log_softmax(-1).view(count, length, -1)
        found = torch.full((count, length), torch.nan)
        at = targets[:, number:, None]
        found[:, number:] = -log_q[:, : length - number].gather(2, at)[..., 0].cpu()
        losses.append(found)
    return losses


def choice_points(
    plain: TextModel[Any], several: TextModel[Any], sequences: int = 64
) -> dict[str, float]:
    """Measure how much more weight choice points have in a loss over ``n`` tokens (appendix L.3).

    A choice point is a token to which the next-token model ``plain`` gives a loss of at least 3
    nats, with a mean loss below 1 nat at the ``n - 1`` tokens before and after it: an isolated
    surprise. According to the paper, ``n (n + 1) / 2`` terms of the loss span a choice point, if
    all of them are as hard to predict, and ``n`` terms belong to another token. The measured weight
    is the sum of the losses of the spanning terms, divided by ``n`` times the loss of head 0 at the
    choice point.
    """
    n = several.module.heads.shape.num_heads + 1
    (_, texts), *_ = held_out_sets(several.data, 256, several.config.vocab_size)
    inputs, targets = texts.batch(0, min(sequences, len(texts)))
    one = token_losses(plain, inputs, targets)[0]
    own = token_losses(several, inputs, targets)
    weights = list[float]()
    choices = list[tuple[float, float]]()
    others = list[tuple[float, float]]()
    for row in range(len(inputs)):
        for place in range(n, inputs.shape[1] - n):
            pair = (float(one[row, place]), float(own[0][row, place]))
            around = [float(one[row, place + step]) for step in range(1 - n, n) if step]
            if pair[0] >= 3 and fmean(around) < 1:
                # The prediction of the token at place + j by head i spans the choice point if
                # 0 <= j <= i.
                spanning = [float(own[i][row, place + j]) for i in range(n) for j in range(i + 1)]
                weights.append(sum(spanning) / (n * max(pair[1], 1e-6)))
                choices.append(pair)
            elif pair[0] < 1:
                others.append(pair)

    def mean(values: list[float]) -> float:
        return fmean(values) if values else float("nan")

    return {
        "n": n,
        "choice points": len(choices),
        "other tokens": len(others),
        "weight by the count of terms": (n + 1) / 2,
        "measured weight": mean(weights),
        "loss at choice points, n = 1": mean([plain_loss for plain_loss, _ in choices]),
        f"loss at choice points, n = {n}": mean([own_loss for _, own_loss in choices]),
        "loss at other tokens, n = 1": mean([plain_loss for plain_loss, _ in others]),
        f"loss at other tokens, n = {n}": mean([own_loss for _, own_loss in others]),
    }


def measure_batches(
    model: Path,
    batches: Sequence[int],
    heads: Sequence[int],
    tokens: int,
    rounds: int,
    stop: Callable[[], bool],
) -> list[dict[str, Any]]:
    """Measure throughput and latency of greedy decoding (figure S10).

    Latency is the duration of a batch whose requests start together. The shortest of ``rounds``
    times counts, and the order of the numbers of heads changes from round to round.

    Args:
        model: folder of the model.
        batches: batch sizes.
        heads: numbers ``k`` of heads to use.
        tokens: number of tokens per request.
        rounds: number of rounds.
        stop: returns whether the time is over.

    Returns:
        A row for each batch size and number of heads, relative to the first number of heads.
    """
    llm = LLM(
        model,
        drafter="autoregressive",
        threads=1,
        max_batch=max(batches),
        budget="all",
        calibration=False,
    )
    data = model.parent / "data"
    end = llm.config.eos_ids[0]
    prompts = beginnings(data, llm.config.vocab_size, end, llm.config.context)
    rows = list[dict[str, Any]]()
    for batch in batches:
        texts = [prompts[number % len(prompts)] for number in range(batch)]
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        best: dict[int, tuple[float, int, int]] = {}
        expected: list[list[int]] | None = None
        for number in range(rounds):
            for k in heads[:: -1 if number % 2 else 1]:
                if stop():
                    return rows
                drafter = "autoregressive" if k == 1 else f"multi_token(num_tokens={k - 1})"
                started = perf_counter()
                outputs = llm.generate(texts, params, drafter=drafter)
                seconds = perf_counter() - started
                written = [list(output.token_ids) for output in outputs]
                assert expected is None or written == expected, "draft tokens changed the text"
                expected = written
                passes = max(len(output.stats.steps) for output in outputs)
                figures = (seconds, sum(map(len, written)), passes)
                best[k] = min(best.get(k, figures), figures)
        plain, _, _ = best[heads[0]]
        for k, (seconds, count, passes) in sorted(best.items()):
            row = {
                "batch": batch,
                "k": k,
                "seconds": seconds,
                "tokens_per_second": count / seconds,
                "throughput": plain / seconds,
                "latency": seconds / plain,
                "tokens_per_pass": count / batch / max(1, passes),
            }
            rows.append(row)
    return rows
