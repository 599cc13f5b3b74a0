"""What `make bench-guard` compares with, and which changes it takes for a regression."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from math import comb
from pathlib import Path
from random import Random

import pytest

from deploy.errors import CommandError
from tests.campaigns import guard
from tests.campaigns.guard import FIGURES, LastVersion, NotComparedError, figures_of, last_version, options_of
from tests.campaigns.paired_samples import MAX_EXACT, Comparison, Figure, compare, fewest_pairs, regressions, table
from tests.support.paths import REPOSITORY

TIME, RATE = Figure("ms", "lower"), Figure("tokens/s", "higher")


def noisy(count: int, change: float, noise: float, seed: int) -> list[tuple[float, float]]:
    """Pairs on a machine whose speed wanders, the second slower by the factor `change`."""
    rng, pairs, speed = Random(seed), [], 1.0
    for _ in range(count):
        speed *= rng.lognormvariate(0, 0.2)
        pairs.append((speed * rng.lognormvariate(0, noise), change * speed * rng.lognormvariate(0, noise)))
    return pairs


def test_the_last_version_is_the_first_that_the_changelog_names_with_its_commit() -> None:
    text = "## Unreleased\n\n## 0.2.0 (2026-11-22, commit 63a82c1)\n\n## 0.1.0 (2026-11-22, commit 47fa8cd)\n"
    assert last_version(text) == LastVersion("0.2.0", "63a82c1")
    assert last_version((REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")).commit
    with pytest.raises(CommandError, match="no version names its commit"):
        last_version("## Unreleased\n")


def test_the_chance_is_the_share_of_signs_that_are_at_least_as_bad() -> None:
    """By hand: five pairs that are twice as slow, and three twice as fast."""
    pairs = [(1.0, 2.0)] * 5 + [(2.0, 1.0)] * 3
    at_least = sum(comb(8, worse) for worse in range(5, 9)) / 2**8
    assert compare(TIME, pairs).worse_by_chance == pytest.approx(at_least)
    assert compare(TIME, [(1.0, 2.0)] * 8).worse_by_chance == 2**-8
    assert compare(RATE, [(1.0, 2.0)] * 8).worse_by_chance == 1
    assert compare(TIME, [(1.0, 2.0)] * 8).ratio == pytest.approx(2)


def test_of_many_pairs_a_sample_of_signs_is_tried() -> None:
    many = noisy(MAX_EXACT + 4, 1.1, 0.05, seed=3)
    assert compare(TIME, many).worse_by_chance < 0.001
    assert compare(RATE, many).worse_by_chance > 0.99


def test_a_tenth_is_found_beneath_much_greater_drift_and_named_with_its_interval() -> None:
    slower = compare(TIME, noisy(12, 1.1, 0.03, seed=1))
    assert 1.05 < slower.low < slower.ratio < slower.high < 1.15
    assert regressions([slower], 0.01) == [slower]
    assert not regressions([compare(RATE, noisy(12, 1.1, 0.03, seed=1))], 0.01), "more of a rate is no regression"


def test_where_nothing_differs_an_alarm_is_as_rare_as_is_said() -> None:
    """80 comparisons of two figures each, with an error of 10%: 8 false alarms are expected."""
    alarms = 0
    for seed in range(80):
        alarms += bool(regressions([compare(TIME, noisy(8, 1.0, 0.05, 2 * seed + n)) for n in range(2)], 0.1))
    assert 2 <= alarms <= 18


def test_several_figures_share_the_error_by_holms_method() -> None:
    def chance(value: float) -> Comparison:
        return Comparison(f"{value}", 1.1, 1.0, 1.2, value)

    four = [chance(0.03), chance(0.002), chance(0.004), chance(0.2)]
    assert [each.worse_by_chance for each in regressions(four, 0.01)] == [0.002]
    four[2] = chance(0.003)
    assert [each.worse_by_chance for each in regressions(four, 0.01)] == [0.002, 0.003]


def test_so_few_pairs_that_nothing_could_be_found_are_known() -> None:
    fewest = fewest_pairs(len(FIGURES), 0.01)
    assert 2.0**-fewest <= 0.01 / len(FIGURES) < 2.0 ** -(fewest - 1)
    with pytest.raises(ValueError, match="1 pairs are too few"):
        compare(TIME, [(1.0, 1.0)])


def test_a_sample_whose_requests_failed_is_none() -> None:
    result = {
        "failed": 0,
        "num_prompts": 9,
        "error_kinds": [],
        "output_throughput": 100.0,
        "median_ttft_ms": 5.0,
        "median_tpot_ms": 2.0,
        "server_cpu": [{"us_per_token": 30.0}, {"us_per_token": 12.5}],
    }
    assert list(figures_of(result).values()) == [100.0, 5.0, 2.0, 42.5]
    with pytest.raises(CommandError, match=r"2 of 9 requests failed: \['HTTP 503'\]"):
        figures_of({**result, "failed": 2, "error_kinds": ["HTTP 503"]})


def test_what_is_typed_and_what_is_shown() -> None:
    options = options_of(["--concurrency", "1,16", "--rounds", "20", "--up", "--engines 2"])
    assert (options.concurrency, options.rounds, options.up) == ((1, 16), 20, ("--engines", "2"))
    worse, same = Comparison("a", 1.1, 1.05, 1.15, 0.0002), Comparison("b", 1.0, 0.98, 1.02, 0.5)
    assert table([worse, same], [worse])[2:] == [
        "| a | 1.100 | 1.050 to 1.150 | 0.0002 | **worse** |",
        "| b | 1.000 | 0.980 to 1.020 | 0.5000 |  |",
    ]


def test_what_is_allowed_is_no_regression_and_what_is_far_beyond_it_is() -> None:
    """By the settings of CI: as noisy as two loaded cores are, 1.15 times as slow is let pass, 1.6 times is not."""
    short = options_of(["--short"])
    assert (short.allowed, short.error, short.rounds) == (0.15, 0.001, 14)
    found = {
        change: sum(
            bool(regressions([compare(TIME, noisy(14, change, 0.1, seed), allowed=0.15)], 0.001 / 4))
            for seed in range(8)
        )
        for change in (1.0, 1.15, 1.6)
    }
    assert found == {1.0: 0, 1.15: 0, 1.6: 8}


def run_with(monkeypatch: pytest.MonkeyPatch, runs: list[dict[str, float]]) -> tuple[int, int]:
    """The status, and how often was measured, where all pairs of a run have these ratios; 1 where none is given."""
    waiting: Iterator[dict[str, float]] = iter(runs)
    taken = []

    def measured(version: LastVersion, fewest: int, options: guard.GuardOptions) -> guard.Pairs:
        taken.append(ratios := next(waiting))
        return {f"{f.name}, 8 at a time": [(1.0, ratios.get(f.name, 1.0))] * options.rounds for f in FIGURES}

    monkeypatch.setattr(guard, "_measured", measured)
    return guard.run_guard(["--short"]), len(taken)


def test_only_what_two_pairs_of_stacks_show_is_a_regression(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, slow_start = {"TPOT p50 ms": 1.5}, {"TTFT p50 ms": 1.5}
    assert run_with(monkeypatch, [{}]) == (0, 1)
    assert run_with(monkeypatch, [slow, {}]) == (0, 2)
    assert run_with(monkeypatch, [slow, slow_start]) == (0, 2)
    assert "**worse**" in capsys.readouterr().out
    assert run_with(monkeypatch, [slow | slow_start, slow]) == (1, 2)
    assert run_with(monkeypatch, [{"output tokens/s": 0.6}] * 2) == (1, 2)


def test_where_the_last_version_is_not_to_be_had_ci_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a shallow clone: the changelog names a commit that is not there."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True, timeout=60)
    (tmp_path / "CHANGELOG.md").write_text("## 0.2.0 (2026-11-22, commit 63a82c1)\n", encoding="utf-8")
    monkeypatch.setattr(guard, "REPOSITORY", tmp_path)
    assert guard.run_guard(["--short"]) == 0
    assert "not compared" in (said := capsys.readouterr().out)
    assert "a shallow clone lacks old versions" in said
    with pytest.raises(NotComparedError, match="63a82c1"):
        guard.run_guard([])


@pytest.mark.parametrize(
    ("broken", "not_compared"), [("run-old", True), ("run-new", False)], ids=["the last version", "this checkout"]
)
def test_a_stack_that_does_not_start_is_a_failure_of_this_checkout_only(
    monkeypatch: pytest.MonkeyPatch, broken: str, not_compared: bool
) -> None:
    def command(said: list[str] | tuple[str, ...], *_: object) -> None:
        if "up" in said and any(part.endswith(broken) for part in said):
            raise CommandError("exit status 1")

    refuse: Callable[..., None] = command
    monkeypatch.setattr(guard, "_python", refuse)
    monkeypatch.setattr(guard, "_git", lambda *_: None)
    if not_compared:
        assert guard.run_guard(["--short"]) == 0
    else:
        with pytest.raises(CommandError, match="exit status 1"):
            guard.run_guard(["--short"])


def test_too_few_rounds_within_the_time_are_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_python", lambda *_: None)
    monkeypatch.setattr(guard, "_git", lambda *_: None)
    with pytest.raises(NotComparedError, match=r"0 rounds in 0 s, 9 at least are needed: --seconds"):
        guard.run_guard(["--seconds", "0"])
