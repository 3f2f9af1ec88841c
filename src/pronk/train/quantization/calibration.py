"""Quantization of layers with a calibration text: Hessians of the inputs, scaling (AWQ) and GPTQ.

With weights ``W`` ``[outputs, inputs]``, rounded weights ``Q``, inputs ``X`` ``[inputs, tokens]``
and ``H = X Xᵀ``, the squared error of the outputs is ``tr((W - Q) H (W - Q)ᵀ)``.

*GPTQ* (Frantar et al. 2023, algorithm 1) rounds the columns one by one. Rounding column ``w_j`` to
``q_j`` updates later columns ``W_F`` by::

    W_F -= (w_j - q_j) / U_jj · U_jF        H⁻¹ = Uᵀ U, U upper triangular

Rows are independent, so matrices with the same inputs are concatenated. Columns are not reordered.

*Scaling*, as in AWQ (Lin et al. 2024, section 3.2), divides the inputs: ``W x = (W diag(s)) (x /
s)``. With large scales for large inputs, the weights of these inputs become larger within their
groups, so their relative rounding error shrinks. ``x / s`` costs nothing: the weights of the norm
or matrix that computes ``x`` are divided by ``s``. The scales are ``s = rms(x) ** α``; the search
keeps the power ``α`` with the smallest error (``α = 0`` is no scaling).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from pronk.backends import num_threads
from pronk.base.arrays import Array
from pronk.base.convert import to_array, to_tensor, torch_dtype
from pronk.checkpoint import ModelConfig, QuantizedMatrix
from pronk.train.attention import DenseAttention
from pronk.train.modules.decoder import ModuleLayer, Rotations
from pronk.train.quantization.rounding import LINEARS, RoundingRule

# Maximum number of tokens of the sequences that a layer computes together. A longer sequence is
# computed alone.
_MAX_ROWS = 4096
# Fraction of the mean of H's diagonal that is added to the diagonal (section 3.3 of the paper).
_DAMPING = 0.01
# Number of attempts to invert H; each adds ten times as much to the diagonal as the one before.
_MAX_ATTEMPTS = 8
# Maximum number of columns in a block of GPTQ. The errors of a block are applied to all later
# columns in one matrix product.
_BLOCK_COLUMNS = 128
# Values of ``α`` that the search tries in addition to 0.
_POWERS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
# In the search, ``rms(x)`` of an input is at least this fraction of the largest one, so that inputs
# near 0 do not get extreme scales.
_MIN_RELATIVE_RMS = 1e-4


def compute_hessians(
    config: ModelConfig,
    window: int | None,
    weights: Mapping[str, Tensor],
    rows: Tensor,
    length: int,
) -> dict[str, Tensor]:
    """Return the Hessian ``X Xᵀ`` for the inputs of each linear module of a layer, by module name.

    ``X`` ``[inputs, tokens]`` are all inputs of the module. The arguments are those of
    :func:`quantize_calibrated`, as tensors.
    """
    with torch.device("meta"):
        layer = ModuleLayer(config)
    layer.load_state_dict(dict(weights), assign=True)
    products: dict[str, Tensor] = {}
    for name in LINEARS:
        layer.get_submodule(name).register_forward_pre_hook(partial(_add_product, products, name))
    rotations = Rotations(config.rope)
    for part in rows.split(max(1, _MAX_ROWS // length) * length):
        count = len(part) // length
        rope = rotations(torch.arange(length).repeat(count), torch.float32)
        layer(part, rope, 0, DenseAttention(count, length, (window,)))
    return products


def _add_product(
    products: dict[str, Tensor], name: str, _: nn.Module, inputs: tuple[Tensor]
) -> None:
    """Add ``X Xᵀ`` to ``products[name]``, for the inputs of one forward pass of a linear module.

    This is a hook of the module ``name``; ``inputs`` are the arguments of its forward pass.
    """
    (rows,) = inputs  # ``[tokens, inputs]``: some columns of X, transposed
    if name not in products:
        products[name] = rows.new_zeros(rows.shape[1], rows.shape[1])
    products[name].addmm_(rows.t(), rows)


def gptq(weight: Tensor, hessian: Tensor, rule: RoundingRule) -> QuantizedMatrix:
    """Quantize ``weight``, float32 ``[outputs, inputs]``, by GPTQ.

    ``hessian`` is ``H``, or ``H`` times a constant. The scale of a group is chosen from the updated
    weights, when the first column of the group is rounded. Raises ValueError, with a message of one
    line, if a tensor is not finite, or ``hessian`` is far from positive definite.
    """
    inputs = weight.shape[1]
    group = rule.group or inputs
    # The largest block size that is a multiple or a divisor of the group size.
    sizes = range(_BLOCK_COLUMNS, 0, -1)
    block = next(size for size in sizes if size % group == 0 or group % size == 0)
    # Transposed to [inputs, outputs], so that each column of W is contiguous.
    remaining = weight.t().clone(memory_format=torch.contiguous_format)
    factor = _inverse_factor(hessian)
    codes = torch.empty_like(remaining)
    scales = torch.empty(inputs // group, len(weight))
    for start in range(0, inputs, block):
        end = min(start + block, inputs)
        errors = torch.empty(end - start, len(weight))
        for j in range(start, end):
            if j % group == 0:
                columns = to_array(remaining[j : j + group].t())
                scales[j // group] = to_tensor(rule.scales(columns))[:, 0]
            scale = scales[j // group]
            codes[j] = to_tensor(rule.codes(to_array(remaining[j]), to_array(scale)))
            errors[j - start] = (remaining[j] - codes[j] * scale) / factor[j, j]
            remaining[j + 1 : end].addr_(factor[j, j + 1 : end], errors[j - start], alpha=-1)
        remaining[end:].addmm_(factor[start:end, end:].t(), errors, alpha=-1)
    unsigned = codes.t().add(rule.zero).to(torch.uint8).contiguous()
    by_output = scales.t().contiguous()
    return QuantizedMatrix(to_array(unsigned), to_array(by_output), None, rule.bits, group)


def output_error(weight: Tensor, quantized: Tensor, hessian: Tensor) -> float:
    """Return the squared error of a layer's outputs after rounding, ``tr((W - Q) H (W - Q)ᵀ)``.

    ``weight`` is W, ``quantized`` is Q (dequantized), and ``hessian`` is H.
    """
    error = weight - quantized
    return float((error @ hessian).mul_(error).sum(dtype=torch.float64))


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Return the upper triangular ``U`` with ``H⁻¹ = Uᵀ U``, float32.

    A number is added to the diagonal of H before, so that H can be inverted.
    """
    if not bool(hessian.isfinite().all()):
        msg = (
            "expected finite products of the inputs, found NaN or inf; quantize without a "
            "calibration text"
        )
        raise ValueError(msg)
    damped = hessian.double()
    # The diagonal is 0 for an input that is always 0; any other value will do.
    damped.diagonal().masked_fill_(damped.diagonal() <= 0, 1.0)
    mean = damped.diagonal().mean()
    damping = _DAMPING
    for _ in range(_MAX_ATTEMPTS):
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper.float()
        damping *= 10  # with few or similar tokens, rounding errors can make H indefinite
    msg = "expected products of inputs (X Xᵀ), found a matrix that is far from positive definite"
    raise ValueError(msg)


def scale_layer(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    hessians: Mapping[str, Tensor],
    rule: RoundingRule,
) -> None:
    """Scale the inputs of a layer's matrices in place; its output changes only by rounding.

    ``weights`` are those of the layer in float32, by names such as ``qkv.weight``. ``hessians`` has
    ``X Xᵀ`` of the inputs ``X`` of ``qkv``, ``up`` and ``down``. Divided norms and biases are
    rounded to the dtype of ``rule``.
    """
    for name, norm_name in (("qkv", "attention_norm"), ("up", "mlp_norm")):
        weight = weights[f"{name}.weight"]
        norm = weights[f"{norm_name}.weight"]
        scale = _best_scale(weight, hessians[name], rule)
        quotients, divisors = _divide(norm, scale, rule)
        norm.copy_(quotients)
        weight.mul_(divisors)
    if config.gated:
        down = weights["down.weight"]
        up = weights["up.weight"]
        scale = _best_scale(down, hessians["down"], rule)
        if "up.bias" in weights:
            bias = weights["up.bias"][len(scale) :]
            divided, divisors = _divide(bias, scale, rule)
            scale = torch.where(bias == 0, scale, divisors)
            bias.copy_(divided)
        down.mul_(scale)
        up[len(scale) :].div_(scale[:, None])


def _divide(values: Tensor, scale: Tensor, rule: RoundingRule) -> tuple[Tensor, Tensor]:
    """Divide values by scales so that the quotients are exact in the file's dtype.

    Returns the quotients ``values / scale``, rounded to that dtype, and the divisors ``values /
    quotients``. A value whose quotient would round to 0 or infinity is not divided: its divisor is
    1.
    """
    quotients = (values / scale).to(torch_dtype(rule.dtype)).float()
    is_valid = (quotients != 0) & quotients.isfinite()
    divided = torch.where(is_valid, quotients, values)
    divisors = torch.where(is_valid, values / quotients, 1.0)
    return divided, divisors


def _best_scale(weight: Tensor, hessian: Tensor, rule: RoundingRule) -> Tensor:
    """Return the scales of a matrix's inputs with which rounding changes its outputs least.

    The result is float32 ``[inputs]``. ``weight`` is ``[outputs, inputs]``, and ``hessian`` is
    ``X Xᵀ`` of the inputs.
    """
    rms = hessian.diagonal().clamp_min(0).sqrt()
    rms = rms.clamp_min(_MIN_RELATIVE_RMS * float(rms.max()) + 1e-30)
    best = torch.ones_like(rms)
    min_error = output_error(weight, _nearest(weight, rule), hessian)
    for power in _POWERS:
        scale = rms**power
        scale = scale / (scale.max() * scale.min()).sqrt()
        error = output_error(weight, _nearest(weight * scale, rule) / scale, hessian)
        if error < min_error:
            best = scale
            min_error = error
    return best


def _nearest(weight: Tensor, rule: RoundingRule) -> Tensor:
    """Return ``weight`` rounded to the nearest codes, as float32 again."""
    return to_tensor(rule.nearest(to_array(weight)).dequantize())


@torch.no_grad()
def quantize_calibrated(
    config: ModelConfig,
    window: int | None,
    weights: Mapping[str, Array],
    rows: Array,
    length: int,
    *,
    method: str,
    rule: RoundingRule,
) -> dict[str, QuantizedMatrix]:
    """Return the quantized matrices of a layer.

    Args:
        config: configuration of the model.
        window: sliding window of the layer in tokens; ``None`` is full attention.
        weights: weights of the layer in float32, by names such as ``qkv.weight``; the method
            ``scaled`` changes them in place.
        rows: the layer's input for the calibration text, float32 ``[sequences * length, hidden]``.
        length: number of tokens of a sequence.
        method: ``"scaled"`` or ``"gptq"``.
        rule: rounding of the matrices.

    Raises ValueError if the weights, or the products of the inputs, are not finite, or if the
    products are too far from positive definite for GPTQ.
    """
    # torch uses as many threads as the kernels, whose number the user chooses
    torch.set_num_threads(num_threads())
    tensors = {name: to_tensor(array) for name, array in weights.items()}
    hessians = compute_hessians(config, window, tensors, to_tensor(rows), length)
    if method == "scaled":
        scale_layer(config, tensors, hessians, rule)
        return {name: rule.nearest(weights[f"{name}.weight"]) for name in LINEARS}
    return {name: gptq(tensors[f"{name}.weight"], hessians[name], rule) for name in LINEARS}
