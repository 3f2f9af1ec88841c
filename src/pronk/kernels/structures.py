"""Structures of ``csrc/pronk.h`` for :mod:`ctypes`; the header documents their fields.

Fields must have the header's order and types: the check at loading (``library.py``) compares only
the sizes of structures, which two swapped fields do not change.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

NUM_ROPE_TABLES = 4  # entries of ``pronk_pass.rope``


def structure_fields(*groups: tuple[str, Any]) -> list[tuple[str, Any]]:
    """Return the fields of a structure, given groups of names with a common type.

    The group ``("type gated", t)`` stands for the fields ``("type", t), ("gated", t)``.
    """
    return [(name, field_type) for names, field_type in groups for name in names.split()]


class CWeights(Structure):
    """C structure ``pronk_weights``: a packed matrix of weights."""

    _fields_ = structure_fields(
        ("type gated group minima scale_type stored", c_int32),
        ("N K K_pad unit blocks", c_int64),
        ("data bias order codebook", c_void_p),
    )


class CAdapter(Structure):
    """C structure ``pronk_adapter``: a low-rank adapter (LoRA) of a packed matrix."""

    _fields_ = structure_fields(("down up", POINTER(CWeights)), ("first", c_void_p))


class CBlocks(Structure):
    """C structure ``pronk_blocks``: rows of quantized blocks of a GGUF tensor, to be packed."""

    _fields_ = structure_fields(("data", c_void_p), ("rows heads", c_int64))


class COp(Structure):
    """C structure ``pronk_op``: one operation of a forward pass, such as a matrix product."""

    _fields_ = structure_fields(
        ("kind input output residual activation wanted norm", c_int32),
        ("eps", c_float),
        ("norm_weight norm_bias", c_void_p),
        ("w", POINTER(CWeights)),
        ("heads kv_heads head_dim first_head rope window cache block_size kv_type", c_int32),
        ("slots", c_int64),
        ("q_norm k_norm v_norm key_bias bias_pairs keys values table positions", c_void_p),
        ("table_type collected", c_int32),
        ("scale cap query_growth", c_float),
        ("query_period rope_dim num_bias_pairs", c_int32),
        ("sinks", c_void_p),
        ("mixing experts per_row normalized sigmoid groups row_groups group_best", c_int32),
        ("correction expert_scale", c_void_p),
        ("filter filter_bias", c_void_p),
        ("taps num_adapters part parts zero_first layer_input table_format", c_int32),
        ("columns first_column input_columns value_dim tiled num_updates", c_int32),
        ("rule state_size update_size", c_int32),
        ("states inputs updates decay_rate decay_bias skip", c_void_p),
        ("adapters", POINTER(CAdapter)),
    )


class CSegment(Structure):
    """C structure ``pronk_segment``: the rows of one request in a forward pass."""

    _fields_ = structure_fields(
        ("blocks parents", c_void_p),
        ("released length nodes computed num_blocks adapter", c_int32),
    )


class CRecurrence(Structure):
    """C structure ``pronk_recurrence``: how a pass updates one request's recurrent state."""

    _fields_ = structure_fields(
        ("updates copies length", c_void_p),
        ("slot keeps replayed absorbed certain num_copies", c_int32),
    )


class CSampling(Structure):
    """C structure ``pronk_sampling``: options by which a request chooses tokens."""

    _fields_ = structure_fields(
        ("key", c_uint64),
        ("temperature log_min_p", c_float),
        ("top_k", c_int64),
        ("top_p repetition frequency presence", c_double),
        ("counts in_prompt", c_void_p),
    )


class CChoice(Structure):
    """C structure ``pronk_choice``: choice of a request's tokens by the logits of a pass."""

    _fields_ = structure_fields(
        ("sampling tokens parents", c_void_p),
        ("position first", c_int64),
        ("nodes accepted", c_int32),
        ("path", c_void_p),
    )


class CForward(Structure):
    """C structure ``pronk_pass``: rows of a forward pass, addresses of its inputs and results."""

    _fields_ = structure_fields(
        ("rows segments num_others num_wanted", c_int64),
        ("type hidden isa threads fast", c_int32),
        ("tokens", c_void_p),
        ("segment others", POINTER(CSegment)),
        ("stream", c_void_p),
        ("rope", c_void_p * NUM_ROPE_TABLES),
        ("rope_by_row", c_int32 * NUM_ROPE_TABLES),
        ("wanted logits collected experts_read", c_void_p),
        ("recurrence", POINTER(CRecurrence)),
        ("state_bytes", c_void_p),
        ("choices", POINTER(CChoice)),
    )


class CClusters(Structure):
    """C structure ``pronk_clusters``: second stage of an LM head that is divided into clusters."""

    _fields_ = structure_fields(
        ("op clusters tokens", c_void_p),
        ("num_clusters num_best", c_int32),
        ("logits ids", c_void_p),
    )


# Type of a function ``on_token(token, confidence)``, called with each draft token of a chain. The
# result 0 ends the chain.
OnToken = ctypes.CFUNCTYPE(c_int32, c_int32, c_float)


class CDraftChain(Structure):
    """C structure ``pronk_chain``: how a chain of draft tokens is sampled, and its scores."""

    _fields_ = structure_fields(
        ("sampling", POINTER(CSampling)),
        ("position", c_int64),
        ("steps", c_int32),
        ("ids scores", c_void_p),
        ("clusters", POINTER(CClusters)),
        ("on_token", OnToken),
    )


# All structures, in the order in which the function ``pronk_sizes`` returns their sizes.
STRUCTURES: tuple[type[Structure], ...] = (
    CWeights,
    CAdapter,
    CBlocks,
    COp,
    CSegment,
    CForward,
    CDraftChain,
    CRecurrence,
    CSampling,
    CClusters,
    CChoice,
)
