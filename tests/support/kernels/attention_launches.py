"""Launches of paged attention, for models that are served; see tests/support/kernels/kernel_launches.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from services.worker.ops.gpu import generation_of
from services.worker.ops.triton.attention.decode import decode_kernel
from services.worker.ops.triton.attention.indexer import (
    CHOSEN_AT_ONCE,
    SCORE_STAGES,
    TILES_OF_PROGRAM,
    TOKENS_OF_TILE,
    chosen_slots_kernel,
    index_scores_kernel,
)
from services.worker.ops.triton.attention.latent_decode import latent_decode_kernel, latent_tile
from services.worker.ops.triton.attention.paged_context import merge_kernel, merged_at_once, merged_pad
from services.worker.ops.triton.attention.prefill import prefill_kernel
from services.worker.ops.triton.attention.tiles import (
    FEW_DECODE_STAGES,
    MERGING_WARPS,
    decode_tile,
    padded,
    prefill_tile,
)
from tests.support.kernels.kernel_launches import Instruction, Launch

INDEX_DIM = 128
"""Of an indexer's keys."""


def attention() -> Iterator[Launch]:
    for shape in (
        # Llama-3.1-8B and -70B, Qwen3.
        AttentionShape(128, "bf16", group=4),
        AttentionShape(128, "bf16", group=8, cache="fp8e4nv", rare=True),
        AttentionShape(128, "fp16", group=7, window=4096, rare=True),
        AttentionShape(128, "bf16", group=16, rare=True),
        # Phi, GPT-NeoX, gpt-oss, Gemma 2.
        AttentionShape(80, "bf16", group=1, rare=True),
        AttentionShape(96, "bf16", group=1, window=2047, rare=True),
        AttentionShape(64, "bf16", group=8, window=128, rare=True, of_heads=("sinks",)),
        AttentionShape(64, "fp16", group=1, rare=True),
        # Bloom, MPT.
        AttentionShape(128, "bf16", group=1, rare=True, of_heads=("slopes",)),
        AttentionShape(256, "bf16", group=2, rare=True),
        AttentionShape(256, "bf16", group=2, window=4096, softcap=50.0, rare=True),
        # Triton 3.6 spills some registers of its prefills, however they are tiled; 3.9 none.
        AttentionShape(256, "bf16", group=2, window=4096, softcap=50.0, cache="fp8e4nv", rare=True, may_spill=True),
        AttentionShape(16, "fp32", group=2, rare=True),
        AttentionShape(64, "fp32", group=4, window=100, rare=True),
        AttentionShape(128, "fp32", group=4, softcap=30.0, rare=True),
        # No model that is served in float32 on a GPU has such heads.
        AttentionShape(256, "fp32", group=4, window=100, softcap=30.0, rare=True, may_spill=True),
    ):
        # Few programs split their contexts and have deep loops; many do neither.
        yield from (shape.decode(split, few_stages=not split) for split in (False, True))
        if not shape.rare:
            yield shape.decode(split=True, few_stages=True, together=True)
        yield from (
            shape.prefill(rows, split, target)
            for rows, split in ((64, True), (8192, False))
            for target in shape.targets
        )
    yield from (_latent_decode(heads, split) for heads, split in ((16, True), (16, False), (128, True)))
    yield from (_latent_decode(128, split, chosen=True) for split in (True, False))
    yield from _indexer()
    yield _merge(512, decodes=True, rare=True)
    yield _merge(128, decodes=True, rare=False)
    yield from (_merge(dim, decodes, rare=True) for dim in (64, 80, 128, 256) for decodes in (False, True))


@dataclass(frozen=True)
class AttentionShape:
    dim: int
    kind: str
    group: int
    window: int | None = None
    softcap: float | None = None
    cache: str | None = None
    rare: bool = False
    may_spill: bool = False
    of_heads: tuple[str, ...] = ()
    """Of "sinks" and "slopes" those that it has."""

    @property
    def targets(self) -> tuple[int, ...]:
        if self.cache == "fp8e4nv":
            # Before 8.9 no GPU converts them.
            return (89, 90)
        return (80, 90, 120) if self.rare and self.kind == "bf16" else (80, 90)

    def decode(self, split: bool, few_stages: bool, together: bool = False) -> Launch:
        """`together`: the last program merges."""
        tile = decode_tile(self.dim, self.group, _bytes(self.cache or self.kind))
        return Launch(
            f"decode attention, split {split}{', merged' if together else ''}, {self}",
            decode_kernel,
            self._pointers("q", "out")
            | {"shares": "*fp32", "weights": "*fp32", "width": "i32", "splits": "i32", "scale": "fp32"}
            | ({"arrived": "*i32"} if together else {}),
            self._constants()
            | {"ROWS": tile.rows, "TILE": tile.tokens, "SPLIT": split}
            | ({} if together else {"arrived": None}),
            num_warps=MERGING_WARPS if together else tile.num_warps,
            num_stages=FEW_DECODE_STAGES if few_stages else tile.num_stages,
            targets=self.targets,
            must=frozenset({"mma"}) | self._wide(),
            # With few stages a loop waits for each tile, while an SM's other programs work.
            loads_ahead=not few_stages,
            rare=self.rare,
            may_spill=self.may_spill,
            reads_early=True,
        )

    def prefill(self, rows: int, split: bool, target: int) -> Launch:

        tile = prefill_tile(
            *(self.dim, rows, _bytes(self.kind), _bytes(self.cache or self.kind)),
            windowed=self.window is not None,
            generation=generation_of(target // 10),
            alibi="slopes" in self.of_heads,
        )
        hopper = target == 90
        return Launch(
            f"prefill attention, {rows} rows, split {split}, {self}",
            prefill_kernel,
            self._pointers("q", "out")
            | {
                "starts": "*i32",
                "shares": "*fp32",
                "weights": "*fp32",
                "width": "i32",
                "splits": "i32",
                "scale": "fp32",
            },
            self._constants()
            | {"SPLIT": split}
            | {"PACK": min(self.group, tile.rows), "ROWS": tile.rows, "TILE": tile.tokens},
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            targets=(target,),
            must=frozenset({"wgmma" if hopper and tile.rows >= 64 else "mma"}) | self._wide(),
            loads_ahead=hopper and self.kind != "fp32" and (self.dim <= 128 or self.cache is None) and tile.rows < 256,
            rare=self.rare,
            # On a 120 it must run; it is not tuned for that. Tiles of 256 rows are faster all the same, as measured.
            may_spill=self.may_spill or target == 120 or tile.rows == 256,
        )

    def _wide(self) -> frozenset[Instruction]:
        """The smallest heads' results are two numbers for each thread."""
        return frozenset({"cp.async16", "store16"} if self.dim > 16 else {"cp.async16"})

    def _pointers(self, *kind: str) -> dict[str, str]:
        cache = f"*{self.cache or self.kind}"
        pointers = {"k_cache": cache, "v_cache": cache, "tables": "*i32", "lengths": "*i32"}
        scales = {} if self.cache is None else {"k_scale": "*fp32", "v_scale": "*fp32"}
        return dict.fromkeys(kind, f"*{self.kind}") | pointers | scales | dict.fromkeys(self.of_heads, "*fp32")

    def _constants(self) -> dict[str, Any]:

        shape = {"HEADS": 8 * self.group, "KV_HEADS": 8, "DIM": self.dim, "PAD": padded(self.dim), "BLOCK": 16}
        scales = {"k_scale": None, "v_scale": None} if self.cache is None else {}
        none = {name: None for name in ("sinks", "slopes") if name not in self.of_heads}
        return shape | {"WINDOW": self.window, "SOFTCAP": self.softcap} | scales | none


def _latent_decode(heads: int, split: bool, chosen: bool = False) -> Launch:
    """DeepSeek-V2-Lite's, or V3's on one rank; V3.2's of what its indexer has chosen."""
    tile = latent_tile(2)
    pointers = dict.fromkeys(("q", "latents", "rotated", "out"), "*bf16")
    return Launch(
        f"latent decode, {heads} heads, split {split}{', of chosen tokens' if chosen else ''}",
        latent_decode_kernel,
        pointers
        | {"tables": "*i64" if chosen else "*i32", "lengths": "*i32", "shares": "*fp32", "weights": "*fp32"}
        | {"width": "i32", "splits": "i32", "scale": "fp32"},
        {"HEADS": heads, "BLOCK": 16, "RANK": 512, "RANK_PAD": 512, "ROPE": 64, "ROPE_PAD": 64}
        | {"ROWS": tile.rows, "TILE": tile.tokens, "SPLIT": split}
        | {"APART": 64 + INDEX_DIM if chosen else 64, "CHOSEN": chosen},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        must=frozenset({"mma", "cp.async16", "store16"}),
        rare=True,
    )


def _indexer() -> Iterator[Launch]:
    """DeepSeek-V3.2's, and GLM-5's with half as many heads."""
    for heads in (64, 32):
        yield Launch(
            f"scores of an indexer's {heads} heads",
            index_scores_kernel,
            {"q": "*bf16", "keys": "*bf16", "weights": "*fp32", "tables": "*i32", "positions": "*i32"}
            | {"scores": "*fp32", "width": "i32", "tokens": "i32"},
            {
                "HEADS": heads,
                "HEADS_PAD": heads,
                "DIM": INDEX_DIM,
                "DIM_PAD": INDEX_DIM,
                "BLOCK": 16,
                "KEY_STRIDE": 64 + INDEX_DIM,
            }
            | {"TILE": TOKENS_OF_TILE, "TILES": TILES_OF_PROGRAM},
            num_stages=SCORE_STAGES,
            must=frozenset({"cp.async16"}),
            rare=heads == 32,
        )
    yield Launch(
        "slots that an indexer chooses",
        chosen_slots_kernel,
        {"scores": "*fp32", "least": "*fp32", "tables": "*i32", "slots": "*i64"}
        | dict.fromkeys(("width", "tokens", "taken", "count"), "i32"),
        {"BLOCK": 16, "AT_ONCE": CHOSEN_AT_ONCE},
    )


def _merge(dim: int, decodes: bool, rare: bool) -> Launch:

    return Launch(
        f"merge of attention {dim}, decodes {decodes}",
        merge_kernel,
        {"shares": "*fp32", "weights": "*fp32", "out": "*bf16", "splits": "i32"}
        | ({"lengths": "*i32"} if decodes else {}),
        ({} if decodes else {"lengths": None})
        | {"DIM": dim, "PAD": merged_pad(dim), "TILE": 64, "WINDOW": None, "AT_ONCE": merged_at_once(dim)},
        must=frozenset({"load16"}),
        rare=rare,
    )


def _bytes(kind: str) -> int:
    return {"fp32": 4, "bf16": 2, "fp16": 2, "fp8e4nv": 1}[kind]
