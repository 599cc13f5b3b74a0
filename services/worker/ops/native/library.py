"""The library's C interface for Python: structures and signatures as in api.cpp. Knows no tensors."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

from services.worker.ops.native.draw_structures import MAX_LIKELIEST as MAX_LIKELIEST
from services.worker.ops.native.draw_structures import DecodeTable as DecodeTable
from services.worker.ops.native.draw_structures import NativeDecode as NativeDecode
from services.worker.ops.native.draw_structures import NativeLogprobs as NativeLogprobs
from services.worker.ops.native.kv_structures import KvArena, KvBlocks, KvCells, NativeKvCaches
from services.worker.ops.native.mixer_structures import MixStates as MixStates
from services.worker.ops.native.mixer_structures import NativeLatentAttention as NativeLatentAttention
from services.worker.ops.native.mixer_structures import NativeLatentCache as NativeLatentCache
from services.worker.ops.native.mixer_structures import NativeStateCache as NativeStateCache
from services.worker.ops.native.mixer_structures import NativeStateMixer as NativeStateMixer
from services.worker.ops.native.mixer_structures import QueryGrowth as QueryGrowth
from services.worker.ops.native.mixer_structures import StoreLatents as StoreLatents

VERSION = 37
"""Version of the native interface; `baton_version` in api.cpp must be the same."""

SINGLE, HALF = 0, 1
"""The values of `Number` in linear.h."""

PLAIN = 0
CODES = {"int8": 1, "int4": 2, "fp8": 3}
QUAD, NIBBLE = 4, 5
"""The values of `Code` in linear.h; PLAIN for numbers, QUAD and NIBBLE for int8 and int4 that are multiplied in whole
numbers."""

OUT_FLOAT = 0
"""`Out::kFloat` of linear.h."""


class Linear(Structure):
    """`Linear` of linear.h: a packed matrix [out, in_] and its float32 bias, or null; scales where it is codes."""

    _fields_ = (
        ("number", c_int),
        ("out", c_int),
        ("in_", c_int),
        ("groups", c_void_p),
        ("bias", c_void_p),
        ("code", c_int),
        ("scaled", c_int),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("digits", c_int),
        ("offsets", c_void_p),
        ("tiled", c_int),
    )


class RouterRule(Structure):
    """`RouterRule` of mixture.h: how a mixture's router chooses experts."""

    _fields_ = (
        ("experts", c_int),
        ("chosen", c_int),
        ("sigmoid", c_int),
        ("renormalised", c_int),
        ("bias", c_void_p),
        ("scale", c_float),
        ("groups", c_int),
        ("chosen_groups", c_int),
    )


class NativePicks(Structure):
    """`Picks` of mixture.h: the experts of each row, and what their outputs are multiplied by."""

    _fields_ = (("chances", c_void_p), ("experts", c_void_p), ("chosen", c_int))


class NativeActivation(Structure):
    """`Activation` of linear.h: what is made of gates and ups, and its limit; 0: it has none."""

    _fields_ = (("kind", c_int), ("limit", c_float))


class NativeMixture(Structure):
    """`Experts` of mixture.h: a mixture's matrices."""

    _fields_ = (
        ("gate_up", POINTER(Linear)),
        ("down", POINTER(Linear)),
        ("count", c_int),
        ("activation", NativeActivation),
    )


class LowRank(Structure):
    """`LowRank` of low_rank.h: one adapter's product of one part of a matrix; rank 0 for none."""

    _fields_ = (("rank", c_int), ("a", c_void_p), ("b", c_void_p))


class LowRankTable(Structure):
    """`LowRankTable` of low_rank.h: the products of all slots beside one matrix."""

    _fields_ = (
        ("number", c_int),
        ("in_", c_int),
        ("parts", c_int),
        ("starts", POINTER(c_int)),
        ("products", POINTER(LowRank)),
    )


class Exchange(Structure):
    """`Exchange` of exchange.h: one rank's end of the memory that the ranks of a host share."""

    _fields_ = (
        ("memory", c_void_p),
        ("rank", c_int),
        ("ranks", c_int),
        ("capacity", c_int64),
        ("number", c_uint32),
        ("posted", c_int),
        ("done", c_int64),
        ("sent", c_int64),
        ("received", c_int64),
    )


class ByteRange(Structure):
    """`Share` of exchange.h: neighbours among the bytes of what is exchanged."""

    _fields_ = (("first", c_int64), ("end", c_int64))


class RowsInFlight(Structure):
    """`RoutedRows` of exchange.h: how the rows of a mixture lie one behind the other."""

    _fields_ = (("shares", POINTER(ByteRange)), ("width", c_int64), ("holders", c_void_p))


EXCHANGE_SUM, EXCHANGE_GATHER, EXCHANGE_BROADCAST, EXCHANGE_ALL_GATHER, EXCHANGE_REDUCE_SCATTER = range(5)
"""The values of `ExchangeKind` in exchange.h."""
EXCHANGE_DISPATCH, EXCHANGE_COMBINE = 5, 6
"""Those for rows that go to some ranks only."""
OTHER_EXCHANGE = -1
"""`kOtherExchange` of exchange.h."""
HEAD_PAGE, MAX_EXCHANGING = 4096, 62
"""`kHeadPage` and `kMaxRanks` of exchange.h."""

PAGE_TOKENS = 16
"""`kPageTokens` of attention.h: a block is one page, two or four."""


def page_bits(block_size: int) -> int:
    """By how many bits the number of a page is shifted to be that of its block."""
    return (block_size // PAGE_TOKENS).bit_length() - 1


class Cache(Structure):
    """`Cache` of attention.h: one layer's keys and values."""

    _fields_ = (
        ("number", c_int),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("kv_heads", c_int),
        ("head_dim", c_int),
        ("page_bits", c_int),
        ("code", c_int),
    )


class NativeSlotCopies(Structure):
    """`SlotCopies` of attention.h."""

    _fields_ = (("count", c_int), ("sources", c_void_p), ("targets", c_void_p))


class NativeBatch(Structure):
    """`Batch` of attention.h: how a step's rows fall into sequences, as `BatchMeta`."""

    _fields_ = (
        ("rows", c_int),
        ("sequences", c_int),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_width", c_int),
        ("slots", c_void_p),
        ("positions", c_void_p),
        ("lasts", c_void_p),
        ("rotations", c_void_p),
        ("copies", NativeSlotCopies),
    )


class RopeAndStore(Structure):
    """`RopeAndStore` of api.cpp: the arguments of `Ops.rope_and_store`; strides are in elements."""

    _fields_ = (
        ("qkv", c_void_p),
        ("qkv_stride", c_int64),
        ("heads", c_int),
        ("cos_sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("eps", c_float),
        ("queries", c_void_p),
        ("query_stride", c_int64),
        ("growth", QueryGrowth),
    )


class Attention(Structure):
    """`Attention` of attention.h: the arguments of `Ops.paged_attention`; 0 for no window and no softcap,
    null for no sinks, slopes and biases."""

    _fields_ = (
        ("queries", c_void_p),
        ("query_stride", c_int64),
        ("heads", c_int),
        ("scale", c_float),
        ("window", c_int),
        ("softcap", c_float),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("sinks", c_void_p),
        ("alibi_slopes", c_void_p),
        ("distance_biases", c_void_p),
        ("distances", c_int),
    )


class DecoderMixture(Structure):
    """`DecoderMixture` of decoder.h: the experts of a layer."""

    _fields_ = (
        ("router", Linear),
        ("rule", RouterRule),
        ("experts", NativeMixture),
        ("shared_gate", Linear),
        ("shared_activation", NativeActivation),
        ("counts", c_void_p),
    )


ADAPTED_OF_LAYER = 8
"""`kAdaptedOfLayer` of decoder.h: tables of what adapters add to a layer's matrices, in the order of `Adapted`."""


class DecoderSelective(Structure):
    """`DecoderSelective` of decoder.h: what a selective space has between its convolution and its states."""

    _fields_ = (("made", Linear), ("steps", Linear), ("norms", c_void_p * 3), ("eps", c_float))


class DecoderGates(Structure):
    """`DecoderGates` of decoder.h: what a delta net by element has before its states."""

    _fields_ = (("rates", Linear), ("outputs", Linear))


class DecoderStates(Structure):
    """`DecoderStates` of decoder.h: a mixer with states in the place of a layer's attention."""

    _fields_ = (
        ("mixer", NativeStateMixer),
        ("steps", Linear),
        ("selective", POINTER(DecoderSelective)),
        ("gates", POINTER(DecoderGates)),
        ("norm", c_void_p),
        ("eps", c_float),
    )


class DecoderLatent(Structure):
    """`DecoderLatent` of decoder.h: latent attention in the place of a layer's usual one."""

    _fields_ = (
        ("rank", c_int),
        ("nope_dim", c_int),
        ("rope_dim", c_int),
        ("value_dim", c_int),
        ("q_norm", c_void_p),
        ("q_up", Linear),
        ("kv_norm", c_void_p),
        ("keys_up", POINTER(Linear)),
        ("values_up", POINTER(Linear)),
        ("eps", c_float),
    )


class DecoderLayer(Structure):
    """`DecoderLayer` of decoder.h: one layer's weights; null for norms that the model does not have."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("attention_post_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_post_norm", c_void_p),
        ("cos_sin", c_void_p),
        ("qkv", Linear),
        ("gate", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("window", c_int),
        ("sinks", c_void_p),
        ("slopes", c_void_p),
        ("mixture", POINTER(DecoderMixture)),
        ("states", POINTER(DecoderStates)),
        ("latent", POINTER(DecoderLatent)),
        ("input_scales", c_void_p),
        ("up_scales", c_void_p),
        ("output_scale", c_float),
        ("down_scale", c_float),
        ("beside", c_int),
        ("output_kept", c_float),
        ("mlp_kept", c_float),
    )


class DecoderConfig(Structure):
    """`DecoderConfig` of decoder.h: what is the same for all layers; caps are 0 where there is none."""

    _fields_ = (
        ("number", c_int),
        ("layers", c_int),
        ("hidden", c_int),
        ("heads", c_int),
        ("kv_heads", c_int),
        ("head_dim", c_int),
        ("page_bits", c_int),
        ("cache_code", c_int),
        ("vocab", c_int),
        ("activation", NativeActivation),
        ("eps", c_float),
        ("attention_scale", c_float),
        ("attention_softcap", c_float),
        ("logits_softcap", c_float),
        ("embedding_scale", c_float),
        ("residual_scale", c_float),
        ("residual_normed", c_int),
        ("logits_divisor", c_float),
        ("embedding", c_void_p),
        ("coded_embedding", Linear),
        ("final_norm", c_void_p),
        ("head", Linear),
        ("joined", Linear),
        ("embedding_norm", c_void_p),
        ("given_norm", c_void_p),
        ("norms_residual", c_int),
        ("growth", QueryGrowth),
        ("words", c_int),
        ("tokens", c_void_p),
    )


class Adapters(Structure):
    """`Adapters` of decoder.h: whose adapters a pass's rows have, and what they add."""

    _fields_ = (("tables", POINTER(POINTER(LowRankTable))), ("slots", c_void_p), ("logits_slots", c_void_p))


class Inputs(Structure):
    """`Inputs` of decoder.h: rows that begin as float32 values, and not as their tokens' embeddings."""

    _fields_ = (("count", c_int), ("rows", c_void_p), ("values", c_void_p), ("levels", c_int))


class Forward(Structure):
    """`Forward` of decoder.h: one pass. `to` and `features` are written; `given` is read where it is not null."""

    _fields_ = (
        ("ids", c_void_p),
        ("batch", NativeBatch),
        ("logits_rows", c_void_p),
        ("logits", c_int),
        ("keys", POINTER(c_void_p)),
        ("values", POINTER(c_void_p)),
        ("to", c_void_p),
        ("features", c_void_p),
        ("taps", POINTER(c_int)),
        ("tap_count", c_int),
        ("given", c_void_p),
        ("group_of", POINTER(c_int)),
        ("batches", POINTER(NativeBatch)),
        ("adapters", POINTER(Adapters)),
        ("inputs", POINTER(Inputs)),
        ("state_slots", c_void_p),
    )


_SIGNATURES = {
    "baton_version": (c_int, ()),
    "baton_instructions": (ctypes.c_char_p, ()),
    "baton_allow_tiles": (c_int, ()),
    "baton_pool": (c_void_p, (c_int,)),
    "baton_pool_free": (None, (c_void_p,)),
    "baton_packed_bytes": (c_int64, (c_int, c_int, c_int)),
    "baton_pack": (None, (c_void_p, c_int, c_void_p, c_int, c_int, c_void_p)),
    "baton_coded_bytes": (c_int64, (c_int, c_int, c_int)),
    "baton_pack_codes": (None, (c_void_p, c_int, c_void_p, c_int, c_int, c_void_p)),
    "baton_multiply": (
        None,
        (c_void_p, POINTER(Linear), c_void_p, c_int, c_int, c_int64, c_int, c_int, c_void_p, c_int64),
    ),
    "baton_multiply_each": (
        None,
        (c_void_p, POINTER(Linear), c_void_p, c_int, c_void_p, c_int, c_int, c_int64, c_int, c_int, c_void_p, c_int64),
    ),
    "baton_route": (None, (c_void_p, c_void_p, c_int, POINTER(RouterRule), c_void_p, c_void_p)),
    "baton_mix": (
        None,
        (c_void_p, c_void_p, c_int, c_int, c_int64, POINTER(NativePicks), POINTER(NativeMixture), c_void_p, c_int64),
    ),
    "baton_add_low_rank": (
        None,
        (c_void_p, POINTER(LowRankTable), c_void_p, c_int, c_int, c_int64, c_void_p, c_void_p, c_int64),
    ),
    "baton_embed": (c_int, (c_void_p, c_void_p, c_int, c_int, c_void_p, c_int, c_int, c_void_p)),
    "baton_embed_codes": (c_int, (c_void_p, c_void_p, c_int, POINTER(Linear), c_void_p)),
    "baton_norm": (None, (c_void_p, c_void_p, c_int, c_int, c_int, c_void_p, c_void_p, c_float, c_int, c_void_p)),
    "baton_gate": (None, (c_void_p, c_void_p, c_int, c_int, NativeActivation, c_int, c_void_p)),
    "baton_gate_by": (None, (c_void_p, c_void_p, c_int, c_int, c_int, c_void_p)),
    "baton_rope_and_store": (None, (c_void_p, POINTER(RopeAndStore), POINTER(NativeBatch), POINTER(Cache))),
    "baton_copy_slots": (None, (c_void_p, POINTER(Cache), POINTER(NativeSlotCopies))),
    "baton_attend": (None, (c_void_p, POINTER(Attention), POINTER(NativeBatch), POINTER(Cache))),
    "baton_store_latents": (
        None,
        (c_void_p, POINTER(StoreLatents), POINTER(NativeBatch), POINTER(NativeLatentCache)),
    ),
    "baton_attend_latents": (
        None,
        (c_void_p, POINTER(NativeLatentAttention), POINTER(NativeBatch), POINTER(NativeLatentCache)),
    ),
    "baton_mix_states": (
        None,
        (c_void_p, POINTER(MixStates), POINTER(NativeBatch), POINTER(NativeStateMixer), POINTER(NativeStateCache)),
    ),
    "baton_decoder": (c_void_p, (c_void_p, POINTER(DecoderConfig), POINTER(DecoderLayer))),
    "baton_decoder_free": (None, (c_void_p,)),
    "baton_kv_save": (c_int, (POINTER(NativeKvCaches), POINTER(KvArena), POINTER(KvBlocks))),
    "baton_kv_load": (c_int, (POINTER(NativeKvCaches), POINTER(KvArena), POINTER(KvBlocks))),
    "baton_kv_save_cells": (c_int, (POINTER(KvCells), POINTER(KvArena), POINTER(KvBlocks))),
    "baton_kv_load_cells": (c_int, (POINTER(KvCells), POINTER(KvArena), POINTER(KvBlocks))),
    "baton_exchange": (c_int, (POINTER(Exchange), c_int, c_int, c_void_p, c_int64, c_void_p, c_int)),
    "baton_notifier_state": (c_uint64, (POINTER(Exchange),)),
    "baton_notify": (None, (POINTER(Exchange), c_int, c_uint32)),
    "baton_await_notify": (None, (POINTER(Exchange), c_uint32, c_int)),
    "baton_show": (None, (POINTER(Exchange), c_uint64)),
    "baton_shown_by": (c_uint64, (POINTER(Exchange), c_int)),
    "baton_probe_reading": (c_float, (c_void_p, c_void_p, c_int64)),
    "baton_probe_multiplying": (c_int64, (c_void_p, c_int, c_int64)),
    "baton_probe_tiles": (c_int64, (c_void_p, c_int64)),
    "baton_draw": (None, (c_void_p, c_void_p, c_int, c_int, *[c_void_p] * 6)),
    "baton_find_likeliest": (None, (c_void_p, c_void_p, c_int, c_int, c_void_p, c_void_p)),
    "baton_find_logprobs": (None, (c_void_p, POINTER(NativeLogprobs), *[c_void_p] * 4)),
    "baton_decoder_run": (c_int, (c_void_p, POINTER(Forward))),
    "baton_decoder_decode": (c_int, (c_void_p, POINTER(NativeDecode))),
    "baton_decoder_finish": (None, (c_void_p, POINTER(NativeDecode))),
    "baton_accept": (None, (POINTER(NativeDecode),)),
    "baton_race_key": (None, (c_uint64, c_uint32, c_void_p)),
    "baton_decoder_draft_on": (c_int, (c_void_p, POINTER(Forward), c_int, c_int64, c_void_p)),
}


def load(path: Path) -> ctypes.CDLL:
    """The library at `path` with its signatures set. Raises OSError where it is not a library of this version."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    if library.baton_version() != VERSION:
        raise OSError(f"{path} has version {library.baton_version()} of the interface, {VERSION} is needed")
    return library
