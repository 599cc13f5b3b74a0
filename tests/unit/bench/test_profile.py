"""`bench profile`: which points an engine holds, and what lies between tokens that are decoded together."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from msgspec.structs import replace

from services.bench.errors import BenchError
from services.bench.profile import EngineView, decode_table, grid_of, profile_options, serving_engine, shared_itl
from services.bench.statistics import RequestOutcome
from shared.ids import EngineId, InstanceId
from shared.messages.lifecycle import WorkerReport
from shared.models.profile_file import DecodePoint
from tests.support.engines.coordinator_events import card, engine
from tests.unit.planner.core.test_fleet_watch import life


def view(max_model_len: int = 4096, max_running: int = 24, blocks: int = 1000) -> EngineView:
    report = engine("engine-1").engine
    assert report is not None
    model = replace(card(), max_model_len=max_model_len)
    worker = WorkerReport(
        engine=EngineId("engine-1"), rank=0, world_size=1, model=model, num_blocks=blocks, device="sim"
    )
    held = replace(report, model=model, max_running=max_running, blocks_total=blocks)
    return EngineView(InstanceId("engine-1"), held, worker)


def options(*argv: str) -> argparse.Namespace:
    return profile_options(argv)


def test_by_default_it_measures_what_the_engine_holds_up_to_its_limits() -> None:
    grid = grid_of(view(), options())
    assert grid.prompts == (16, 128, 512, 1024, 2048, 4095)
    assert {batch for batch, _ in grid.decode} == {1, 4, 16, 24}
    assert {context for batch, context in grid.decode if batch == 1} == {128, 512, 2048, 4064}
    assert max(context for batch, context in grid.decode if batch == 24) == 512, "16,000 tokens are all that it holds"


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("--prompt-lengths", "16,5000"), "--prompt-lengths 16,5000: from 1 to 4095 is possible"),
        (("--batch-sizes", "1,25"), "--batch-sizes 1,25: from 1 to 24 is possible"),
        (("--context-lengths", "20,64"), "--context-lengths 20,64: from 33 to 4064 is possible"),
    ],
)
def test_points_that_it_does_not_hold_are_refused(argv: tuple[str, str], complaint: str) -> None:
    with pytest.raises(BenchError, match=complaint):
        grid_of(view(), options(*argv))


def test_an_engine_that_holds_next_to_nothing_is_refused() -> None:
    with pytest.raises(BenchError, match=r"--prompt-lengths: of .* two are needed"):
        grid_of(view(max_model_len=8), options("--output-len", "2"))
    with pytest.raises(BenchError, match="does not hold batches of"):
        grid_of(view(blocks=40), options("--batch-sizes", "1,24", "--context-lengths", "64,128"))


def test_one_idle_engine_must_serve() -> None:
    ready = engine("engine-1", waiting=0)
    worker = life("worker", "engine-1-rank0", worker=view().worker)
    assert serving_engine([ready, worker]).instance == "engine-1"
    for lives, complaint in (
        ([worker], "there is none"),
        ([ready, engine("engine-2"), worker], "there is engine-1, engine-2"),
        ([engine("engine-1", role="prefill"), worker], "engine-1 only computes prompts"),
        ([engine("engine-1", waiting=2), worker], "engine-1 has 2 requests"),
        ([ready], "its worker is not heard"),
    ):
        with pytest.raises(BenchError, match=complaint):
            serving_engine(lives)


@pytest.mark.parametrize("argv", [("--batch-sizes", "4"), ("--batch-sizes", "4,1"), ("--prompt-lengths", "a,b")])
def test_bad_flags_are_named(argv: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options(*argv)
    assert ended.value.code == 2
    assert f"{argv[1]!r}: two or more rising numbers is expected" in capsys.readouterr().err


def stream(begin: float, pause: float, frames: int, tokens_each: int = 1) -> RequestOutcome:
    times = [begin + pause * number for number in range(frames)]
    return RequestOutcome(0.0, times[-1], 8, frames * tokens_each, times)


def test_only_tokens_count_while_all_are_decoding() -> None:
    slow_start = stream(0.0, 0.5, 3)
    first = slow_start._replace(token_times=[0.0, 0.5, 1.0, *stream(1.5, 0.1, 20).token_times], output_tokens=23)
    assert shared_itl([first, stream(1.5, 0.1, 20)]) == pytest.approx(0.1)
    assert shared_itl([stream(0.0, 0.1, 20), stream(1.5, 0.1, 20)]) is None, "they met for six tokens"


def test_where_a_step_yields_several_tokens_each_took_a_share_of_it() -> None:
    assert shared_itl([stream(0.0, 0.1, 20, tokens_each=2)]) == pytest.approx(0.05)


def test_the_table_shows_what_was_not_measured() -> None:
    points: list[Any] = [
        DecodePoint(batch_size=batch, context_tokens=context, itl_seconds=0.01)
        for batch, context in ((1, 128), (1, 512), (8, 128))
    ]
    assert decode_table(points).lines()[-1].split() == ["|", "8", "|", "10.00", "|", "-", "|"]
