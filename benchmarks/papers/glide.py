r"""Tables and figures of GLIDE with a CAPE (Du et al. 2024) on one model, beside the paper's.

    python benchmarks/papers/glide.py MODEL.gguf --prompts spec_bench.jsonl --glide RUNS/glide
    python benchmarks/papers/glide.py MODEL.gguf figure6 --prompts … --glide RUNS/glide \
        --vanilla RUNS/vanilla

    figure6   S and speed of GLIDE, its twin without cross-attention, CAPE, expansion by a fixed
              size (section 5.4), beams of 4 and 8, and Medusa
    table3    milliseconds of drafting per step, of GLIDE, beams of 4 and 8, and CAPE
    table4    tokens per second at batch sizes of 1 to 16, with copies of one prompt, as in the
              paper
    variants  figures 7 to 9 and table 2: S and speed of further drafters, one
              --variant NAME=FOLDER for each

``measuring.py`` describes the measurement of figure 6. Tables 3 and 4 are by the wall clock.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from statistics import median

from measuring import PLAIN, Part, Results, add_folders, add_parts, markdown, run_parts
from policy import make_parser, read_prompts

from pronk import LLM, SamplingParams

BATCHES = (1, 2, 4, 8, 16)
ROUNDS = 3  # rounds of table 4
# Speed of expansion by a fixed size over that by confidence. Figure 6 has no numbers; the paper's
# text has 68.4 and 70.6 tokens per second.
PAPER_FIXED = 68.4 / 70.6
# Milliseconds of drafting per step in table 3, with Vicuna-7B.
PAPER_DRAFTING = {"GLIDE": 5.3, "beam of 4": 10.9, "beam of 8": 14.8, "CAPE": 5.5}
# Tokens per second in table 4, with GLIDE and with plain decoding, by batch size.
PAPER_BATCHES = {
    1: (106.8, 54.6),
    2: (216.4, 111.2),
    4: (466.0, 223.6),
    8: (868.0, 440.8),
    16: (1699.2, 886.4),
}
DRAFT_LENGTH = 5  # γ of the paper


def glide_of(folder: str) -> str:
    """Return the specification of GLIDE in a folder, with the paper's draft length."""
    return f"glide(model={folder!r}, num_tokens={DRAFT_LENGTH})"


def specs(options: argparse.Namespace) -> dict[str, str]:
    """Return the specifications of the drafters of figure 6 by name.

    A drafter without a folder in the options is left out.
    """
    glide = glide_of(options.glide)
    named = {
        "GLIDE": glide,
        "CAPE": f"cape({glide})",
        "CAPE, 4 siblings each": f"cape({glide}, sizes=4)",
    }
    for width in (4, 8):
        named[f"beam of {width}"] = f"beam({glide}, width={width}, num_tokens={DRAFT_LENGTH})"
    if options.vanilla:
        twin = f"vanilla(model={options.vanilla!r}, num_tokens={DRAFT_LENGTH})"
        named["without cross-attention"] = twin
    if options.medusa:
        named["Medusa"] = f"medusa(model={options.medusa!r})"
    return named


def speed_table(results: Results, options: argparse.Namespace) -> str:
    """Return figure 6 as a table: S and speed of each drafter."""
    found = {name: results.of(spec) for name, spec in specs(options).items()}
    rows = [[name, f"{each.per_pass:.2f}", each.speed] for name, each in found.items()]
    ratio = found["CAPE, 4 siblings each"].over_plain[0] / found["CAPE"].over_plain[0]
    text = f"\n\nFixed size over confidence: {ratio:.3f}. The paper: {PAPER_FIXED:.3f}."
    return markdown(["drafter", "S", "× plain [90 %]"], rows) + text


def variant_specs(options: argparse.Namespace) -> dict[str, str]:
    """Return the specifications of GLIDE and its variants by name."""
    named = {"GLIDE": glide_of(options.glide)}
    for name, folder in options.variant:
        named[name] = glide_of(folder)
    return named


def variant_table(results: Results, options: argparse.Namespace) -> str:
    """Return a table of S, also relative to GLIDE's, and speed of GLIDE and its variants."""
    baseline = glide_of(options.glide)
    rows = []
    for name, spec in variant_specs(options).items():
        found = results.of(spec)
        over_glide = results.passes_over(spec, baseline)
        rows.append([name, f"{found.per_pass:.2f}", over_glide, found.speed])
    return markdown(["drafter", "S", "S / GLIDE's S [90 %]", "× plain [90 %]"], rows)


def check_equal(texts: Iterable[Sequence[int]]) -> None:
    """Exit with an error if two texts have different token ids."""
    if len({tuple(text) for text in texts}) > 1:
        sys.exit("glide: expected equal tokens of all drafters and batches, found others")


def drafting_table(_: Results, options: argparse.Namespace) -> str:
    """Return table 3: the median over the prompts of the milliseconds of drafting per step."""
    llm = LLM(options.model, drafter=PLAIN, budget="all", kernels=options.kernels)
    prompts = read_prompts(options.prompts, options.per_suite)
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    rows = []
    chats = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
    plain = [llm.chat(chat, params).token_ids for chat in chats]
    for name, paper in PAPER_DRAFTING.items():
        took = []
        for chat, text in zip(chats, plain, strict=True):
            done = llm.chat(chat, params, drafter=specs(options)[name])
            check_equal([done.token_ids, text])
            steps = done.stats.steps
            seconds = steps[-1].draft_clock - steps[0].draft_clock
            took.append(1e3 * seconds / max(1, len(steps) - 1))
        own = median(took)
        base = own if not rows else float(rows[0][1])
        paper_ratio = paper / PAPER_DRAFTING["GLIDE"]
        rows.append([name, f"{own:.2f}", f"{own / base:.2f}", f"{paper_ratio:.2f}"])
    return markdown(["drafter", "drafting, ms per step", "over GLIDE", "paper's, over GLIDE"], rows)


def batch_table(_: Results, options: argparse.Namespace) -> str:
    """Return table 4: a batch's tokens per second after the first token, with and without GLIDE."""
    llm = LLM(
        options.model, drafter=PLAIN, budget="all", max_batch=max(BATCHES), kernels=options.kernels
    )
    prompt = read_prompts(options.prompts, 1)[0]
    ids = llm.chat_ids([{"role": "user", "content": prompt.text}])
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    rows = []
    plain_text = llm.generate(ids, params).token_ids

    def speed(drafter: str, batch: int) -> float:
        found = llm.generate([ids] * batch, params, drafter=drafter)
        check_equal([plain_text, *(done.token_ids for done in found)])
        steps = [done.stats.steps for done in found]
        seconds = max(each[-1].clock for each in steps) - max(each[0].clock for each in steps)
        return sum(step.tokens for each in steps for step in each[1:]) / seconds

    for batch in BATCHES:
        glide = []
        plain = []
        for _round in range(ROUNDS):
            plain.append(speed(PLAIN, batch))
            glide.append(speed(specs(options)["GLIDE"], batch))
        own = median(glide)
        base = median(plain)
        paper_glide, paper_plain = PAPER_BATCHES[batch]
        ratios = [f"{own / base:.2f}", f"{paper_glide / paper_plain:.2f}"]
        rows.append([batch, f"{own:.1f}", f"{base:.1f}", *ratios])
    return markdown(["batch", "GLIDE, tokens/s", "plain, tokens/s", "ratio", "paper's ratio"], rows)


PARTS = {
    "figure6": Part(
        "Figure 6, and the ablation of CAPE",
        lambda options: [*specs(options).values()],
        speed_table,
    ),
    "table3": Part("Table 3: the time of drafting", lambda _: [], drafting_table),
    "table4": Part("Table 4: batches", lambda _: [], batch_table),
    "variants": Part(
        "Figures 7 to 9, table 2: variants",
        lambda options: [*variant_specs(options).values()],
        variant_table,
    ),
}


def main() -> None:
    """Run the measurements, and write the tables."""
    parser = make_parser(__doc__ or "", per_suite=4)
    add_parts(parser, PARTS)
    parser.add_argument("--glide", required=True, help="folder of a trained GLIDE drafter")
    parser.add_argument(
        "--vanilla", help="folder of its twin without cross-attention (pronk train glide --vanilla)"
    )
    parser.add_argument("--medusa", help="folder of trained Medusa heads")
    add_folders(parser, "--variant", "folder of a further GLIDE drafter")
    run_parts(
        parser, PARTS, parser.parse_intermixed_args(), "GLIDE with a CAPE: the paper's tables"
    )


if __name__ == "__main__":
    main()
