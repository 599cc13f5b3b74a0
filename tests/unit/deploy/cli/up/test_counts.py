"""How many processes of each kind, and how they share a machine."""

from __future__ import annotations

import os

import pytest

from deploy.cli.up.counts import cpu_share, layer_split, max_instances, mixed_engines
from deploy.errors import CommandError
from deploy.supervisor.core.plan import MAX_COUNT, Counts
from deploy.supervisor.settings import StackSettings


@pytest.mark.parametrize(
    ("asked", "made"), [((None, 0, 0), 1), ((None, 2, 1), 0), ((2, 2, 1), 2), ((None, 0, 1), 0), ((1, 1, 0), 1)]
)
def test_there_is_one_engine_or_what_was_asked(asked: tuple[int | None, int, int], made: int) -> None:
    assert mixed_engines(*asked) == made


@pytest.mark.parametrize("asked", [(None, 2, 0), (0, 0, 0), (0, 1, 0)])
def test_somebody_must_decode(asked: tuple[int | None, int, int]) -> None:
    with pytest.raises(CommandError, match="--decode"):
        mixed_engines(*asked)


def test_engines_of_all_pools_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert cpu_share(Counts(ranks=4)) is None
    pools = Counts(engines=0, prefill=1, decode=1, decode_ranks=2)
    assert cpu_share(pools) == max(1, cores // 3)
    assert cpu_share(pools, (0, 1)) is None, "each rank knows how many processors of its nodes it has"


def test_layers_are_split_over_as_many_stages_as_there_are() -> None:
    assert layer_split(None, Counts()) == ()
    assert layer_split("4,2", Counts(ranks=2, stages=2)) == (4, 2)
    assert layer_split("4,2", Counts(prefill=1, prefill_ranks=2, prefill_stages=2)) == (4, 2)
    wrong = (("4,2", Counts(stages=3)), ("4,", Counts(stages=2)), ("0,6", Counts(stages=2)), ("4,2", Counts()))
    for asked, counts in wrong:
        with pytest.raises(CommandError, match="--pp-layers"):
            layer_split(asked, counts)


def test_a_stack_grows_with_its_machine_unless_a_number_is_given() -> None:
    cores = len(os.sched_getaffinity(0))
    assert max_instances(StackSettings()) == min(MAX_COUNT, max(16, 4 * cores))
    assert max_instances(StackSettings(launcher="ray")) == MAX_COUNT, "processors of other machines"
    assert max_instances(StackSettings(max_instances=2)) == 2
