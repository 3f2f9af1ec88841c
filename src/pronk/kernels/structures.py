"""Structures of ``csrc/pronk.h`` for :mod:`ctypes`; the header documents their fields."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_uint64, c_void_p

__all__ = ["STRUCTURES", "CDraftChain", "CForward", "COp", "CSegment", "CWeights", "OnToken"]


class CWeights(Structure):
    """``pronk_weights``: a packed matrix."""

    _fields_ = [
        ("type", c_int32),
        ("gated", c_int32),
        ("group", c_int32),
        ("minima", c_int32),
        ("N", c_int64),
        ("K", c_int64),
        ("K_pad", c_int64),
        ("unit", c_int64),
        ("blocks", c_int64),
        ("data", c_void_p),
        ("bias", c_void_p),
        ("order", c_void_p),
    ]


class COp(Structure):
    """``pronk_op``: one operation of a program."""

    _fields_ = [
        ("kind", c_int32),
        ("input", c_int32),
        ("output", c_int32),
        ("residual", c_int32),
        ("activation", c_int32),
        ("wanted", c_int32),
        ("norm", c_int32),
        ("eps", c_float),
        ("norm_weight", c_void_p),
        ("norm_bias", c_void_p),
        ("w", POINTER(CWeights)),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("first_head", c_int32),
        ("rope", c_int32),
        ("window", c_int32),
        ("cross", c_int32),
        ("block_size", c_int32),
        ("kv_type", c_int32),
        ("slots", c_int64),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("table", c_void_p),
        ("positions", c_void_p),
        ("table_type", c_int32),
        ("collected", c_int32),
    ]


class CSegment(Structure):
    """``pronk_segment``: the rows of one request."""

    _fields_ = [
        ("blocks", c_void_p),
        ("parents", c_void_p),
        ("released", c_int32),
        ("length", c_int32),
        ("nodes", c_int32),
        ("computed", c_int32),
        ("num_blocks", c_int32),
    ]


class CForward(Structure):
    """``pronk_pass``: the rows of a forward pass and the addresses of its results."""

    _fields_ = [
        ("rows", c_int64),
        ("segments", c_int64),
        ("num_wanted", c_int64),
        ("type", c_int32),
        ("hidden", c_int32),
        ("isa", c_int32),
        ("threads", c_int32),
        ("tokens", c_void_p),
        ("segment", POINTER(CSegment)),
        ("cross_segment", POINTER(CSegment)),
        ("stream", c_void_p),
        ("rope", c_void_p * 2),
        ("rope_by_row", c_int32 * 2),
        ("wanted", c_void_p),
        ("logits", c_void_p),
        ("collected", c_void_p),
    ]


# ``on_token(token, confidence)`` receives each token of a chain; returning 0 ends the chain.
OnToken = ctypes.CFUNCTYPE(c_int32, c_int32, c_float)


class CDraftChain(Structure):
    """``pronk_chain``: a chain of tokens from a draft model."""

    _fields_ = [
        ("key", c_uint64),
        ("position", c_int64),
        ("steps", c_int32),
        ("temperature", c_float),
        ("scores", c_void_p),
        ("on_token", OnToken),
    ]


# In the order of ``pronk_sizes``.
STRUCTURES: tuple[type[Structure], ...] = (CWeights, COp, CSegment, CForward, CDraftChain)
