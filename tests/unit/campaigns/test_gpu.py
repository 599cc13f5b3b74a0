"""The campaign on a GPU: nothing hangs or is left behind, what is wrong is said, and aims are read off right."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import msgspec
import psutil
import pytest

from tests.campaigns import gpu as command
from tests.campaigns import running
from tests.campaigns.aims import Row, rows
from tests.campaigns.report import told_of_captures
from tests.campaigns.stages import Run, Stage, StageName, stages
from tests.support.paths import REPOSITORY

SLEEPER = "import time; time.sleep(600)"
LEAVES_A_SESSION = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True)
print(child.pid, flush=True)
"""
WAITS = f"{LEAVES_A_SESSION}\nchild.wait()"
WRITES = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Any:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def in_a_process(program: str, *arguments: str) -> str:
    """As the campaign adopts whoever is left behind, it is given a process of its own here."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.stdout + done.stderr


RUNS_ONE = """
import sys
from pathlib import Path
from tests.campaigns import running
running.PATIENCE = 1.0
running.adopt_orphans()
ended = running.run(["-c", sys.argv[1]], float(sys.argv[2]), Path(sys.argv[3]))
print(ended.status, ended.said)
"""


def child_told_in(log: Path) -> int:
    return int(log.read_text().split()[0])


def test_what_a_run_leaves_behind_in_a_session_of_its_own_is_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert in_a_process(RUNS_ONE, LEAVES_A_SESSION, "60", str(log)).startswith("0 None")
    assert not psutil.pid_exists(child_told_in(log))


@pytest.mark.slow
def test_a_run_that_does_not_end_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert in_a_process(RUNS_ONE, WAITS, "3", str(log)).startswith("None stopped: not over after")
    assert not psutil.pid_exists(child_told_in(log))


def made_up_stages(size: str, folder: Path) -> tuple[Stage, ...]:
    def run(name: str, *arguments: str) -> Run:
        return Run(name, ("-c", *arguments))

    tests = '<testsuite tests="5" failures="1" errors="0" skipped="2"/>'
    return (
        Stage("tests", (run("tests", WRITES, str(folder / "tests.xml"), tests),), 60),
        Stage("roofline", (run("roofline-x", "raise SystemExit(3)"),), 60),
        Stage("kernels", (run("kernels-x", SLEEPER), run("kernels-y", "print('said')")), 12),
        *(Stage(name, (run(name, "pass"),), 60) for name in ("serve", "peers", "idle", "graphs")),
    )


class NoProcesses:
    """Of those that are run here, without ending what else this process has started."""

    @staticmethod
    def end_all() -> None:
        pass


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs stages that are made up, and answers with its status and the report."""
    monkeypatch.setattr(command, "stages", made_up_stages)
    monkeypatch.setattr(command, "_LEAST_SECONDS", 1.0)
    monkeypatch.setattr(command, "adopt_orphans", lambda: None)
    monkeypatch.setattr(command, "end_all", NoProcesses.end_all)
    monkeypatch.setattr(running, "end_all", NoProcesses.end_all)

    def run(*flags: str) -> tuple[Any, dict[str, Any], str]:
        with pytest.raises(SystemExit) as ended:
            command.run_gpu(["--out", str(tmp_path), *flags])
        report = msgspec.json.decode((tmp_path / "report.json").read_bytes())
        return ended.value.code, {each["name"]: each for each in report["stages"]}, (tmp_path / "report.md").read_text()

    return run


@pytest.mark.slow
def test_a_stage_that_fails_or_hangs_is_told_and_the_others_go_on(campaign: Any, tmp_path: Path) -> None:
    begun = time.monotonic()
    status, found, text = campaign("--stage", "tests,roofline,kernels,idle")
    assert status == 1
    assert list(found) == ["tests", "roofline", "kernels", "idle"]
    assert [re.sub(r"\d+ s$", "N s", *each["wrong"]) if each["wrong"] else "" for each in found.values()] == [
        "",
        "roofline-x ended with status 3 after N s",
        "kernels-x stopped: not over after N s",
        "",
    ]
    assert "| tests | 2 passed, 1 failed, 2 skipped | all pass | **missed** |" in text
    assert "said" in (tmp_path / "log.txt").read_text(), "the run behind the one that hung had time left"
    assert time.monotonic() - begun < 600


def test_stages_of_a_run_before_stay_in_the_report(campaign: Any) -> None:
    campaign("--stage", "tests")
    status, found, text = campaign("--stage", "idle")
    assert status == 0
    assert list(found) == ["tests", "idle"]
    assert "1 failed" in text


@pytest.mark.slow
def test_without_a_choice_every_stage_is_run_but_the_one_that_another_contains(campaign: Any) -> None:
    assert set(campaign()[1]) == set(get_args(StageName)) - {"serve"}


def test_what_has_no_time_is_left_out_and_told(campaign: Any) -> None:
    status, found, _ = campaign("--stage", "idle", "--minutes", "0.001")
    assert status == 1
    assert found["idle"]["wrong"] == ["idle left out: no time"]


def test_a_stage_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        command.run_gpu(["--out", str(tmp_path), "--stage", "soak"])
    assert "'soak' is none of tests, roofline" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["full", "tiny"])
def test_every_command_of_a_campaign_is_one_that_baton_understands(size: Any, tmp_path: Path) -> None:
    from deploy.cli.bench import with_model
    from services.bench.device.options import kernels_options, roofline_options
    from services.bench.engine.idle import idle_options
    from tests.campaigns.peers_options import peers_options

    def shape(argv: tuple[str, ...]) -> list[str]:
        return [each for each in argv if not each.startswith("--plot")]

    parsed = {
        "roofline": lambda argv: roofline_options(with_model(["roofline", *shape(argv)], tmp_path)[1:]),
        "kernels": lambda argv: kernels_options(with_model(["kernels", *argv], tmp_path)[1:]),
        "idle": lambda argv: idle_options(with_model(["idle", *argv], tmp_path)[1:]),
        "peers": lambda argv: peers_options(argv, None),
    }
    told = stages(size, tmp_path)
    assert [stage.name for stage in told] == list(get_args(StageName))
    for run in (run for stage in told for run in stage.runs):
        if run.argv[1] == "deploy.cli":
            name = next(word for word in run.argv if word in parsed)
            parsed[name](run.argv[run.argv.index(name) + 1 :])
            assert any(run.name in word for word in run.argv if word.startswith("--output-json"))
        else:
            paths = [word for word in run.argv if word.startswith("tests/")]
            assert paths
            assert all((REPOSITORY / path).is_file() for path in paths)


def step(kind: str, batch: int, context: int, share: float) -> dict[str, Any]:
    return {
        "kind": kind,
        "batch": batch,
        "context": context,
        "seconds": 0.002,
        "share": share,
        "share_of_copy": share - 0.01,
        "bound": "memory",
        "flops_per_second": share * 700e12,
    }


def roofline(model: str) -> dict[str, Any]:
    limits = {"memory_rates": {"copy": 4e12}, "matrix_rates": {"matrix": 700e12}}
    made = [step("decode", 1, 1024, 0.86), step("decode", 16, 1024, 0.855), step("decode", 256, 1024, 0.75)]
    made += [step("decode", 1, 128, 0.5), step("prefill", 1, 8192, 0.64), step("prefill", 1, 512, 0.2)]
    return {"run": {"model": model}, "ceilings": limits, "steps": made}


def test_decodes_and_prompts_of_the_big_shape_have_aims() -> None:
    found = rows({"roofline-8b": roofline("llama-3.1-8b")})
    assert [(row.measured, row.aim, row.met) for row in found] == [
        ("85% of copy bandwidth", "85%", True),
        ("84% of copy bandwidth", "85%", False),
        ("75% of memory", "75%", True),
        ("50% of memory", "", None),
        ("64% of matrix rate", "65%", False),
        ("20% of matrix rate", "", None),
    ]
    assert {row.met for row in rows({"roofline-small": roofline("qwen3-0.6b")})} == {None}


def test_decode_attention_has_an_aim_from_sixteen_sequences_and_four_thousand_tokens() -> None:
    def kernel(family: str, case: str) -> dict[str, Any]:
        figures = {"seconds": 1e-5, "torch_seconds": 2e-5, "torch": "torch", "share": 0.9, "bound": "memory"}
        return {"family": family, "case": case, **figures}

    cases = [("decode-attention", "16 × 4,096"), ("decode-attention", "16 × 1,024"), ("norms", "16 × 4,096")]
    found = rows({"kernels-8b": {"run": {"model": "llama-3.1-8b"}, "kernels": [kernel(*case) for case in cases]}})
    assert [row.met for row in found] == [True, None, None]


def test_idle_shares_count_what_a_gpu_waits_for_plans_and_for_their_preparation() -> None:
    def figures(ahead: int, idle: float, prepare: float) -> dict[str, Any]:
        return {"device": "cuda", "sequences": 64, "run_ahead": ahead, "idle": idle, "prepare": prepare}

    measured = [figures(2, 0.01, 0.01), figures(2, 0.02, 0.02), figures(0, 0.3, 0.1)]
    found = rows({"idle-8b": {"model": "llama-3.1-8b", "idle": measured}})
    assert [row.met for row in found] == [True, False, None]


def test_graphs_are_set_beside_launches() -> None:
    on, off = ({"steps": [step("decode", 1, 1024, 0.5) | {"seconds": seconds}]} for seconds in (0.002, 0.003))
    assert rows({"graphs-on": on, "graphs-off": off}) == [
        Row("graphs: decode 1 × 1,024", "2.00 ms replayed, 3.00 ms launched: 1.50 ×")
    ]


def test_of_a_log_the_last_word_on_captures_and_memory_is_kept() -> None:
    captures = b'{"event":"captured decodes","rows":8}\n{"event":"captured decodes","rows":1}\n'
    assert told_of_captures(captures + b'other\n{"event":"backend ready"}\n') == [
        '{"event":"captured decodes","rows":1}',
        '{"event":"backend ready"}',
    ]
