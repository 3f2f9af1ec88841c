"""Draw token trees of real runs for the pages in ``docs/methods``.

    python tools/docs/trees.py                    # all, with the SmolLM2 of `pronk pull smollm2`
    python tools/docs/trees.py suffix recycling --smollm2 FILE.gguf    # two of them

Each drawing is one step of a text: the root, the draft tokens, the accepted path, and the bonus
token.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from pronk import LLM, SamplingParams
from pronk.engine.stats import Decision
from pronk.lab.explain import explain
from pronk.sampling.tree import TokenTree

OUT = Path(__file__).parents[2] / "docs" / "methods" / "trees"
# Sizes in pixels. A glyph of 12 px in a monospaced font is 7.3 px wide.
ROW = 34
GAP = 22
HEIGHT = 24
GLYPH = 7.3
MARGIN = 10


class Drawing(NamedTuple):
    """One drawing: the step of a text with the most accepted draft tokens."""

    model: str  # "smollm2" or "pronk-tiny"
    drafter: str
    prompt: str


LOOP = "for name in names:\n    print(name)\nfor value in values:\n"
DRAWINGS = {
    "suffix": Drawing("smollm2", "suffix(num_nodes=10)", LOOP),
    "prompt_lookup": Drawing("smollm2", "prompt_lookup(num_tokens=8)", LOOP),
    "recycling": Drawing(
        "smollm2", "recycling(num_nodes=10)", "The capital of France is Paris. The capital of"
    ),
    "lookahead": Drawing("smollm2", "lookahead(window=4, ngram=4, guesses=3)", LOOP),
    "jacobi": Drawing("smollm2", "jacobi(num_tokens=5)", LOOP),
    "merged": Drawing("smollm2", "merged(suffix, recycling, num_nodes=10)", LOOP),
    "eagle3": Drawing("smollm2", "eagle3(num_nodes=10)", "Question: What is 12 + 7?\nAnswer:"),
    "retrieval": Drawing("pronk-tiny", "retrieval(num_nodes=10)", "def fibonacci(n):"),
    "draft_model": Drawing("pronk-tiny", "draft_model(num_tokens=5)", "def fibonacci(n):"),
    "cape": Drawing(
        "pronk-tiny", "cape(draft_model(num_tokens=4), max_nodes=10)", "def fibonacci(n):"
    ),
    "staged": Drawing("pronk-tiny", "staged(draft_model, num_nodes=10)", "def fibonacci(n):"),
    "beam": Drawing("pronk-tiny", "beam(draft_model, width=3, num_tokens=4)", "def fibonacci(n):"),
    "kangaroo": Drawing("pronk-tiny", "kangaroo", "def fibonacci(n):"),
    "glide": Drawing("pronk-tiny", "cape(glide(num_tokens=4), max_nodes=10)", "def fibonacci(n):"),
    "medusa": Drawing("pronk-tiny", "medusa(tree=9)", "def fibonacci(n):"),
    "multi_token": Drawing("pronk-tiny", "multi_token(tree=9)", "def fibonacci(n):"),
}


def order_leaves(parents: Sequence[int]) -> list[int]:
    """Return the row of each node: 0, 1, 2, … for leaves; a parent has that of its first child."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], 1):
        children[parent].append(node)
    rows = [0] * len(parents)
    next_row = 0
    order = list[int]()
    stack = [0]
    while stack:
        order.append(stack.pop())
        stack += reversed(children[order[-1]])
    for node in order:
        if not children[node]:
            rows[node] = next_row
            next_row += 1
    for node in reversed(order):
        if children[node]:
            rows[node] = rows[children[node][0]]
    return rows


def label(text: str) -> str:
    """Return a token's text with white space made visible."""
    return text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥") or "∅"


def draw(tree: TokenTree, path: tuple[int, ...], bonus: str, decode: Callable[[int], str]) -> str:
    """Return the SVG file of a tree.

    Args:
        tree: draft tokens.
        path: accepted nodes.
        bonus: text of the bonus token, which is drawn below the last accepted node.
        decode: returns the text of a token id.
    """
    last = path[-1] if path else 0
    parents = [*tree.parents, last]
    texts = [*(label(decode(token)) for token in tree.tokens), label(bonus)]
    rows = order_leaves(parents)
    depths = [*tree.depths, tree.depths[last] + 1]
    widths = [GLYPH * len(text) + 14 for text in texts]
    lefts = [float(MARGIN)]
    for depth in range(max(depths)):
        widest = max(width for width, each in zip(widths, depths, strict=True) if each == depth)
        lefts.append(lefts[-1] + widest + GAP)
    kinds = [node_kind(tree, path, node) for node in range(len(tree))]
    kinds.append("bonus")
    lines = []
    boxes = []
    for node, parent in enumerate(parents):
        x = lefts[depths[node]]
        y = MARGIN + ROW * rows[node]
        if parent >= 0:
            x0 = lefts[depths[parent]] + widths[parent]
            y0 = MARGIN + ROW * rows[parent] + HEIGHT / 2
            bend = x - GAP / 2
            y1 = y + HEIGHT / 2
            lines.append(
                f'<path class="{kinds[node]}" d="M{x0:.0f} {y0:.0f}H{bend:.0f}V{y1:.0f}H{x:.0f}"/>'
            )
        boxes.append(
            f'<g class="{kinds[node]}">'
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{widths[node]:.0f}" height="{HEIGHT}" rx="6"/>'
            f'<text x="{x + widths[node] / 2:.0f}" '
            f'y="{y + 16:.0f}">{escape(texts[node])}</text></g>'
        )
    right = max(lefts[d] + w for w, d in zip(widths, depths, strict=True)) + MARGIN
    bottom = 2 * MARGIN + ROW * max(rows) + HEIGHT
    # The accepted path is drawn last, above the other lines.
    lines.sort(key=lambda line: "accepted" in line or "bonus" in line)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right:.0f}" height="{bottom:.0f}" '
        f'viewBox="0 0 {right:.0f} {bottom:.0f}" role="img">\n<style>\n{STYLE}</style>\n'
        f'<rect class="paper" width="100%" height="100%" rx="8"/>\n'
        + "\n".join(lines + boxes)
        + "\n</svg>\n"
    )


def node_kind(tree: TokenTree, path: tuple[int, ...], node: int) -> str:
    """Return the class of a node in the style sheet."""
    if not tree.acceptable[node]:
        return "window"
    if node == 0:
        return "root"
    return "accepted" if node in path else "rejected"


STYLE = """\
.paper { fill: #fff }
rect { fill: #fff; stroke: #9aa4b0; stroke-width: 1.2 }
text { font: 12px ui-monospace, Menlo, Consolas, monospace; text-anchor: middle; fill: #57606a }
path { fill: none; stroke: #b6bec8; stroke-width: 1.4 }
.root rect { fill: #24292f; stroke: #24292f } .root text { fill: #fff }
.accepted rect { fill: #d2f4db; stroke: #1a7f37 } .accepted text { fill: #0b4f20 }
path.accepted { stroke: #1a7f37; stroke-width: 2 }
.bonus rect { fill: #fff; stroke: #1a7f37; stroke-dasharray: 4 3 } .bonus text { fill: #0b4f20 }
path.bonus { stroke: #1a7f37; stroke-dasharray: 4 3 }
.window rect, path.window { stroke-dasharray: 2 3 }
"""


def example() -> str:
    """Return the drawing of the tree that ``docs/concepts.md`` explains."""
    words = ("the", "cat", "sat", "ran", "dog", "ran")
    return draw(TokenTree(tuple(range(6)), (-1, 0, 1, 1, 0, 4)), (4, 5), "off", words.__getitem__)


def best_step(steps: tuple[Decision, ...]) -> Decision:
    """Return the step with the most accepted draft tokens.

    Among equal steps, the one with the most draft tokens is returned, then the earliest one.
    """
    return max(steps, key=lambda step: (len(step.path), len(step.kept)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(DRAWINGS)}; default: all"
    )
    parser.add_argument(
        "--smollm2",
        default="smollm2",
        metavar="MODEL",
        help="file or name of SmolLM2-135M-Instruct",
    )
    options = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    (OUT / "example.svg").write_text(example(), encoding="utf-8")
    loaded: dict[str, LLM] = {}
    for name in options.names or DRAWINGS:
        drawing = DRAWINGS[name]
        if drawing.model not in loaded:
            model = options.smollm2 if drawing.model == "smollm2" else drawing.model
            loaded[drawing.model] = LLM(model, budget="all", calibration="off")
        llm = loaded[drawing.model]
        params = SamplingParams(max_tokens=40)
        explained = explain(llm, drawing.prompt, params, drawing.drafter)
        step = best_step(explained.steps[1:])
        bonus = step.tokens[-1]
        tokens = {*step.kept.tokens, bonus}
        texts = {token: llm.tokenizer.decode([token]) for token in tokens}
        svg = draw(step.kept, step.path, texts[bonus], texts.__getitem__)
        (OUT / f"{name}.svg").write_text(svg, encoding="utf-8")
        print(f"{name}: {len(step.path)} of {step.kept.num_draft_tokens} draft tokens accepted")


if __name__ == "__main__":
    main()
