"""Selection of CPU kernels: the best instruction set of this machine that passes a self-check.

The self-check runs before a model is loaded and takes 0.1 to 0.3 s. If it passes, an empty file in
``~/.cache/pronk/self-check`` records this for the library, instruction set and processor, and later processes skip it.
It computes matrix products and a small decoder layer, each in batches of several sizes. For all batches, the bits of
the results must be the same, and must differ from torch's by a small tolerance only. Argmax and sampling are compared
with torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from pronk.architecture.config import ModelConfig, llama_config
from pronk.architecture.rope import RopeTable
from pronk.errors import OptionError
from pronk.kernels.library import CHOICES, Kernels, KernelsError, candidates
from pronk.kernels.rounding import round_weights
from pronk.kv_cache.blocks import BlockTable
from pronk.kv_cache.paged import PagedCache
from pronk.models.decoder import Decoder, pack_linears
from pronk.models.linear import KernelLinear, WeightLayout, choose_linear
from pronk.models.loader import kernels_support
from pronk.models.program import Program, ProgramRows
from pronk.quantization.formats.matrix import Bits
from pronk.quantization.gguf.blocks import BLOCKS, BlockMatrix, BlockRows
from pronk.quantization.gguf.layout import TENSOR_TYPES
from pronk.sampling.noise import gumbel_noise, noise_key
from pronk.speculation.tree import TokenTree

__all__ = ["choose_kernels", "load_kernels", "open_device", "self_check"]

_CPU = torch.device("cpu")
_BATCH_SIZES = (1, 4, 20, 64, 512)  # numbers of rows in the checked matrix products
_MATRIX_SIZES = ((96, 80), (320, 48), (1100, 48))  # (inputs, outputs) of the checked matrix products
_BLOCK_INPUTS = 512  # inputs of the checked products with GGUF blocks
# Allowed error of the decoder layer relative to its largest output, by dtype: of an int8 KV cache, else of the weights.
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.int8: 5e-2}


@cache
def load_kernels(choice: str = "auto", path: Path | None = None) -> Kernels:
    """Return the best kernels that ``choice`` allows and that pass the self-check.

    ``choice`` is ``"auto"`` or an instruction set; one that the processor lacks raises an OptionError. If no kernels
    pass, a KernelsError gives the reason in one line. ``path`` is the library's file, by default the installed one.
    """
    failure = ""
    for kernels in candidates(choice, path):
        if _has_passed(kernels):
            return kernels
        error = self_check(kernels)
        if error is None:
            with suppress(OSError, RuntimeError):  # without the marker, the next process checks again
                marker = _passed_marker(kernels)
                marker.parent.mkdir(parents=True, exist_ok=True)
                marker.touch()
            return kernels
        failure = f"{kernels.path}: the {kernels.name} kernels fail their self-check: {error}"
    raise KernelsError(failure)


def _has_passed(kernels: Kernels) -> bool:
    try:
        return _passed_marker(kernels).exists()
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return False


def _passed_marker(kernels: Kernels) -> Path:
    """Return the path of the empty file that exists if the kernels have passed on this processor."""
    digest = hashlib.sha256(kernels.path.read_bytes())
    digest.update(f"{kernels.name}\n{_processor()}".encode())
    return Path.home() / ".cache" / "pronk" / "self-check" / digest.hexdigest()[:32]


def _processor() -> str:
    """Return the processor's model, flags and microcode: the self-check's result may depend on them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("model name", "flags", "microcode", "Features", "CPU part")
    return "\n".join(line for line in lines if line.startswith(names))


def open_device(name: str) -> torch.device:
    """Return the torch device called ``name``; raise an OptionError if this machine does not have it."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        msg = f'device: expected "cpu" or an accelerator that torch has here, found {name!r}'
        raise OptionError(msg) from error
    return device


def choose_kernels(choice: str, device: torch.device, config: ModelConfig) -> Kernels | None:
    """Return the kernels that compute a model; ``None`` means torch.

    The result is ``None`` for ``"torch"``, and for ``"auto"`` on an accelerator. In all other cases, a warning says why
    the result is ``None``. An unknown choice, or one that the processor lacks, raises an OptionError.
    """
    if choice not in CHOICES:
        msg = f"kernels: expected {', '.join(CHOICES)}; found {choice!r}"
        raise OptionError(msg)
    if choice == "torch" or (choice == "auto" and device.type != "cpu"):
        return None
    reason = f"no kernels for {device}"
    if device.type == "cpu":
        try:
            kernels = load_kernels(choice)
        except KernelsError as error:
            reason = str(error)
        else:
            if kernels_support(kernels, config):
                return kernels
            reason = f"no kernels for heads of {config.head_dim}"
    warnings.warn(f"{reason}; torch computes instead, slower and without the promise of equal bits", stacklevel=3)
    return None


@torch.inference_mode()
def self_check(kernels: Kernels) -> str | None:
    """Return a description of the first failure of the self-check; ``None`` if there is none."""
    for dtype in (torch.float32, torch.bfloat16):
        failure = (
            _check_products(kernels, dtype) or _check_layer(kernels, dtype) or _check_layer(kernels, dtype, torch.int8)
        )
        if failure is not None:
            return f"{failure} in {str(dtype).removeprefix('torch.')}"
    return _check_quantized_products(kernels) or _check_blocks(kernels) or _check_sampling(kernels)


def _check_products(kernels: Kernels, dtype: torch.dtype) -> str | None:
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in _MATRIX_SIZES:
        weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
        x = torch.randn(max(_BATCH_SIZES), inputs, generator=generator).to(dtype)
        # Tolerance: 1e-4 times the standard deviation of an output, a sum of `inputs` products of random numbers.
        failure = _check_product(KernelLinear(kernels, weight, None, WeightLayout()), x, weight, 1e-4 * inputs**0.5)
        if failure is not None:
            return failure
    return None


def _check_product(linear: KernelLinear, x: Tensor, weight: Tensor, tolerance: float) -> str | None:
    """Check that ``x Wᵀ`` has equal bits in smaller batches, and torch's values within ``tolerance``."""
    product, expected = linear.logits(x), x.double() @ weight.double().T
    for rows in _BATCH_SIZES:
        if not torch.equal(linear.logits(x[:rows]), product[:rows]):
            return f"a product of {rows} rows is not that of {len(x)} rows"
    if not torch.allclose(product.double(), expected, rtol=0.0, atol=tolerance):
        error = float((product - expected).abs().max())
        return f"a product of {linear.in_features} by {linear.out_features} is off by {error:.1g}"
    return None


def _check_quantized_products(kernels: Kernels) -> str | None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 320, generator=generator), torch.randn(max(_BATCH_SIZES), 320, generator=generator)
    for bits in get_args(Bits):
        quantized = round_weights(kernels, weight, bits)
        linear, dequantized = KernelLinear(kernels, quantized, None, WeightLayout()), quantized.dequantize().double()
        # The kernels round x to 8 bits: each number by at most 1/254 of the largest magnitude in its group.
        tolerance = 0.02 * float((x.double() @ dequantized.T).abs().max())
        failure = _check_product(linear, x, dequantized, tolerance)
        if failure is not None:
            return f"{failure} in {bits} bits"
    return None


def _check_blocks(kernels: Kernels) -> str | None:
    """Check products with GGUF blocks: the portable kernels' bits in every batch, and the values."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, _BLOCK_INPUTS, generator=generator)
    for type_ in TENSOR_TYPES.values():
        if type_.name not in BLOCKS:
            continue
        shape = (48, _BLOCK_INPUTS // type_.values, type_.size)
        stored = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        for offset in (208,) if type_.name == "Q6_K" else (0, 2):
            stored[..., offset + 1] &= 0xBF  # clear a bit of the exponent, so that float16 scales are finite
        matrix = BlockMatrix(type_.name, _BLOCK_INPUTS, (BlockRows(stored.flatten(1)),))
        portable = KernelLinear(dataclasses.replace(kernels, isa=0), matrix, None, WeightLayout()).logits(x)
        linear = KernelLinear(kernels, matrix, None, WeightLayout())
        expected = x.double() @ linear.packed.unpack().double().T
        # The kernels round x to 8 bits, see _check_quantized_products.
        if not torch.allclose(portable.double(), expected, rtol=0.0, atol=0.02 * float(expected.abs().max())):
            return f"a product with {type_.name} weights is wrong"
        for rows in (1, 4, 20, 64):
            if not torch.equal(linear.logits(x[:rows]).view(torch.int32), portable[:rows].view(torch.int32)):
                return f"{rows} rows with {type_.name} weights differ from the portable kernels"
    return None


def _check_sampling(kernels: Kernels) -> str | None:
    generator = torch.Generator().manual_seed(0)
    temperature, position = 0.7, 5
    for seed, vocab in enumerate((33, 700)):
        logits = torch.randn(vocab, generator=generator)
        scores = (logits / temperature).double() + gumbel_noise(seed, position, torch.arange(vocab))
        if kernels.choose(logits, 0.0, 0) != int(logits.argmax()):
            return f"the argmax of {vocab} logits is not that of torch"
        if kernels.choose(logits, temperature, noise_key(seed, position)) != int(scores.argmax()):
            return f"a sample from {vocab} tokens is not that of torch"
    return None


def _check_layer(kernels: Kernels, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> str | None:
    """Return a defect of the kernels, or ``None``.

    A text in one pass, token by token, and as a path of a tree must give equal outputs, close to torch's.
    """
    shape = {"hidden": 64, "layers": 1, "heads": 4, "kv_heads": 2, "mlp": 96, "vocab": 32, "context": 128}
    config = llama_config(**shape, bos_id=None, eos_ids=())
    plain = Decoder(dataclasses.replace(config, tied=False))
    plain.initialize(torch.Generator().manual_seed(0))
    plain.embedding.mul_(50.0)  # the standard deviation of embeddings becomes 1 instead of 0.02
    packed = Decoder(plain.config)
    packed.load_state_dict(plain.state_dict())
    packed.to(dtype)
    pack_linears(packed, choose_linear(kernels, _CPU))
    tokens = torch.randint(32, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    runner = _LayerRunner(kernels, packed, dtype, kv_dtype)
    one_pass = runner.run(TokenTree.chain(tokens))
    runner.reset()
    token_by_token = torch.cat([runner.run(TokenTree.chain([token])) for token in tokens])
    if not torch.equal(one_pass, token_by_token):
        return "a text in one forward pass is not that text token by token"
    runner.reset()
    start = 61
    runner.run(TokenTree.chain(tokens[:start]))
    # Draft tree of the remaining tokens: nodes 0, 2, 4, … are the text; each odd node is a wrong sibling of the next.
    ids, parents = [tokens[start]], [-1]
    for token in tokens[start + 1 :]:
        parent = len(ids) - 1
        ids += [(token + 1) % 32, token]
        parents += [parent, parent]
    in_tree = runner.run(TokenTree(tuple(ids), tuple(parents)))[::2]
    if not torch.equal(in_tree, one_pass[start:]):
        return "a path of a draft tree is not that text in one forward pass"
    expected = _reference(plain.double(), tokens)
    error = float((one_pass.double() - expected).abs().max() / expected.abs().max())
    return None if error < _TOLERANCES[kv_dtype or dtype] else f"a layer is off by {error:.1g}"


class _LayerRunner:
    """Embedding and layer 0 of a decoder, computed by the kernels, with a KV cache of one text."""

    def __init__(self, kernels: Kernels, decoder: Decoder, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
        config = decoder.config
        self.cache = PagedCache(
            config, num_blocks=8, block_size=16, dtype=dtype, kv_dtype=kv_dtype, device=_CPU, kernels=kernels
        )
        self.block_table = BlockTable()
        self.rope = RopeTable(config.rope)
        self.program = Program(kernels, config.hidden_size, dtype, self.cache)
        self.program.embed(decoder)
        decoder.layers[0].compile(self.program, 0)
        self.hidden, self.dtype = config.hidden_size, dtype

    def reset(self) -> None:
        """Empty the KV cache, to start a new text."""
        self.cache.release(self.block_table)

    def run(self, tree: TokenTree) -> Tensor:
        """Return the layer's output for every node; commit the main chain (see :class:`TokenTree`)."""
        length = self.block_table.length
        self.cache.prepare(self.block_table, length + len(tree))
        rows = ProgramRows().set_segments([(self.block_table, tree, 0)], tree.tokens)
        rows.set_rope(0, self.rope.up_to(length + len(tree)))
        out = torch.empty(len(tree), self.hidden, dtype=self.dtype)
        self.program.run(rows, out)
        self.cache.commit(self.block_table, range(tree.main_chain))
        return out.float()


def _reference(decoder: Decoder, tokens: list[int]) -> Tensor:
    """Return the output of layer 0 for a text, computed by torch in float64."""
    positions = torch.arange(len(tokens))

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    x = decoder.embed(torch.tensor(tokens), positions, torch.float64)
    rope = decoder.rope(positions, positions + 1, torch.float64)
    return decoder.layers[0](x, rope, 0, attend)
