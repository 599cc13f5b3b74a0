"""Launches of the kernels that take rows one by one, for models that are served; see
tests/support/kernels/kernel_launches.py."""

from __future__ import annotations

from collections.abc import Iterator

from services.worker.ops.triton.rotary import rope_and_store_kernel, rope_shape
from services.worker.ops.triton.row_ops import BLOCK, MAX_HIDDEN, gated_act_kernel, norm_shape, rms_norm_kernel
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from tests.support.kernels.kernel_launches import Instruction, Launch

_WIDE = frozenset[Instruction]({"load16", "store16"})


def rows() -> Iterator[Launch]:
    for hidden in (4096, 1024, 5120, 16384, MAX_HIDDEN):
        yield from _norms(hidden)
    for kind in ("silu", "gelu_tanh", "swiglustep"):
        yield Launch(
            f"gated activation {kind}",
            gated_act_kernel,
            {"gate_up": "*bf16", "out": "*bf16"},
            {"WIDTH": 14336, "KIND": kind, "LIMIT": 4.0 if kind == "swiglustep" else 0.0, "BLOCK": BLOCK},
            must=_WIDE,
            rare=kind != "silu",
        )
    # Llama-3.1-8B, Qwen3-0.6B, Qwen2.5-0.5B, and other head sizes.
    yield _rotation(32, 8, 128, norms=False)
    yield _rotation(16, 8, 128, norms=True)
    yield _rotation(14, 2, 64, norms=False, rare=True)
    yield _rotation(32, 32, 80, norms=False, rare=True)
    yield _rotation(32, 32, 96, norms=False, rare=True)
    yield _rotation(8, 4, 256, norms=True, rare=True)
    yield _rotation(8, 1, 128, norms=False, cache="fp8e4nv", rare=True)


def _norms(hidden: int) -> Iterator[Launch]:
    block, warps = norm_shape(hidden)
    for add in (True, False):
        yield Launch(
            f"norm {hidden} {'of a sum' if add else 'alone'}",
            rms_norm_kernel,
            dict.fromkeys(("x", "residual", "out"), "*bf16") | {"weight": "*fp32", "eps": "fp32"},
            {"HIDDEN": hidden, "ADD": add, "BLOCK": block},
            num_warps=warps,
            must=_WIDE,
            rare=hidden != 4096 or not add,
        )


def _rotation(heads: int, kv_heads: int, dim: int, *, norms: bool, cache: str = "bf16", rare: bool = False) -> Launch:
    group, half, warps = rope_shape(heads, kv_heads, dim)
    small = cache == "fp8e4nv"
    optional = {"q_norm": norms, "k_norm": norms, "k_scale": small, "v_scale": small}
    return Launch(
        f"rotation {heads} {kv_heads} {dim} {'normed' if norms else 'plain'} {cache}",
        rope_and_store_kernel,
        {"qkv": "*bf16", "slots": "*i32", "positions": "*i32", "cos_sin": "*fp32", "q": "*bf16", "eps": "fp32"}
        | {"k_cache": f"*{cache}", "v_cache": f"*{cache}"}
        | {name: "*fp32" for name, there in optional.items() if there},
        {name: None for name, there in optional.items() if not there}
        | {"HEADS": heads, "KV": kv_heads, "DIM": dim, "HALF": half, "GROUP": group, "TOKENS": BLOCK_SIZE}
        | {"MOST": 448.0 if small else None},
        num_warps=warps,
        targets=(90,) if small else (80, 90),
        must=_WIDE,
        rare=rare,
    )
