"""GLIDE and its variant without cross-attention, fitted to texts of tiny targets, and a reference
without a cache.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from drafting.helpers import CHECKPOINTS
from pronk.base.arrays import Array
from pronk.base.convert import to_array
from pronk.lab.drafters.modules.files import TRAINED_FORMAT
from pronk.lab.drafters.modules.glide import GlideShape
from pronk.train.attention import compute_features, dense_hidden, dense_logits
from pronk.train.export import export_drafter
from pronk.train.modules.decoder import DecoderModule
from pronk.train.modules.drafters import GlideDecoderModule
from pronk.train.students import DelayedAttention, block_mask
from train.tiny_modules import tiny_module

PROMPTS: tuple[tuple[int, ...], ...] = ((1, 2, 3), (4, 5, 6, 7), tuple(range(30)), (9,))
FREE: tuple[int | None, ...] = (None, None)


def shape(layers: int = 1, *, cross: bool = True) -> GlideShape:
    return GlideShape(layers, hidden=32, heads=4, kv_heads=2, mlp=48, cross=cross)


@cache
def glide_folder(
    *,
    layers: int = 1,
    cross: bool = True,
    windows: tuple[int | None, ...] = FREE,
    classic: bool = False,
) -> str:
    """Return a drafter for :func:`tiny_models.tiny_decoder`, fitted to its texts after
    :data:`PROMPTS`.
    """
    target = tiny_module(windows=windows, classic=classic)
    made = shape(layers, cross=cross)
    module = GlideDecoderModule(made, target.config)
    module.initialize(torch.Generator().manual_seed(3))
    fit(module, target, torch.tensor([write(target, prompt, 44) for prompt in PROMPTS]), steps=60)
    kind = "glide" if cross else "vanilla"
    folder = CHECKPOINTS / f"{kind}-{layers}-{windows}-{classic}"
    fingerprint = {"name": "tiny", "architecture": "test", "weights": "none"}
    document = {
        "format": TRAINED_FORMAT,
        "kind": kind,
        "shape": asdict(made),
        "target": fingerprint,
    }
    export_drafter(folder, module, document, "")
    return str(folder)


def spec(name: str = "glide", *, num_tokens: int = 4) -> str:
    """Return the specification of ``glide`` or ``vanilla`` for tests."""
    return f"{name}(model={glide_folder(cross=name == 'glide')!r}, num_tokens={num_tokens})"


@torch.no_grad()
def write(target: DecoderModule, prompt: Sequence[int], length: int) -> list[int]:
    """Return the prompt and its greedy continuation, ``length`` tokens in all."""
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(int(dense_logits(target, torch.tensor([tokens]))[-1].argmax()))
    return tokens


def fit(module: GlideDecoderModule, target: DecoderModule, tokens: Tensor, steps: int) -> None:
    """Fit the module to the target's distribution on ``tokens``."""
    with torch.no_grad():
        wanted = dense_logits(target, tokens).softmax(-1)
    mask = block_mask(tokens.shape[1], 5)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-2)
    for _ in range(steps):
        loss = F.cross_entropy(dense_drafter_logits(module, target, tokens, mask), wanted)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def dense_drafter_logits(
    module: GlideDecoderModule, target: DecoderModule, tokens: Tensor, seen: Tensor
) -> Tensor:
    """Return the logits ``[count * length, vocab]`` of the drafter without a cache.

    ``seen`` ``[length, length]`` marks the tokens whose target keys each row may attend to; windows
    hide more.
    """
    count, length = tokens.shape
    layers = module.cache_layers
    features = compute_features(target, tokens, torch.float32, cache=layers)
    positions = torch.arange(length)
    windows = [target.config.windows[layer - 1] or length for layer in layers]
    attend = DelayedAttention(
        count,
        length,
        rotation=target.rope(positions.repeat(count), torch.float32),
        keys=[features.keys[layer] for layer in layers],
        values=[features.values[layer] for layer in layers],
        masks=[seen & (positions > positions[:, None] - window) for window in windows],
    )
    return F.linear(module.norm(dense_hidden(module, tokens, attend=attend)), module.embedding)


class DenseGlide:
    """Reference of a trained drafter without a cache: computes the whole text for every call."""

    def __init__(
        self, folder: str, target: DecoderModule, layers: int = 1, *, cross: bool = True
    ) -> None:
        self.target = target
        self.module = GlideDecoderModule(shape(layers, cross=cross), target.config)
        tensors = load_file(Path(folder) / "model.safetensors")
        self.module.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        self._known = dict[tuple[tuple[int, ...], int, int], Array]()

    def __call__(self, tokens: Sequence[int], verified: int, oldest: int = 0) -> Array:
        """Return logits ``[vocab]`` after ``tokens``, with target keys of positions ``oldest ..
        verified - 1``.
        """
        key = (tuple(tokens), verified, oldest)
        if key not in self._known:
            self._known[key] = self._compute(*key)
        return self._known[key]

    @torch.no_grad()
    def _compute(self, tokens: tuple[int, ...], verified: int, oldest: int) -> Array:
        places = torch.arange(len(tokens))
        seen = (places < places[:, None].clamp(max=verified)) & (places >= oldest)
        return to_array(
            dense_drafter_logits(self.module, self.target, torch.tensor([[*tokens]]), seen)[-1]
        )
