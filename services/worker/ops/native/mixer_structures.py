"""Structures of the C interface for latent attention and for layers with states, as in latent.h and states.h."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_int64, c_void_p


class NativeLatentCache(Structure):
    """`LatentCache` of latent.h: one layer's latents and rotated keys, and an indexer's."""

    _fields_ = (
        ("number", c_int),
        ("latents", c_void_p),
        ("rotated", c_void_p),
        ("rank", c_int),
        ("rope_dim", c_int),
        ("index_dim", c_int),
        ("page_bits", c_int),
    )


class QueryGrowth(Structure):
    """`QueryGrowth` of attention.h: what queries are multiplied by at a position; null: nothing."""

    _fields_ = (("scales", c_void_p), ("length", c_int))


class StoreLatents(Structure):
    """`StoreLatents` of latent.h: the arguments of `LatentOps.rope_and_store`."""

    _fields_ = (
        ("latents", c_void_p),
        ("queries", c_void_p),
        ("heads", c_int),
        ("query_dim", c_int),
        ("cos_sin", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
        ("growth", QueryGrowth),
    )


class NativeLatentAttention(Structure):
    """`LatentAttention` of latent.h: the arguments of `LatentOps.attention`."""

    _fields_ = (("queries", c_void_p), ("heads", c_int), ("scale", c_float), ("out", c_void_p))


class NativeStateMixer(Structure):
    """`StateMixer` of states.h: a mixer between its projections."""

    _fields_ = (
        ("rule", c_int),
        ("heads", c_int),
        ("head_dim", c_int),
        ("groups", c_int),
        ("state_dim", c_int),
        ("kernel", c_int),
        ("conv_weight", c_void_p),
        ("conv_bias", c_void_p),
        ("decay", c_void_p),
        ("skip", c_void_p),
        ("step_bias", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
        ("most_written", c_float),
        ("lower_bound", c_float),
    )


class NativeStateCache(Structure):
    """`StateCache` of states.h: one layer's states."""

    _fields_ = (("windows", c_void_p), ("states", c_void_p))


class MixStates(Structure):
    """`MixStates` of states.h: the arguments of `StateOps.mix`."""

    _fields_ = (
        ("projected", c_void_p),
        ("projected_stride", c_int64),
        ("slots", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
    )
