"""What a start on a GPU rehearses: prefills of every size, from the start of a prompt and behind a long prefix."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.backend import Step
from services.worker.executor.runner_parts import Runner
from services.worker.executor.warm_up import warm_up_shapes
from shared.messages.worker import StepPlan
from tests.support.models.tiny_models import POSITIONS, make_model
from tests.support.worker.tiny_runner import tiny_runner


def recorded_plans(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Filled with what it prepares."""
    plans: list[StepPlan] = []

    def prepare(plan: StepPlan) -> Step:
        plans.append(plan)
        return type(runner).prepare(runner, plan)

    monkeypatch.setattr(runner, "prepare", prepare)
    return plans


@pytest.mark.parametrize(("blocks", "longest"), [(16, POSITIONS - 1), (3, 47)])
def test_prefills_of_every_size_are_computed_and_nothing_is_left_behind(
    blocks: int, longest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama", tmp_path, num_hidden_layers=1)
    runner = tiny_runner(model.path, "torch", launching=True, num_blocks=blocks)
    plans = recorded_plans(runner, monkeypatch)
    warm_up_shapes(runner, rows=40)
    prefills = [plan for plan in plans if plan.new and plan.work[0].count > 1]
    whole = [plan.work[0].count for plan in prefills if plan.new[0].computed == 0]
    behind = {plan.work[0].count: plan.new[0].computed for plan in prefills if plan.new[0].computed}
    assert whole == [2, 4, 8, 16, 32, 40]
    assert behind == {count: longest - count for count in whole}
    assert len(runner.rank.sequences) == 0


@pytest.mark.parametrize(("checkpoints", "behind"), [(3, [2, 4, 5]), (0, [])])
def test_behind_a_prefix_states_come_from_a_checkpoint(
    checkpoints: int, behind: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("mamba2", tmp_path, num_hidden_layers=1)
    runner = tiny_runner(model.path, "torch", launching=True, state_checkpoints=checkpoints)
    plans = recorded_plans(runner, monkeypatch)
    warm_up_shapes(runner, rows=5)
    restoring = [plan for plan in plans if plan.restored]
    assert [plan.work[0].count for plan in restoring] == behind
    assert all(plan.new[0].computed > 0 for plan in restoring)
    assert len(runner.rank.sequences) == 0
