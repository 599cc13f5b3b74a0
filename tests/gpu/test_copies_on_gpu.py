"""Blocks copied on a thread and a stream of their own while steps are launched ahead: neither spoils the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from services.worker.executor.device_runner import DeviceRunner
from services.worker.executor.torch_backend import create_backend
from services.worker.kv.transfers import Transfers
from tests.integration.worker.test_launching_runner import prompt
from tests.support.kv.ranks import make_arena, transfer
from tests.support.models.tiny_models import make_model
from tests.support.worker.launched_rank import DriverAhead
from tests.support.worker.tiny_backend import tiny_settings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

OUTPUT = 120
COPIED = 8


@contextmanager
def copied_again_and_again(transfers: Transfers, blocks: list[int]) -> Iterator[list[str]]:
    """The first half of `blocks` to an arena, and from there to the other; what came of each transfer."""
    half = len(blocks) // 2
    outcomes: list[str] = []
    stop = threading.Event()

    def copy() -> None:
        while not stop.is_set() or len(outcomes) < 2:
            outcomes.append(transfers.run(transfer("save", blocks[:half], range(half)), lambda: False))
            outcomes.append(transfers.run(transfer("load", blocks[half:], range(half)), lambda: False))
        transfers.close()

    thread = threading.Thread(target=copy)
    thread.start()
    yield outcomes
    stop.set()
    thread.join()


def test_steps_and_copies_leave_each_other_alone(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path)
    runner = create_backend(tiny_settings(tmp_path, device="cuda:0", dtype="float32", ops="auto"))
    assert isinstance(runner, DeviceRunner)
    driver = DriverAhead(runner, budget=60)
    mine = [driver._free.pop() for _ in range(COPIED)]
    caches = [cache for halves in runner.rank.caches for cache in halves]
    with torch.inference_mode():
        for cache in caches:
            cache[mine] = torch.randn_like(cache[mine])
    torch.cuda.synchronize()
    make_arena(tmp_path, runner.kv.layout)
    prompts = [prompt(length, length) for length in (1, 15, 16, 17, 40, 90)]
    sequences = [driver.add(tokens, OUTPUT) for tokens in prompts]
    with copied_again_and_again(Transfers(runner.kv, tmp_path), mine) as outcomes:
        driver.run()
    assert set(outcomes) == {"done"}
    assert [sequence.output for sequence in sequences] == [model.greedy(tokens, OUTPUT) for tokens in prompts]
    saved, loaded = mine[: COPIED // 2], mine[COPIED // 2 :]
    assert all(torch.equal(cache[loaded], cache[saved]) for cache in caches)
