"""A study tries settings, keeps what came of them, and goes on where it was stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deploy.tuning.space import SearchSpace, Settings
from deploy.tuning.study import Study, StudyMismatch
from deploy.tuning.trials import FinishedTrial, TrialFailed, best_of

SPACE = SearchSpace({"a": tuple("123456"), "b": tuple("123456")})


def figures(goodput: float, milliseconds: float = 100.0) -> dict[str, Any]:
    return {"request_goodput": goodput, "median_e2el_ms": milliseconds}


class Bench:
    """Best at a = 5, b = 2; b = 6 fails."""

    def __init__(self) -> None:
        self.tried: list[Settings] = []

    def __call__(self, settings: Settings) -> Mapping[str, Any]:
        self.tried.append(settings)
        a, b = int(settings["a"]), int(settings["b"])
        if b == 6:
            raise TrialFailed("b = 6: does not fit")
        return figures(100 - 10 * (a - 5) ** 2 - 5 * (b - 2) ** 2)


def study(folder: Path, trials: int, space: SearchSpace = SPACE, question: str = "q") -> Study:
    return Study(folder / "trials.jsonl", space, {"question": question}, trials=trials, seed=1)


def test_the_search_learns_from_its_trials(tmp_path: Path) -> None:
    bench = Bench()
    list(study(tmp_path, 20).run(bench))
    best = best_of(study(tmp_path, 20).finished())
    assert best is not None
    assert best.goodput >= 95, "of 36 combinations, 5 are so good"
    assert len({tuple(each.items()) for each in bench.tried}) == len(bench.tried) == 20, "none is tried twice"


def test_a_small_space_is_tried_whole_whatever_the_number_of_trials(tmp_path: Path) -> None:
    bench, space = Bench(), SearchSpace({"a": ("4", "5"), "b": ("2", "6")})
    found = list(study(tmp_path, 50, space).run(bench))
    assert len(bench.tried) == 4
    assert [each.number for each in found] == [1, 2, 3, 4]
    failed = [each for each in found if each.failure]
    assert {each.settings["b"] for each in failed} == {"6"}
    assert failed[0].failure == "b = 6: does not fit"


def test_a_study_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    first = Bench()
    trials = study(tmp_path, 10).run(first)
    for _ in range(4):
        next(trials)
    second = Bench()
    list(study(tmp_path, 10).run(second))
    assert len(second.tried) == 6
    assert not [each for each in second.tried if each in first.tried]
    assert list(study(tmp_path, 10).run(second)) == [], "there are as many as wanted"


def test_another_question_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    study(tmp_path, 5)
    with pytest.raises(StudyMismatch, match="choose another folder"):
        study(tmp_path, 5, question="other")


def test_of_equal_goodputs_the_shortest_requests_are_best() -> None:
    trials = [
        FinishedTrial(1, {}, figures(10.0, 300), None),
        FinishedTrial(2, {}, figures(9.95, 200), None),
        FinishedTrial(3, {}, figures(9.0, 100), None),
        FinishedTrial(4, {}, None, "no memory"),
    ]
    best = best_of(trials)
    assert best is not None
    assert best.number == 2
    assert best_of([trials[3], FinishedTrial(5, {}, figures(0.0), None)]) is None
