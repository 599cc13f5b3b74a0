"""`baton tune` on the simulator: its trials, its files, and what it says of bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.cli.app import loaded
from deploy.errors import CommandError
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.config import load_config

LOAD = ("--duration", "1", "--request-rate", "20", "--output-len", "12", "--goodput", "ttft:150")


def tuned(capsys: pytest.CaptureFixture[str], out: Path, *argv: str) -> str:
    loaded("tune").main(["--out", str(out), *LOAD, *argv], standalone_mode=False)
    return capsys.readouterr().out


def test_the_best_settings_are_written_as_a_file_that_services_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    search = ("--search", "max_num_seqs=1,32", "--search", "scheduler.run_ahead=0,1", "--search", "tp=2")
    out = tuned(capsys, tmp_path, *search, "--gpus", "2")
    assert out.count("\n| 1 ") + out.count("\n| 32 ") == 4, "a line for each trial"
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["best"]["max_num_seqs"] == "32", "one sequence at a time is too slow"
    assert f"baton up --tp 2 --engines 1 --config {tmp_path}/best.toml" in out
    file = f"--config={tmp_path}/best.toml"
    scheduler = load_config("scheduler", SchedulerConfig, [file], {})
    assert scheduler.run_ahead == int(result["best"]["scheduler.run_ahead"])
    worker = load_config("worker", WorkerConfig, [file, "--engine=e", "--model=m"], {})
    assert worker.max_num_seqs == 32
    assert (tmp_path / "trials.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "report.md").read_text().count("\n| ") == 4 + 2


def test_a_second_run_adds_trials_and_settings_that_cannot_serve_are_no_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    search = ("--search", "kv_memory=1MiB,8GiB", "--json")
    first = json.loads(tuned(capsys, tmp_path, *search, "--trials", "1"))
    both = json.loads(tuned(capsys, tmp_path, *search, "--trials", "9"))
    assert both["trials"][0] == first["trials"][0]
    assert both["best"] == {"kv_memory": "8GiB"}
    assert "nothing is left for keys and values" in next(each["failure"] for each in both["trials"] if each["failure"])


def test_pools_of_a_fixed_number_of_engines_and_sizes_of_blocks_are_tried(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    search = ("--search", "pd_ratio=mixed,1:3,3:1", "--search", "block_size=16,64", "--gpus", "4")
    out = tuned(capsys, tmp_path, *search, "--input-len", "2048")
    trials = json.loads((tmp_path / "result.json").read_text())["trials"]
    assert {(each["settings"]["pd_ratio"], each["settings"]["block_size"]) for each in trials} == {
        (ratio, size) for ratio in ("mixed", "1:3", "3:1") for size in ("16", "64")
    }
    assert {each["failure"] for each in trials} == {None}
    waits = {each["settings"]["pd_ratio"]: each["figures"]["median_ttft_ms"] for each in trials}
    assert waits["1:3"] > waits["3:1"], "prompts wait for one engine, or for three"
    best = json.loads((tmp_path / "result.json").read_text())["best"]
    engines = {"mixed": "--engines 4", "1:3": "--prefill 1 --decode 3", "3:1": "--prefill 3 --decode 1"}
    assert f"{engines[best['pd_ratio']]} --config {tmp_path}/best.toml" in out


def test_one_engine_is_no_two_pools(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = json.loads(tuned(capsys, tmp_path, "--search", "pd_ratio=1:1", "--json"))
    assert [each["failure"] for each in out["trials"]] == ["pd_ratio=1:1: two pools need two engines, there is 1"]


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("--search", "max_num_seqs=few"), "--search max_num_seqs=few: "),
        (("--search", "nonsense=1"), "--search nonsense: no trial on the simulator changes it"),
        (("--search", "scheduler.nonsense=1"), "is no option of baton up and no setting of a service"),
        (("--search", "engines=1,2"), "--search engines: "),
        (("--search", "prefill=1,2"), "--search prefill: on the simulator pd_ratio says"),
        (("--search", "pd_ratio=1:2:3"), "--search pd_ratio=1:2:3: mixed, or P:D"),
        (("--search", "tp"), "SETTING=VALUE,VALUE is expected"),
        (("--bench", "--num-prompts 3"), "--bench: has no effect without --up"),
        (("--up", "--device sim"), "--duration: has no effect with --up"),
        (("--config", "/nowhere"), "--config /nowhere: "),
    ],
)
def test_bad_input_is_explained_in_one_line(argv: tuple[str, ...], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError) as failed:
        loaded("tune").main(["--out", str(tmp_path), *LOAD, *argv], standalone_mode=False)
    assert complaint in str(failed.value)
    assert "\n" not in str(failed.value)


def test_a_folder_holds_the_trials_of_one_question(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tuned(capsys, tmp_path, "--search", "tp=1")
    with pytest.raises(CommandError, match="has the trials of another question"):
        tuned(capsys, tmp_path, "--search", "tp=1", "--input-len", "10")
