"""How engines that share experts are scaled: by whole data-parallel groups, or by others in the place of all.

The ranks of a group share what they hold of a model, so it neither grows nor shrinks. Groups of another size are
started beside those that serve, and these end once all of the new ones are ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from deploy.supervisor.core.members import SupervisedProcess
from deploy.supervisor.core.plan import Counts, Pool, ProcessSpec, process_specs
from shared.ids import InstanceId


class GroupChange(NamedTuple):
    """What becomes of the groups of a pool; its engines by their numbers. Any service is one of groups of one, too."""

    missing: int
    """Groups that are to be started."""
    surplus: frozenset[int]
    """Engines that end now."""
    superseded: frozenset[int]
    """Engines that end once all that stay are ready."""


def group_size(serving: Iterable[SupervisedProcess], planned: int) -> int:
    """Engines of each group of a pool: of those that stay; `planned` where none does."""
    return next((each.process.group_size for each in serving if not each.superseded), planned)


def change_groups(serving: Sequence[SupervisedProcess], count: int, size: int) -> GroupChange:
    """`serving`: the processes of a pool's engines; `count` engines, a multiple of `size`, are wanted in groups of that
    size."""
    groups = _groups(serving)
    fitting = [group for group, members in groups.items() if members[0].process.group_size == size]
    others = [group for group in groups if group not in fitting]
    by_worth = sorted(fitting, key=lambda group: _worth(groups[group]), reverse=True)
    staying = count // size
    return GroupChange(
        max(0, staying - len(fitting)),
        _engines(groups[group] for group in by_worth[staying:]),
        _engines(groups[group] for group in others),
    )


def group_specs(pool: Pool, numbers: Sequence[int], counts: Counts) -> list[ProcessSpec]:
    """The processes of one group of engines of these numbers."""
    engines = [process_specs(pool, number, counts) for number in numbers]
    group = engines[0][0].engine
    return [
        process._replace(group=group, group_size=len(numbers), group_index=index)
        for index, processes in enumerate(engines)
        for process in processes
    ]


def release_superseded(members: Mapping[InstanceId, SupervisedProcess]) -> None:
    """Engines in whose place others are now ready are wanted no longer."""
    for pool in {(each.process.pool, each.process.model) for each in members.values() if each.superseded}:
        serving = [m for m in members.values() if m.wanted and (m.process.pool, m.process.model) == pool]
        if all(each.is_ready for each in serving if not each.superseded):
            for each in serving:
                each.wanted = each.wanted and not each.superseded


def _groups(serving: Iterable[SupervisedProcess]) -> dict[str, list[SupervisedProcess]]:
    """Whatever belongs to no engine is by itself."""
    groups: dict[str, list[SupervisedProcess]] = {}
    for member in serving:
        groups.setdefault(member.process.group or member.process.instance, []).append(member)
    return groups


def _worth(members: Sequence[SupervisedProcess]) -> tuple[bool, bool, int]:
    """Drained ones end first, then those that are not ready, of equals the newest. Serving ones stay."""
    drained = any(member.phase == "draining" for member in members)
    return not drained, all(member.is_ready for member in members), -min(each.process.number for each in members)


def _engines(groups: Iterable[Sequence[SupervisedProcess]]) -> frozenset[int]:
    return frozenset(member.process.number for members in groups for member in members)
