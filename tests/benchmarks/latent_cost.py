"""What attention over latents costs a decode step beside attention over the keys and values that are made of them.

    python -m tests.benchmarks.latent_cost

One layer of DeepSeek-V2-Lite's shape in bf16, native operations on one thread, by turns in one process: processor time
of the absorbed products and attention over latents, and of attention over all heads' keys and values, whose values are
padded to the size of keys as `--model-impl transformers` keeps them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from services.worker.ops.interface import LatentCache
from tests.support.worker.native_batches import Rows, meta_of, native, random, scattered_blocks

HEADS, NOPE, ROPE, VALUE, RANK = 16, 128, 64, 128, 512
BATCHES = (1, 16)
CONTEXTS = (1024, 4096)
TURNS = 7


def main() -> None:
    """Prints a line for each batch and context: milliseconds of a layer, and MiB of its cache."""
    ops = native(torch.bfloat16, threads=1)
    latents = ops.latents
    keys_up = latents.pack_heads(random(HEADS, RANK, NOPE).bfloat16())
    values_up = latents.pack_heads(random(HEADS, VALUE, RANK).bfloat16())
    for batch in BATCHES:
        for context in CONTEXTS:
            blocks = scattered_blocks([context] * batch)
            meta = meta_of([Rows(1, context, each) for each in blocks])
            count = batch * context // 16 + 1
            cache = LatentCache(*latents.allocate(count, RANK, ROPE))
            keys, values = ops.allocate_kv(count, HEADS, NOPE + ROPE)
            for each in (*cache, keys, values):
                each.fill_(0.01)
            q = random(batch, HEADS, NOPE + ROPE)

            def absorbed(q: torch.Tensor = q, cache: LatentCache = cache, meta: object = meta) -> None:
                nope = latents.linear_of_heads(q[:, :, :NOPE].contiguous(), keys_up)
                whole = torch.cat((nope, q[:, :, NOPE:]), dim=2)
                mixed = latents.attention(whole, cache, meta, scale=0.07)  # type: ignore[arg-type]
                latents.linear_of_heads(mixed, values_up)

            def decompressed(
                q: torch.Tensor = q, keys: torch.Tensor = keys, values: torch.Tensor = values, meta: object = meta
            ) -> None:
                ops.paged_attention(q, keys, values, meta, scale=0.07, window=None, softcap=None)  # type: ignore[arg-type]

            one, other = by_turns(absorbed, decompressed)
            sizes = [sum(each.nbytes for each in pair) / (1 << 20) for pair in (cache, (keys, values))]
            print(
                f"{batch} × {context}: latents {one:.2f} ms, {sizes[0]:.1f} MiB; "
                f"keys and values {other:.2f} ms, {sizes[1]:.1f} MiB",
                flush=True,
            )


def by_turns(*calls: Callable[[], None]) -> list[float]:
    """The median of each one's milliseconds of processor time."""
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in range(TURNS + 1):
        for call, found in zip(calls, seconds, strict=True):
            begun = time.process_time()
            call()
            if turn:
                found.append(time.process_time() - begun)
    return [1e3 * median(found) for found in seconds]


if __name__ == "__main__":
    main()
