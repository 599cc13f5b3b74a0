"""What `bench roofline` and `bench kernels` make of their flags and of what was found."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path

import msgspec
import pytest
import torch

from deploy.cli.bench import with_model
from deploy.errors import CommandError
from deploy.model_choice import DEMO_MODEL
from services.bench.device import measurement
from services.bench.device.character_plot import LogAxis, Point, Roof, character_plot, ranges, short
from services.bench.device.kernels import cells as kernel_cells
from services.bench.device.kernels import described as kernels_described
from services.bench.device.measurement import Findings, requests_of_ranks
from services.bench.device.options import FAMILIES, kernels_options, roofline_options
from services.bench.device.roofline import cells, described, plot_roofline, points_of, roof_of
from services.bench.errors import BenchError
from services.worker.measure.roofline import kernels
from services.worker.measure.roofline.ceilings import Stopwatch
from services.worker.measure.roofline.wire import (
    Ceilings,
    KernelMeasured,
    KernelWork,
    MeasureRequest,
    MeasureStarted,
    ModelReady,
    StepCase,
    StepMeasured,
    StepSkipped,
    StepsRequest,
    Timing,
)

CEILINGS = Ceilings({"copy": 100.0, "read": 80.0}, {"matmul": 1000.0})


def step(kind: str = "decode", *, moved: float = 1000.0, flops: float = 500.0, seconds: float = 20.0) -> StepMeasured:
    return StepMeasured(
        case=StepCase(kind, 4, 1024),
        weight_bytes=moved * 0.7,
        kv_read_bytes=moved * 0.2,
        kv_written_bytes=moved * 0.1,
        flops=flops,
        forward=Timing(seconds, seconds / 2, 3),
        whole=Timing(seconds * 2, seconds, 3),
    )


def test_the_share_is_of_whichever_limit_binds() -> None:
    memory = KernelWork(1000.0, 500.0)
    assert CEILINGS.bound(memory) == "memory"
    assert CEILINGS.seconds(memory) == 10.0
    assert CEILINGS.share(memory, 20.0) == 0.5
    compute = KernelWork(10.0, 5000.0)
    assert CEILINGS.bound(compute) == "compute"
    assert CEILINGS.share(compute, 20.0) == 0.25
    assert compute.intensity == 500.0
    assert KernelWork(0.0, 1.0).intensity == 0.0


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
        family="norms", case="4 rows", work=KernelWork(50.0, 0.0), ours=Timing(1.0, 1.0, 2), rival=Timing(3.0, 2.0, 2)
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
    found = Findings()
    found.record(MeasureStarted(device="CPU", model="m", dtype="float32", threads=2))
    found.record(CEILINGS)
    found.record(ModelReady(ops="torch", weight_bytes=1, seconds=0.1, kv_blocks=2, kv_block_bytes=3, eager="no GPU"))
    found.record(step())
    found.record(StepSkipped(StepCase("decode", 512, 32768), "too large"))
    read = json.loads(msgspec.json.encode(described(found)))
    assert read["ceilings"]["memory_rates"] == {"copy": 100.0, "read": 80.0}
    assert read["skipped"] == [{"kind": "decode", "batch": 512, "context": 32768, "reason": "too large"}]
    one = read["steps"][0]
    assert (one["kind"], one["batch"], one["context"], one["runs"]) == ("decode", 4, 1024, 3)
    assert (one["seconds"], one["best_seconds"], one["whole_seconds"]) == (20.0, 10.0, 40.0)
    assert (one["bytes"], one["intensity"], one["bound"], one["share"]) == (1000.0, 0.5, "memory", 0.5)
    assert one["share_of_copy"] == 0.5


def test_json_of_kernels() -> None:
    found = Findings()
    found.record(CEILINGS)
    found.record(KernelMeasured(family="x", case="y", work=KernelWork(100.0, 10.0), ours=Timing(2.0, 1.0, 1)))
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
    across = LogAxis(1.0, 100.0)
    assert [across.place(value, 21) for value in (0.1, 1.0, 10.0, 100.0, 1e9)] == [0, 0, 10, 20, 20]
    assert across.value(10, 21) == pytest.approx(10.0)


def test_the_plot_of_characters_shows_roof_points_and_what_they_are() -> None:
    roof = Roof(memory=1e9, compute=1e12)
    points = [Point(1.0, 5e8, "decode 1 × 1k"), Point(500.0, 1e11, "prefill 1 × 2k"), Point(500.0, 1e11, "again")]
    lines = character_plot(roof, points, width=40, height=12).splitlines()
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
    assert "+ 79" in character_plot(Roof(1e9, 1e12), points)
    assert character_plot(Roof(1e9, 1e12), [])


def test_the_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "made" / "roofline.png"
    plot_roofline(path, "m", roof_of(CEILINGS), points_of([step(), step("prefill", flops=50_000.0)]))
    assert path.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="--plot"):
        plot_roofline(tmp_path / "file" / "x.png", "m", roof_of(CEILINGS), [])


MODEL = ("--model", str(DEMO_MODEL), "--model-name", "demo")


def test_flags_become_a_question(tmp_path: Path) -> None:
    flags = ["--shape", "qwen3-0.6b", "--batch", "1,16", "--context", "none", "--seconds", "5", "--json", "--tp", "2"]
    asked, output, plot = roofline_options(flags)
    assert (asked.name, asked.shape, asked.model) == ("qwen3-0.6b", "qwen3-0.6b", None)
    assert (asked.batches, asked.contexts, asked.prefills, asked.tp) == ((1, 16), (), None, 2)
    assert (output.json, plot) == (True, None)
    assert output.command == "baton bench roofline " + " ".join(flags)
    asked, _, _ = roofline_options(MODEL)
    assert (asked.name, asked.shape, asked.model) == ("demo", None, str(DEMO_MODEL))
    chosen, _ = kernels_options(["--only", "norms,linears", "--cpu-time"])
    assert (chosen.only, chosen.shape, chosen.model, chosen.cpu_time) == (("norms", "linears"), None, None, True)
    assert msgspec.json.decode(msgspec.json.encode(asked), type=MeasureRequest) == asked


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["roofline"], ["roofline", f"--model={DEMO_MODEL}", "--model-name=demo"]),
        (["roofline", "--shape=demo", "--tp=2"], ["roofline", "--tp=2", f"--model={DEMO_MODEL}", "--model-name=demo"]),
        (["roofline", "--shape", "qwen3-0.6b"], ["roofline", "--shape=qwen3-0.6b"]),
        (["kernels", "--json"], ["kernels", "--json"]),
        (["kernels", "--model", str(DEMO_MODEL)], ["kernels", f"--model={DEMO_MODEL}", f"--model-name={DEMO_MODEL}"]),
    ],
)
def test_the_command_knows_the_demo_model(typed: list[str], told: list[str], tmp_path: Path) -> None:
    assert with_model(typed, tmp_path) == told


def test_an_engine_is_told_where_a_nats_server_is_and_the_model_of_a_shape(tmp_path: Path) -> None:
    told = with_model(["idle", "--model", "qwen3-0.6b", "--load-format=dummy"], tmp_path)
    folder = Path(next(each.removeprefix("--model=") for each in told if each.startswith("--model=")))
    assert folder.is_relative_to(tmp_path)
    assert (folder / "tokenizer.json").is_file()
    assert "--model-name=qwen3-0.6b" in told
    assert any(each.startswith("--nats-server=") for each in told)
    assert f"--prompts={DEMO_MODEL.with_name('prompts.jsonl')}" in with_model(["speculation"], tmp_path)
    assert f"--text={DEMO_MODEL.with_name('held_out.jsonl')}" in with_model(["perplexity"], tmp_path)
    assert "--text=own.txt" in with_model(["perplexity", "--text=own.txt"], tmp_path)


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
        roofline_options(flags)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_what_cannot_be_found_or_drawn_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"config\.json"):
        with_model(["roofline", "--model", str(tmp_path)], tmp_path)
    for nothing in (["--model", str(tmp_path)], ["--shape", "demo"], []):
        with pytest.raises(SystemExit):
            roofline_options(nothing)
    with pytest.raises(BenchError, match=r"\.png"):
        roofline_options(["--plot", "roofline.txt"])
    with pytest.raises(SystemExit):
        kernels_options(["--only", "norms,cooking"])


def test_each_family_that_can_be_named_can_be_measured() -> None:
    assert set(FAMILIES) == set(kernels.FAMILIES)


def test_every_rank_is_asked_the_same_and_knows_where_they_meet(tmp_path: Path) -> None:
    asked, _, _ = roofline_options([*MODEL, "--tp", "3"])
    ranks = requests_of_ranks(asked, tmp_path)
    assert [each.rank for each in ranks] == [0, 1, 2]
    assert len({each.rendezvous for each in ranks}) == 1
    assert ranks[0].rendezvous is not None
    assert ranks[0].rendezvous.startswith(f"file://{tmp_path}/")
    assert requests_of_ranks(roofline_options(MODEL)[0], tmp_path) == [roofline_options(MODEL)[0]]


def test_nothing_is_left_where_ranks_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[Path] = []

    def started(processes: contextlib.ExitStack, request: MeasureRequest) -> subprocess.Popen[bytes]:
        assert isinstance(request, StepsRequest)
        met.append(Path((request.rendezvous or "").removeprefix("file://")))
        met[-1].write_text("a rank's address")
        return processes.enter_context(subprocess.Popen(["true"], stdout=subprocess.PIPE))

    monkeypatch.setattr(measurement, "_started", started)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert list(measurement.findings(roofline_options([*MODEL, "--tp", "2"])[0])) == []
    assert met[0] == met[1]
    assert list(tmp_path.iterdir()) == []


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
