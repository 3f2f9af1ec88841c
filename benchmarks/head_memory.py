"""Peak memory of a training pass by number of heads, head by head and all heads at once.

    python benchmarks/head_memory.py --vocab 32768 --tokens 4096

The script prints a Markdown table, then one JSON line. A peak is the largest number of bytes of all
tensors that are alive at the same time during a forward and backward pass: weights, gradients,
activations and logits.

- *the language model* has no further heads, and the logits of all rows.
- *head by head* has the logits of one chunk of rows at a time, as in ``pronk train``.
- *all at once* has the logits of all rows and heads, and one backward pass of the summed losses.
"""

from __future__ import annotations

import argparse
import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pronk.train.attention import dense_logits
from pronk.train.future import FutureModel, future_shape
from pronk.train.heads import head_by_head, shifted_rows
from pronk.train.lm import model_config
from pronk.train.losses import text_loss
from pronk.train.options import ModelShape

HEADS = (1, 2, 4)


class LiveBytes(TorchDispatchMode):
    """Counter of the bytes of live tensor storages.

    Attributes:
        live: bytes of the storages that are alive.
        peak: largest ``live`` so far.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()
        self._add(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._add([leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)])
        return out

    def _add(self, tensors: Sequence[Tensor]) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors):
            key = storage._cdata  # noqa: SLF001 - there is no public name
            size = storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def plain_pass(model: FutureModel, tokens: Tensor, _: int) -> None:
    """Train the prediction of the next token only, with the logits of all rows at once."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = dense_logits(model.decoder, tokens[:, :-1])
    F.cross_entropy(logits.float(), tokens[:, 1:].reshape(-1)).backward()


def one_by_one(model: FutureModel, tokens: Tensor, count: int) -> None:
    """Train the first ``count`` heads, each forward and backward before the next one."""
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:].reshape(-1)
    with torch.autocast("cpu", torch.bfloat16):
        trunk = model.trunk(inputs)
        z = trunk.detach().requires_grad_()
        for number, out in head_by_head(model.stages(inputs)[:count], z, chained=False):
            rows, said = shifted_rows(len(inputs), inputs.shape[1], number, inputs.device)
            loss, _ = text_loss(*model.norm_and_unembedding(number, out[rows]), targets[said])
            loss.backward()
    trunk.backward(z.grad)


def all_at_once(model: FutureModel, tokens: Tensor, count: int) -> None:
    """Train the sum of the losses of the first ``count`` heads, with all logits at once."""
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:].reshape(-1)
    losses = []
    with torch.autocast("cpu", torch.bfloat16):
        z = model.trunk(inputs)
        for number, apply in model.stages(inputs)[:count]:
            rows, said = shifted_rows(len(inputs), inputs.shape[1], number, inputs.device)
            hidden, weight = model.norm_and_unembedding(number, apply(z)[rows])
            losses.append(F.cross_entropy((hidden @ weight.T).float(), targets[said]))
    torch.stack(losses).sum().backward()


def peak(
    work: Callable[[FutureModel, Tensor, int], None],
    shape: ModelShape,
    tokens: int,
    length: int,
    count: int,
) -> int:
    """Return the peak memory of one pass over ``tokens`` tokens in sequences, in bytes.

    Args:
        work: runs the pass with the first ``count`` heads.
        shape: shape of the language model.
        tokens: number of tokens of the pass.
        length: number of tokens per sequence.
        count: number of heads.
    """
    heads = future_shape(shape, max(2, count), "transformer", "parallel", "shared")
    assert heads is not None
    model = FutureModel(model_config(shape, None, ()), heads)
    model.initialize(0)
    used = list(model.parameters() if count > 1 else model.decoder.parameters())
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(shape.vocab, (tokens // length, length + 1), generator=generator)
    with LiveBytes(used) as live:
        work(model, text, count)
    return live.peak


def measure(shape: ModelShape, tokens: int, length: int) -> list[tuple[str, int, int]]:
    """Return the name, the number of heads and the peak in bytes of each way of training."""
    rows = [("the language model", 1, peak(plain_pass, shape, tokens, length, 1))]
    for name, work in (("head by head", one_by_one), ("all at once", all_at_once)):
        rows += [(name, count, peak(work, shape, tokens, length, count)) for count in HEADS]
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--mlp", type=int, default=832)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--length", type=int, default=256)
    given = parser.parse_args()
    shape = ModelShape(hidden=given.hidden, layers=given.layers, mlp=given.mlp, vocab=given.vocab)
    rows = measure(shape, given.tokens, given.length)
    first = {name: size for name, count, size in rows if count == 1}
    print("| training | heads | peak, MB | relative to one head |\n|---|---|---|---|")
    for name, count, size in rows:
        print(f"| {name} | {count} | {size / 1e6:.0f} | {size / first[name]:.2f} |")
    print(json.dumps({"arguments": vars(given), "peak_bytes": [list(row) for row in rows]}))


if __name__ == "__main__":
    main()
