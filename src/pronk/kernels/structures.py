"""The structures of ``csrc/pronk.h``, as :mod:`ctypes` has them; what their fields are is written there."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p

__all__ = ["STRUCTURES", "CDraftChain", "CDraftTree", "CForward", "COp", "CSegment", "CWeights", "Hear", "Prior"]


class CWeights(Structure):
    """``pronk_weights``: a packed matrix."""

    _fields_ = [
        ("type", c_int32),
        ("gated", c_int32),
        ("group", c_int32),
        ("minima", c_int32),
        ("n", c_int64),
        ("k", c_int64),
        ("kp", c_int64),
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
    """``pronk_segment``: one request's rows."""

    _fields_ = [
        ("blocks", c_void_p),
        ("parents", c_void_p),
        ("released", c_int32),
        ("length", c_int32),
        ("nodes", c_int32),
        ("computed", c_int32),
        ("held", c_int32),
    ]


class CForward(Structure):
    """``pronk_pass``: the rows of a pass, and where its results go."""

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
        ("beside", POINTER(CSegment)),
        ("stream", c_void_p),
        ("rope", c_void_p * 2),
        ("rope_by_row", c_int32 * 2),
        ("wanted", c_void_p),
        ("logits", c_void_p),
        ("collected", c_void_p),
    ]


# ``hear(token, confidence)`` is told of each token of a chain; 0 ends it.
Hear = ctypes.CFUNCTYPE(c_int32, c_int32, c_float)


class CDraftChain(Structure):
    """``pronk_chain``: how a draft model goes on by itself."""

    _fields_ = [
        ("key", c_uint64),
        ("position", c_int64),
        ("steps", c_int32),
        ("temperature", c_float),
        ("scores", c_void_p),
        ("hear", Hear),
    ]


# ``prior(way, depth)`` says how often such guesses are right, as far as anybody knows.
Prior = ctypes.CFUNCTYPE(c_double, c_int32, c_int32)


class CDraftTree(Structure):
    """``pronk_sprouts``: a tree of what followed the ends of a text."""

    _fields_ = [
        ("sources", POINTER(c_void_p)),
        ("tail", POINTER(c_int32)),
        ("num_sources", c_int32),
        ("tail_tokens", c_int32),
        ("width", c_int32),
        ("max_depth", c_int32),
        ("min_match", c_int32),
        ("depth_factor", c_double),
        ("least", c_double),
        ("weight", c_double),
        ("offered", POINTER(c_double)),
        ("taken", POINTER(c_double)),
        ("priors", POINTER(c_double)),
        ("prior", Prior),
        ("tokens", POINTER(c_int32)),
        ("parents", POINTER(c_int32)),
        ("ways", POINTER(c_int32)),
        ("gains", POINTER(c_double)),
    ]


# In the order in which the library says their sizes.
STRUCTURES: tuple[type[Structure], ...] = (CWeights, COp, CSegment, CForward, CDraftChain, CDraftTree)
