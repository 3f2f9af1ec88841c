"""GLIDE and its twin for tests: fitted to what tiny targets write, and what they say without a cache."""

import atexit
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from pronk.drafters.from_target.modules.files import FORMAT
from pronk.drafters.from_target.modules.glide import GlideModule, GlideShape
from pronk.models.decoder import Decoder
from pronk.train.attention import dense_hidden, dense_logits
from pronk.train.export import export_drafter
from pronk.train.features import compute_features
from pronk.train.glide import DelayedAttention, block_mask
from tiny_models import tiny_decoder

PROMPTS: tuple[tuple[int, ...], ...] = ((1, 2, 3), (4, 5, 6, 7), tuple(range(30)), (9,))
FREE: tuple[int | None, ...] = (None, None)
_PLACE = TemporaryDirectory()
atexit.register(_PLACE.cleanup)


def shape(layers: int = 1, *, cross: bool = True) -> GlideShape:
    return GlideShape(layers, hidden=32, heads=4, kv_heads=2, mlp=48, cross=cross)


@cache
def glide_folder(
    *, layers: int = 1, cross: bool = True, windows: tuple[int | None, ...] = FREE, classic: bool = False
) -> str:
    """A drafter for :func:`models.tiny_decoder`, which has learned by heart what that says after :data:`PROMPTS`."""
    target = tiny_decoder(packed=False, windows=windows, classic=classic)
    made = shape(layers, cross=cross)
    module = GlideModule(made, target.config)
    module.initialize(torch.Generator().manual_seed(3))
    fit(module, target, torch.tensor([write(target, prompt, 44) for prompt in PROMPTS]), steps=60)
    kind = "glide" if cross else "vanilla"
    folder = Path(_PLACE.name) / f"{kind}-{layers}-{windows}-{classic}"
    fingerprint = {"name": "tiny", "architecture": "test", "weights": "none"}
    document = {"format": FORMAT, "kind": kind, "shape": asdict(made), "target": fingerprint}
    export_drafter(folder, module, document, "")
    return str(folder)


def spec(name: str = "glide", *, num_tokens: int = 4) -> str:
    """How tests make ``glide`` or ``vanilla``."""
    return f"{name}(model={glide_folder(cross=name == 'glide')!r}, num_tokens={num_tokens})"


@torch.no_grad()
def write(target: Decoder, prompt: Sequence[int], length: int) -> list[int]:
    """The prompt and what follows it, so many tokens in all."""
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(int(dense_logits(target, torch.tensor([tokens]))[-1].argmax()))
    return tokens


def fit(module: GlideModule, target: Decoder, tokens: Tensor, steps: int) -> None:
    """So many steps toward the target's distribution on ``tokens``."""
    with torch.no_grad():
        wanted = dense_logits(target, tokens).softmax(-1)
    mask = block_mask(tokens.shape[1], 5)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-2)
    for _ in range(steps):
        loss = F.cross_entropy(said(module, target, tokens, mask), wanted)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def said(module: GlideModule, target: Decoder, tokens: Tensor, seen: Tensor) -> Tensor:
    """Logits ``[count * length, vocab]`` of the drafter without a cache.

    ``seen`` ``[length, length]`` says which of the target's tokens each row sees, apart from windows.
    """
    count, length = tokens.shape
    layers = module.cache_layers
    features = compute_features(target, tokens, torch.float32, cache=layers)
    positions = torch.arange(length)
    windows = [target.config.windows[layer - 1] or length for layer in layers]
    attend = DelayedAttention(
        count,
        length,
        rotation=target.rope(positions.repeat(count), positions.repeat(count) + 1, torch.float32),
        keys=[features.keys[layer] for layer in layers],
        values=[features.values[layer] for layer in layers],
        seen=[seen & (positions > positions[:, None] - window) for window in windows],
    )
    return F.linear(module.norm(dense_hidden(module, tokens, attend=attend)), module.embedding)


class DenseGlide:
    """The drafter of a folder without a cache."""

    def __init__(self, folder: str, target: Decoder, layers: int = 1, *, cross: bool = True) -> None:
        self.target = target
        self.module = GlideModule(shape(layers, cross=cross), target.config)
        tensors = load_file(Path(folder) / "model.safetensors")
        self.module.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int], verified: int, oldest: int = 0) -> Tensor:
        """Logits ``[vocab]`` after ``tokens``, of which the target's cache has ``oldest .. verified - 1``."""
        places = torch.arange(len(tokens))
        seen = (places < places[:, None].clamp(max=verified)) & (places >= oldest)
        return said(self.module, self.target, torch.tensor([tokens]), seen)[-1]
