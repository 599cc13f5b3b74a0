"""The library's C interface for copies between caches and a KV store: structures as in kv_copy.h. Knows no tensors."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_int, c_int64, c_void_p


class NativeKvCaches(Structure):
    """`KvMemory` of kv_copy.h: the caches of all layers."""

    _fields_ = (
        ("item_bytes", c_int),
        ("layers", c_int),
        ("kv_heads", c_int),
        ("head_dim", c_int),
        ("pages", c_int),
        ("keys", POINTER(c_void_p)),
        ("values", POINTER(c_void_p)),
    )


class KvArena(Structure):
    """`KvArena` of kv_copy.h: a mapped arena of the KV store; strides are in bytes."""

    _fields_ = (
        ("generations", c_void_p),
        ("checksums", c_void_p),
        ("payloads", c_void_p),
        ("header_stride", c_int64),
        ("payload_stride", c_int64),
        ("head_stride", c_int64),
        ("checksum_stride", c_int64),
    )


class KvCells(Structure):
    """`KvCells` of kv_copy.h: cells in an arena's order."""

    _fields_ = (("layers", c_int), ("kv_heads", c_int), ("cell_bytes", c_int64), ("cells", c_void_p))


class KvBlocks(Structure):
    """`KvBlocks` of kv_copy.h: which blocks are copied, from or to which slots of which generations."""

    _fields_ = (("count", c_int), ("blocks", c_void_p), ("slots", c_void_p), ("generations", c_void_p))
