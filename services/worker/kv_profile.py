"""Finds out what memory there is for keys and values: tries the largest batch, and captures the largest decodes."""

from __future__ import annotations

import gc

import torch
from msgspec.structs import replace

from services.worker.graphs.capture import CudaCapture
from services.worker.graphs.choice import DecodeGraphs, RankGraphs
from services.worker.graphs.measured_capture import MeasuredCapture, Seen
from services.worker.kv_memory import DeviceMemory
from services.worker.memory import free_bytes, own_bytes, peak_bytes, total_bytes
from services.worker.model.config import ModelError
from services.worker.rehearsal import rehearse
from services.worker.runner_parts import RunnerParts
from shared.blocks import blocks_for

_ROWS_ON_CPU = 512
"""A CPU takes a minute for the largest batch of a large model. Activations grow with the rows, so fewer will do."""
_BLOCKS_WHILE_CAPTURING = 2
"""Graphs of padding touch none."""


def profile(parts: RunnerParts, *, max_batch_tokens: int, graphs: RankGraphs) -> DeviceMemory:
    """Once weights are loaded. Raises ModelError where the largest batch does not fit."""
    device, cuda = parts.device, parts.device.type == "cuda"
    rows = max_batch_tokens if cuda else min(max_batch_tokens, _ROWS_ON_CPU)
    try:
        step = _of_step(parts, rows)
        captured = sum(_of_graphs(each) for each in graphs if each is not None)
    except torch.OutOfMemoryError:
        raise ModelError(
            f"a step of {max_batch_tokens} tokens and {parts.max_num_seqs} sequences does not fit beside the weights: "
            "lower max_batch_tokens or max_num_seqs, or use more ranks"
        ) from None
    free = _settled(device)
    return DeviceMemory(
        kind="gpu" if cuda else "cpu",
        total=total_bytes(device),
        free=free,
        held=own_bytes(device),
        activations=step * -(-max_batch_tokens // rows) + parts.token_bytes,
        graphs=captured,
    )


def _of_step(parts: RunnerParts, rows: int) -> int:
    """Bytes that a step of so many rows takes beside weights and KV memory."""
    length = parts.card.max_model_len
    probe = parts.runner(blocks_for(min(rows, length)) + 1, length)
    return peak_bytes(parts.device, lambda: rehearse(probe, rows=rows, sequences=parts.max_num_seqs))


def _of_graphs(graphs: DecodeGraphs) -> int:
    """Bytes."""
    device = graphs.device
    caches = graphs.decoder.allocate_kv(_BLOCKS_WHILE_CAPTURING)
    capture = MeasuredCapture(CudaCapture(device), lambda: Seen(_settled(device), own_bytes(device)))
    with torch.inference_mode():
        replace(graphs, sizes=graphs.sizes[-2:]).replaying(capture)(graphs.decoder.forward, caches)
    return capture.of_all(len(graphs.sizes))


def _settled(device: torch.device) -> int:
    """Free bytes once everything that nobody holds is given back."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    return free_bytes(device)
