"""The library's C interface for draws and log-probabilities, as draw.h and logprobs.h have it. Knows no tensors."""

from __future__ import annotations

from ctypes import Structure, c_int, c_void_p


class NativeDraws(Structure):
    """`Draws` of draw.h; the first four are the library's own affair in a `NativeDecode`."""

    _fields_ = (
        ("logits", c_void_p),
        ("vocab", c_int),
        ("count", c_int),
        ("keys", c_void_p),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
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
"""`kMostLikeliest` of logprobs.h."""
