"""What `bench roofline` and `bench kernels` make of their flags and of what was found."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from deploy.bench.character_plot import Point, Range, Roof, drawn, ranges, short
from deploy.bench.kernels import Kernels
from deploy.bench.kernels import cells as kernel_cells
from deploy.bench.kernels import described as kernels_described
from deploy.bench.measuring import of_each_rank
from deploy.bench.roofline import Steps, cells, described, points_of, roof_of
from deploy.bench.roofline_options import FAMILIES, parsed_kernels, parsed_roofline
from deploy.bench.roofline_plot import plot_roofline
from deploy.cli.errors import CommandError
from deploy.cli.stack_spec import DEMO_MODEL
from services.worker.roofline import kernels
from services.worker.roofline.findings import (
    Asked,
    Ceilings,
    KernelMeasured,
    ModelReady,
    Started,
    StepCase,
    StepMeasured,
    StepSkipped,
    Timed,
    Work,
)
from services.worker.roofline.stopwatch import Stopwatch

CEILINGS = Ceilings({"copy": 100.0, "read": 80.0}, {"matmul": 1000.0})


def step(kind: str = "decode", *, moved: float = 1000.0, flops: float = 500.0, seconds: float = 20.0) -> StepMeasured:
    return StepMeasured(
        case=StepCase(kind, 4, 1024),
        weight_bytes=moved * 0.7,
        kv_read_bytes=moved * 0.2,
        kv_written_bytes=moved * 0.1,
        flops=flops,
        forward=Timed(seconds, seconds / 2, 3),
        whole=Timed(seconds * 2, seconds, 3),
    )


def test_the_share_is_of_whichever_limit_binds() -> None:
    memory = Work(1000.0, 500.0)
    assert CEILINGS.bound(memory) == "memory"
    assert CEILINGS.seconds(memory) == 10.0
    assert CEILINGS.share(memory, 20.0) == 0.5
    compute = Work(10.0, 5000.0)
    assert CEILINGS.bound(compute) == "compute"
    assert CEILINGS.share(compute, 20.0) == 0.25
    assert compute.intensity == 500.0
    assert Work(0.0, 1.0).intensity == 0.0


def test_the_best_way_to_a_limit_is_the_limit() -> None:
    assert (CEILINGS.memory, CEILINGS.compute) == (100.0, 1000.0)
    assert roof_of(CEILINGS).ridge == 10.0


def test_of_two_measurements_of_a_limit_the_better_one_counts() -> None:
    both = CEILINGS.best_of(Ceilings({"copy": 90.0, "read": 120.0}, {"matmul": 900.0}))
    assert both == Ceilings({"copy": 100.0, "read": 120.0}, {"matmul": 1000.0})


def test_a_step_in_a_table() -> None:
    assert cells(step(), CEILINGS) == [
        "decode 4 × 1k",
        "20,000.00",
        "40,000.00",
        "1k",
        "500",
        "0.5",
        "50",
        "25",
        "50% memory",
    ]


def test_a_kernel_in_a_table() -> None:
    kernel = KernelMeasured(
        family="norms", case="4 rows", work=Work(50.0, 0.0), ours=Timed(1.0, 1.0, 2), rival=Timed(3.0, 2.0, 2)
    )
    assert kernel_cells(kernel, CEILINGS) == [
        "norms",
        "4 rows",
        "1,000,000.0",
        "50",
        "-",
        "50% memory",
        "3,000,000.0",
        "3.00",
    ]


def test_json_has_everything_that_was_found() -> None:
    found = Steps()
    found.take(Started(device="CPU", model="m", dtype="float32", threads=2))
    found.take(CEILINGS)
    found.take(ModelReady(ops="torch", weight_bytes=1, seconds=0.1, kv_blocks=2, kv_block_bytes=3, eager="no GPU"))
    found.take(step())
    found.take(StepSkipped(StepCase("decode", 512, 32768), "too large"))
    read = json.loads(msgspec.json.encode(described(found)))
    assert read["ceilings"]["memory_rates"] == {"copy": 100.0, "read": 80.0}
    assert read["skipped"] == [{"kind": "decode", "batch": 512, "context": 32768, "reason": "too large"}]
    one = read["steps"][0]
    assert (one["kind"], one["batch"], one["context"], one["runs"]) == ("decode", 4, 1024, 3)
    assert (one["seconds"], one["best_seconds"], one["whole_seconds"]) == (20.0, 10.0, 40.0)
    assert (one["bytes"], one["intensity"], one["bound"], one["share"]) == (1000.0, 0.5, "memory", 0.5)
    assert one["share_of_copy"] == 0.5
    with pytest.raises(AssertionError):
        found.take(KernelMeasured(family="x", case="y", work=Work(1, 1), ours=Timed(1, 1, 1)))


def test_json_of_kernels() -> None:
    found = Kernels()
    found.take(CEILINGS)
    found.take(KernelMeasured(family="x", case="y", work=Work(100.0, 10.0), ours=Timed(2.0, 1.0, 1)))
    one = kernels_described(found)["kernels"][0]
    assert (one["family"], one["bytes_per_second"], one["share"], one["torch_seconds"]) == ("x", 50.0, 0.5, None)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.123"),
        (1.0, "1"),
        (999.4, "999"),
        (999.9, "1k"),
        (1234.0, "1.23k"),
        (4.8e12, "4.8T"),
        (2e18, "2000P"),
    ],
)
def test_numbers_have_three_digits_and_a_prefix(value: float, text: str) -> None:
    assert short(value) == text


def test_a_range_has_its_ends_in_its_first_and_last_cell() -> None:
    across = Range(1.0, 100.0)
    assert [across.place(value, 21) for value in (0.1, 1.0, 10.0, 100.0, 1e9)] == [0, 0, 10, 20, 20]
    assert across.value(10, 21) == pytest.approx(10.0)


def test_the_plot_of_characters_shows_roof_points_and_what_they_are() -> None:
    roof = Roof(memory=1e9, compute=1e12)
    points = [Point(1.0, 5e8, "decode 1 × 1k"), Point(500.0, 1e11, "prefill 1 × 2k"), Point(500.0, 1e11, "again")]
    lines = drawn(roof, points, width=40, height=12).splitlines()
    plot = [line.split("|", 1)[1] for line in lines if "|" in line]
    assert len(plot) == 12
    assert all(len(line) == 40 for line in plot)
    across, up = ranges(roof, points)
    assert plot[11 - up.place(5e8, 12)][across.place(1.0, 40)] == "a"
    assert plot[11 - up.place(1e11, 12)][across.place(500.0, 40)] == "*"
    flat = plot[11 - up.place(1e12, 12)]
    assert flat.rstrip().endswith("-")
    assert "/" in "".join(plot)
    assert "a decode 1 × 1k" in "\n".join(lines)
    assert "b prefill 1 × 2k" in "\n".join(lines)


def test_more_points_than_letters_are_drawn_all_the_same() -> None:
    points = [Point(1.0 + number, 1e8 * (1 + number), str(number)) for number in range(80)]
    assert "+ 79" in drawn(Roof(1e9, 1e12), points)
    assert drawn(Roof(1e9, 1e12), [])


def test_the_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "made" / "roofline.png"
    plot_roofline(path, "m", roof_of(CEILINGS), points_of([step(), step("prefill", flops=50_000.0)]))
    assert path.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match="--plot"):
        plot_roofline(tmp_path / "file" / "x.png", "m", roof_of(CEILINGS), [])


def test_flags_become_a_question() -> None:
    asked, shown = parsed_roofline(
        ["--shape", "qwen3-0.6b", "--batch", "1,16", "--context", "none", "--seconds", "5", "--json", "--tp", "2"]
    )
    assert (asked.name, asked.shape, asked.model) == ("qwen3-0.6b", "qwen3-0.6b", None)
    assert (asked.batches, asked.contexts, asked.prefills, asked.tp) == ((1, 16), (), None, 2)
    assert shown.as_json
    asked, _ = parsed_roofline([])
    assert (asked.name, asked.shape, asked.model) == ("demo", None, str(DEMO_MODEL))
    chosen, _ = parsed_kernels(["--only", "norms,linears", "--cpu-time"])
    assert (chosen.only, chosen.shape, chosen.model, chosen.cpu_time) == (("norms", "linears"), None, None, True)
    assert msgspec.json.decode(msgspec.json.encode(asked), type=Asked) == asked


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--batch", "1,x"], "'x': a whole number from 1"),
        (["--batch", "0"], "'0': a whole number from 1"),
        (["--context", "-1"], "expected"),
        (["--prefill", "99999999999"], "a whole number from 1"),
        (["--seconds", "0"], "seconds above 0"),
        (["--seconds", "nan"], "seconds above 0"),
        (["--tp", "0"], "a whole number from 1"),
        (["--shape", "gpt-5"], "llama-3.1-8b"),
        (["--shape", "demo", "--model", "x"], "not allowed with"),
        (["--dtype", "int4"], "bfloat16"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_a_wrong_flag_is_named_with_what_is_allowed(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed_roofline(flags)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_what_cannot_be_found_or_drawn_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"config\.json"):
        parsed_roofline(["--model", str(tmp_path)])
    with pytest.raises(CommandError, match=r"\.png"):
        parsed_roofline(["--plot", "roofline.txt"])
    with pytest.raises(SystemExit):
        parsed_kernels(["--only", "norms,cooking"])


def test_each_family_that_can_be_named_can_be_measured() -> None:
    assert set(FAMILIES) == set(kernels.FAMILIES)


def test_every_rank_is_asked_the_same_and_knows_where_they_meet() -> None:
    asked, _ = parsed_roofline(["--tp", "3"])
    ranks = of_each_rank(asked)
    assert [each.rank for each in ranks] == [0, 1, 2]
    assert len({each.rendezvous for each in ranks}) == 1
    assert ranks[0].rendezvous is not None
    assert of_each_rank(parsed_roofline([])[0]) == [parsed_roofline([])[0]]


def test_a_stopwatch_runs_work_as_often_as_there_is_time_and_ranks_agree_on() -> None:
    calls: list[None] = []
    cpu = torch.device("cpu")
    once = Stopwatch(cpu).timed(lambda: calls.append(None), 0.0)
    assert (once.runs, len(calls)) == (1, 2), "one run before it does not count"
    calls.clear()
    often = Stopwatch(cpu, cpu_time=True).timed(lambda: calls.append(None), 3600.0)
    assert (often.runs, len(calls)) == (50, 51)
    agreed = Stopwatch(cpu, lambda wish: min(wish, 7)).timed(lambda: calls.append(None), 3600.0)
    assert agreed.runs == 7
    assert agreed.best <= agreed.median
