"""The library's C interface for draws and log-probabilities, as draw.h and logprobs.h have it, and for steps of
decodes, as decoder.h has it, which end with them. Knows no tensors."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_int, c_int64, c_void_p

import numpy as np

CHANGES = np.dtype(
    [(name, np.uintp) for name in ("allowed", "mask", "bias_tokens", "bias_values", "stops", "held")]
    + [(name, np.int32) for name in ("biases", "stop_count", "prompt_length", "held_length")]
    + [(name, np.float32) for name in ("presence", "frequency", "repetition")],
    align=True,
)
"""`Changes` of changes.h."""


class NativeDraws(Structure):
    """`Draws` of draw.h; the first four and `steps` are the library's own affair in a `NativeDecode`."""

    _fields_ = (
        ("logits", c_void_p),
        ("vocab", c_int),
        ("count", c_int),
        ("keys", c_void_p),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("changes", c_void_p),
        ("steps", c_int),
    )


class NativeLogprobs(Structure):
    """`Logprobs` of logprobs.h: of which rows and tokens, and how many of the likeliest."""

    _fields_ = (
        ("logits", c_void_p),
        ("vocab", c_int),
        ("rows", c_void_p),
        ("tokens", c_void_p),
        ("count", c_int),
        ("likeliest", c_int),
    )


MAX_LIKELIEST = 64
"""`kMaxTopLogprobs` of logprobs.h."""


class DecodeTable(Structure):
    """`DecodeTable` of decoder.h."""

    _fields_ = (("blocks", c_void_p), ("window", c_int))


class NativeDecode(Structure):
    """`Decode` of decoder.h: a step of decodes. `tokens`, `drawn` and all behind it are written."""

    _fields_ = (
        ("count", c_int),
        ("rows", c_int),
        ("steps", c_int),
        ("sequences", c_void_p),
        ("positions", c_void_p),
        ("outputs", c_void_p),
        ("drafted", c_void_p),
        ("tokens", c_void_p),
        ("width", c_int64),
        ("tables", c_void_p),
        ("groups", c_int),
        ("table_width", c_int64),
        ("group_of", c_void_p),
        ("adapters", c_void_p),
        ("keys", POINTER(c_void_p)),
        ("values", POINTER(c_void_p)),
        ("to", c_void_p),
        ("halts", c_int),
        ("left", c_int),
        ("seeds", c_void_p),
        ("draws", NativeDraws),
        ("logprobs", NativeLogprobs),
        ("drawn", c_void_p),
        ("undefined", c_void_p),
        ("gained", c_void_p),
        ("own", c_void_p),
        ("likeliest", c_void_p),
        ("chances", c_void_p),
        ("forward_seconds", c_double),
    )
