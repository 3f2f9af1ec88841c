"""Gain of a draft model by chain length, threshold, tree and acceptance rule.

    python benchmarks/draft_models.py                         # pronk-tiny and its draft model
    python benchmarks/draft_models.py --model BIG --draft D   # other models

The script prints Markdown tables, and one JSON document on the last line. The prompts are easy,
mixed or hopeless to predict. Plain decoding and all methods decode a prompt in turn, ``--repeats``
times; the speed of a method is the ratio of the sums of best times. Under the coupled rule, every
output must equal that of plain decoding. ``expected`` is the speed-up of a chain of g tokens by
Leviathan et al. 2023, (1 - a^(g+1)) / ((1 - a)(g c + 1)), with the measured acceptance rate a and
the measured cost c of a forward pass of the draft model.

Hopeless prompts are random digits. A small target that continues them greedily loops soon, so that
its text can be predicted. At a temperature above 0, the coupled rule gives draft model and target
the same random numbers.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np

from pronk import LLM, SamplingParams
from pronk.base.arrays import Array
from pronk.checkpoint.tensors import Checkpoint
from pronk.drafting import Drafter, make_drafter
from pronk.drafting.shared.chain import Chain
from pronk.engine.stats import Stats, StepStats
from pronk.lab.bench.metrics import expected_tokens, repeated_ngrams
from pronk.lab.drafters.cape import CapeProposer
from pronk.models.cost_model import CostCurve
from pronk.models.resolve import resolve_model
from pronk.models.shards import ShardEntry, write_weights
from pronk.models.tensor_plan import CheckpointTensor
from pronk.sampling.sampler import DraftToken

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
KINDS = ("easy", "mixed", "hopeless")
RULES = ("coupled", "rejection", "block")


@dataclass
class Tally:
    """Sums of a method over the prompts of a kind."""

    tokens: int = 0
    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    passes: list[StepStats] = field(default_factory=list)
    loops: list[float] = field(default_factory=list)

    @property
    def alpha(self) -> float | None:
        """Acceptance rate of the first draft token; ``None`` without draft tokens."""
        rates = Stats(steps=self.passes).acceptance
        return rates[0] if rates else None

    def add(self, out: Any) -> None:
        """Add the statistics of one output."""
        stats = out.stats
        self.tokens += stats.generated_tokens
        self.steps += stats.target_steps
        self.rows += sum(step.rows for step in stats.steps[1:])
        self.passes += stats.steps
        self.loops.append(repeated_ngrams(out.token_ids))


@dataclass(frozen=True)
class Method:
    """A drafter with options of the engine, and its name in tables."""

    label: str
    drafter: Drafter
    thrifty: bool = False  # whether draft tokens that do not pay for their rows are dropped


class Bench:
    """Runs methods over prompts, in turn for each prompt."""

    def __init__(
        self, llm: LLM, prompts: dict[str, list[str]], max_tokens: int, repeats: int
    ) -> None:
        self.llm = llm
        self.prompts = prompts
        self.max_tokens = max_tokens
        self.repeats = repeats
        self.plain: dict[tuple[str, SamplingParams], list[int]] = {}

    def run(
        self, methods: Sequence[Method], kind: str, temperature: float, rule: Any = "coupled"
    ) -> list[Tally]:
        """Return the sums of each method over the prompts of a kind."""
        tallies = [Tally() for _ in methods]
        for method in methods:  # load drafters and warm up caches
            self._once("warm up", SamplingParams(4), method)
        for number, prompt in enumerate(self.prompts[kind]):
            params = SamplingParams(
                self.max_tokens, temperature=temperature, seed=number, ignore_eos=True, rule=rule
            )
            best = [float("inf")] * len(methods)
            for turn in range(self.repeats):
                for which, method in enumerate(methods):
                    seconds, out = self._once(prompt, params, method)
                    best[which] = min(best[which], seconds)
                    if rule == "coupled":
                        self._compare(prompt, params, out.token_ids)
                    if not turn:
                        tallies[which].add(out)
            for tally, seconds in zip(tallies, best, strict=True):
                tally.seconds += seconds
        return tallies

    def _once(self, prompt: str, params: SamplingParams, method: Method) -> tuple[float, Any]:
        self.llm.engine.speculator.budget = method.thrifty
        began = perf_counter()
        out = self.llm.generate(prompt, params, drafter=method.drafter)
        return perf_counter() - began, out

    def _compare(self, prompt: str, params: SamplingParams, tokens: list[int]) -> None:
        if (prompt, params) not in self.plain:
            plain = self.llm.generate(prompt, params, drafter="autoregressive")
            self.plain[prompt, params] = plain.token_ids
        if tokens != self.plain[prompt, params]:
            message = "a method changed the output"
            raise SystemExit(message)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print(f"| {' | '.join(head)} |\n| --- {'| --: ' * (len(head) - 1)}|")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)
    print()


def shown(value: float | None) -> str:
    """Format a number with two digits, ``None`` as a dash."""
    return "–" if value is None else f"{value:.2f}"


def lengths(bench: Bench, draft: str, temperature: float, cost: float) -> dict[str, Any]:
    """Print and return the speeds of fixed chain lengths and of the threshold, by kind of text."""
    methods = [Method("plain", make_drafter("autoregressive"))]
    for g in LENGTHS:
        drafter = make_drafter(f"draft_model({draft}num_tokens={g})")
        methods.append(Method(f"{g} tokens", drafter))
    model = f"draft_model({draft[:-2]})"
    threshold = make_drafter(f"threshold({model})")
    accepted = make_drafter(f"threshold({model}, toward='accepted')")
    longest = make_drafter(f"draft_model({draft}num_tokens=16)")
    methods += [
        Method("threshold", threshold),
        Method("threshold, accepted", accepted),
        Method("threshold, budget auto", threshold, thrifty=True),
        Method("up to 16, budget auto", longest, thrifty=True),
    ]
    found = {kind: bench.run(methods, kind, temperature) for kind in KINDS}
    rows = []
    ratios = {}
    for which, method in enumerate(methods):
        row = [method.label]
        for kind in KINDS:
            base = found[kind][0]
            tally = found[kind][which]
            ratio = base.seconds / tally.seconds
            alpha = tally.alpha
            ratios[kind, method.label] = ratio
            gamma = LENGTHS[which - 1] if 0 < which <= len(LENGTHS) else None
            expected = None
            if gamma is not None and alpha is not None:
                expected = expected_tokens(alpha, gamma) / (gamma * cost + 1)
            row += [
                shown(alpha),
                shown(tally.tokens / tally.steps),
                shown(expected),
                f"**{ratio:.2f}**",
            ]
        rows.append(row)
    row = ["repeated 4-grams"]
    for kind in KINDS:
        row += [f"{fmean(found[kind][0].loops):.0%}", "", "", ""]
    rows.append(row)
    head = [cell for kind in KINDS for cell in (f"{kind}: α", "S", "expected", "ratio")]
    table([f"chain, temperature {temperature:g}", *head], rows)
    return {f"{kind}/{label}": ratio for (kind, label), ratio in ratios.items()}


def rules(bench: Bench, draft: str) -> dict[str, Any]:
    """Print and return tokens per forward pass by acceptance rule and temperature.

    The rules generate different texts.
    """
    drafter = Method("4 tokens", make_drafter(f"draft_model({draft}num_tokens=4)"))
    rows = []
    found = {}
    for temperature in (0.0, 0.6, 1.0):
        for rule in RULES:
            tallies = [bench.run([drafter], kind, temperature, rule)[0] for kind in KINDS]
            tokens = sum(t.tokens for t in tallies)
            steps = sum(t.steps for t in tallies)
            alphas = [shown(t.alpha) for t in tallies]
            found[f"{rule}/{temperature:g}"] = tokens / steps
            rows.append([f"{temperature:g}", rule, *alphas, shown(tokens / steps)])
    table(["temperature", "rule", *(f"{kind}: α" for kind in KINDS), "S, all"], rows)
    return found


def trees(bench: Bench, draft: str, temperature: float) -> dict[str, Any]:
    """Print and return the speeds of chains and trees."""
    model = f"draft_model({draft[:-2]})"
    specs = [
        "autoregressive",
        f"draft_model({draft}num_tokens=5)",
        f"cape(draft_model({draft}num_tokens=5))",
        f"cape(draft_model({draft}num_tokens=5), max_nodes=7)",
        f"cape(threshold({model}), max_nodes=15)",
        f"staged({model}, prompt_lookup, num_nodes=7)",
        f"staged({model}, prompt_lookup, num_nodes=15)",
        f"staged({model}, autoregressive, num_nodes=15)",
        f"beam({model}, width=4)",
    ]
    methods = list[Method]()
    for spec in specs:
        label = spec.replace(draft, "").replace(draft[:-2], "")
        methods.append(Method(label, make_drafter(spec)))
    found = {kind: bench.run(methods, kind, temperature) for kind in KINDS}
    rows = []
    ratios = {}
    for which, method in enumerate(methods):
        tallies = [found[kind][which] for kind in KINDS]
        num_rows = sum(tally.rows for tally in tallies)
        num_steps = sum(tally.steps for tally in tallies)
        row = [f"`{method.label}`", shown(num_rows / max(1, num_steps))]
        for kind, tally in zip(KINDS, tallies, strict=True):
            ratio = found[kind][0].seconds / tally.seconds
            ratios[f"{kind}/{method.label}"] = ratio
            row += [shown(tally.tokens / tally.steps), f"**{ratio:.2f}**"]
        rows.append(row)
    head = [cell for kind in KINDS for cell in (f"{kind}: S", "ratio")]
    table([f"tree, temperature {temperature:g}", "rows per pass", *head], rows)
    return ratios


def expansion(llm: LLM, seconds: float) -> float:
    """Return the time of adding CAPE's siblings to a chain, divided by a pass of the draft model.

    ``seconds`` is the duration of a forward pass of the draft model.
    """
    size = llm.config.vocab_size
    generator = np.random.default_rng(0)
    params = SamplingParams(max_tokens=64)
    from pronk.cache.blocks import BlockTable  # noqa: PLC0415 - used by this measurement only
    from pronk.drafting import DraftContext  # noqa: PLC0415
    from pronk.sampling.logits_processors import TokenContext  # noqa: PLC0415
    from pronk.sampling.sampler import Sampler  # noqa: PLC0415

    context = DraftContext(
        None, [1], 60, 120, params, Sampler(params, 0, TokenContext([1]), size), BlockTable()
    )
    cape = llm.get_proposer("cape")
    spent = []
    assert isinstance(cape, CapeProposer)
    for _ in range(200):
        chain = Chain(context, "draft_model")
        for _ in range(5):
            scores = generator.normal(0, 3, size).astype(np.float32)
            chain.draft_tokens.append(DraftToken(int(scores.argmax()), 0.5, scores))
            chain.gains.append(0.5)
            chain.origin.append(("draft_model", 500))
        began = perf_counter()
        chain.tree()
        plain = perf_counter()
        cape.expand(chain)
        spent.append(perf_counter() - plain - (plain - began))
    return sorted(spent)[len(spent) // 2] / seconds


def noise(folder: Path) -> str:
    """Write a copy of pronk-tiny-draft with random matrices; return the path of its folder."""
    shutil.copytree(resolve_model("pronk-tiny-draft"), folder)
    checkpoint = Checkpoint(folder)
    generator = np.random.default_rng(0)
    weights = {name: np.array(checkpoint.tensor(name)) for name in checkpoint}
    checkpoint.release()

    def tensor(piece: CheckpointTensor) -> Array:
        weight = weights[piece.name]
        if weight.ndim == 1:
            return weight
        deviation = weight.astype(np.float32).std()
        values = generator.standard_normal(weight.shape, np.float32) * deviation
        return values.astype(weight.dtype)

    entries = [
        ShardEntry(CheckpointTensor(name, each.shape), name, each.dtype)
        for name, each in weights.items()
    ]
    (folder / "model.safetensors").unlink()
    write_weights(folder, entries, tensor, 10**9, lambda *_: None)
    return str(folder)


def measure_costs(llm: LLM, drafter: Drafter) -> tuple[CostCurve, CostCurve]:
    """Return the costs of forward passes of the target and of the draft model of ``drafter``.

    Every step of the first text has draft tokens, whatever they cost, so that the draft model is
    measured; the second text measures passes of the target without draft tokens.
    """
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    llm.engine.speculator.budget = False
    for each in (drafter, "autoregressive"):
        llm.generate("warm up", params, drafter=each)
    (model,) = llm.engine.target.loaded_models
    costs = llm.engine.runner.cost_model.costs(0)
    own = model.runner.cost_model.costs(0)
    if costs is None or own is None:
        message = "expected measured passes of both models, found none; lengthen the warm-up"
        raise SystemExit(message)
    return costs, own


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="pronk-tiny",
        help="the target, pronk-tiny by default; another one needs --draft",
    )
    parser.add_argument("--draft", help="the draft model; pronk-tiny-draft by default")
    parser.add_argument(
        "--noise",
        action="store_true",
        help="use a draft model of the same shape with random weights",
    )
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--limit", type=int, default=4, help="prompts per kind")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 0.8])
    parser.add_argument(
        "--only",
        choices=("lengths", "trees", "rules"),
        nargs="*",
        default=["lengths", "trees", "rules"],
    )
    args = parser.parse_args()
    path = Path(__file__).with_name("drafting_prompts.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    prompts = {
        kind: [r["prompt"] for r in records if r["kind"] == kind][: args.limit] for kind in KINDS
    }
    # without the draft model that the default drafter would load
    llm = LLM(args.model, threads=args.threads, drafter="autoregressive")
    place = TemporaryDirectory()
    folder = noise(Path(place.name) / "noise") if args.noise else args.draft
    draft = f"model={folder!r}, " if folder else ""
    drafter = make_drafter(f"draft_model({draft[:-2]})")
    costs, own = measure_costs(llm, drafter)
    cost = own.at(1) / costs.at(1)
    share = expansion(llm, own.at(1))
    rows = ", ".join(f"{1e3 * costs.at(n):.2f}" for n in (1, 8, 16))
    own_ms = f"{1e3 * own.at(1):.2f} ms"
    print(f"A pass of the target over 1 / 8 / 16 rows takes {rows} ms, of the draft {own_ms}:")
    print(f"c = {cost:.3f}. Expanding 5 tokens by CAPE takes {share:.1%} of a pass of the draft.\n")
    bench = Bench(llm, prompts, args.max_tokens, args.repeats)
    result: dict[str, Any] = {"cost": cost, "cape_share": share}
    for temperature in args.temperature:
        if "lengths" in args.only:
            result[f"lengths/{temperature:g}"] = lengths(bench, draft, temperature, cost)
        if "trees" in args.only:
            result[f"trees/{temperature:g}"] = trees(bench, draft, temperature)
    if "rules" in args.only:
        result["rules"] = rules(bench, draft)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
