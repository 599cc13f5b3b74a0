"""`baton bench` on a whole stack with a simulated engine: what it says of the prefix cache is what the engine did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.stack import RunningStack, running_stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("bench")
    with running_stack(folder, device="sim", settings=["worker.sim_step_ms=1"], more=["--kvstore-memory=0"]) as stack:
        yield stack


def bench(stack: RunningStack, *argv: str) -> dict[str, Any]:
    done = stack.baton("bench", *argv, "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_whole_blocks_of_a_shared_prefix_are_cached_but_for_the_first_question(stack: RunningStack) -> None:
    sizes = ("--num-prefixes", "3", "--prefix-questions", "4", "--prefix-len", "70", "--suffix-len", "30")
    load = ("--output-len", "2", "--warmup", "0", "--max-concurrency", "1", "--detailed")
    result = bench(stack, "serve", "--dataset", "shared-prefix", *sizes, *load)
    assert sorted(result["cached_tokens"]) == [*[0] * 3, *[64] * 9]
    assert result["cache_hit_rate"] == pytest.approx(9 * 64 / 1200)
    assert (result["cached_requests"], result["uncached_requests"]) == (9, 3)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_later_turns_find_what_was_said_before_cached(stack: RunningStack, endpoint: str) -> None:
    sizes = ("--num-conversations", "3", "--num-turns", "3", "--user-len", "60", "--output-len", "24", "--ignore-eos")
    result = bench(stack, "serve", "--dataset", "multi-turn", "--endpoint", endpoint, *sizes, "--warmup", "0")
    first, second, third = result["turns"]
    assert (first["completed"], second["completed"], third["completed"]) == (3, 3, 3)
    assert first["cache_hit_rate"] < 0.3 < second["cache_hit_rate"] < third["cache_hit_rate"]
    assert third["mean_input_tokens"] > second["mean_input_tokens"] > first["mean_input_tokens"] >= 60


def test_interference_is_measured_on_a_stack_of_ours(stack: RunningStack) -> None:
    load = ("--streams", "2", "--stream-output-len", "40", "--quiet", "1.5", "--duration", "0.5", "--long-rate", "10")
    result = bench(stack, "interference", *load, "--long-input-len", "200")
    assert result["failed"] == 0
    assert result["long_prompts"] >= 1
    assert min(result["quiet"]["tokens"], result["disturbed"]["tokens"]) > 0


def test_a_file_is_measured_without_a_stack(tmp_path: Path, stack: RunningStack) -> None:
    (tmp_path / "prompts.txt").write_text("the same prompt, twice\n" * 2)
    result = bench(stack, "prefixes", str(tmp_path / "prompts.txt"))
    assert (result["prompts"], result["ideal_hit_rate"]) == (2, 0.5)
