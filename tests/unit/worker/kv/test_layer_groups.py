"""Which layers share a block table, and which a cache."""

from __future__ import annotations

from typing import Any

import pytest

from services.worker.kv.layer_groups import MAX_GROUPS, LayerGroups, encoded_layers, group_layers, why_one_group
from shared.kv_groups import KvCacheGroup

LONGEST = 4096
MODEL = "00" * 16


def groups_of(windows: list[int | None]) -> LayerGroups:
    groups = group_layers(windows, LONGEST)
    assert groups is not None
    check(groups, windows)
    return groups


def check(groups: LayerGroups, windows: list[int | None]) -> None:
    """Each layer is in a group with its window; those of one group have different caches, which are all in use."""
    assert [groups.groups[number].window for number in groups.group_of] == windows
    places = list(zip(groups.group_of, groups.cache_of, strict=True))
    assert len(set(places)) == len(windows)
    assert [group.layers for group in groups.groups] == [groups.group_of.count(i) for i in range(len(groups.groups))]
    assert set(groups.cache_of) == set(range(groups.caches))


def test_one_layer_of_six_sees_everything() -> None:
    """Gemma 3: five groups of windows for one of whole layers, as many layers in each."""
    groups = groups_of(([512] * 5 + [None]) * 4)
    assert groups.groups == (KvCacheGroup(layers=4), *[KvCacheGroup(layers=4, window=512)] * 5)
    assert groups.caches == 4


def test_the_last_group_of_a_kind_may_be_smaller() -> None:
    groups = groups_of([512, 512, 512, 512, 512, None, None])
    assert [(group.layers, group.window) for group in groups.groups] == [(2, None), (2, 512), (2, 512), (1, 512)]


def test_kinds_with_nearly_as_many_layers_are_a_group_each() -> None:
    """Thirteen layers and eleven: two groups with some memory unused, not one of eleven and one of two besides."""
    groups = groups_of([512] * 13 + [None] * 11)
    assert [(group.layers, group.window) for group in groups.groups] == [(11, None), (13, 512)]
    assert groups.caches == 13


def test_windows_of_different_widths_are_different_kinds() -> None:
    groups = groups_of([64, 128, None, 64, 128, None])
    assert [(group.layers, group.window) for group in groups.groups] == [(2, None), (2, 64), (2, 128)]


def test_windows_alone_are_one_group() -> None:
    assert groups_of([512] * 3).groups == (KvCacheGroup(layers=3, window=512),)


def test_nothing_is_grouped_where_all_see_all() -> None:
    assert group_layers([None] * 4, LONGEST) is None
    assert group_layers([LONGEST, None, 2 * LONGEST], LONGEST) is None, "a window that no sequence outgrows is none"


def test_stages_have_the_same_groups_of_different_layers() -> None:
    """Gemma 3 27B on two stages, and seven layers on three: where a stage has no layer of a group it has its blocks all
    the same."""
    first, second = of_stages(([1024] * 5 + [None]) * 10 + [1024] * 2, (31, 31))
    assert [group.layers for group in first.groups] == [10, 10, 10, 10, 10, 10, 2]
    assert (first.stages, first.first_cache, second.first_cache) == ((5, 5), 0, 5)
    one, two, three = of_stages([512, 512, 512, 512, None, 512, 512], (2, 3, 2))
    assert [(group.layers, group.window) for group in one.groups] == [(1, None), (3, 512), (3, 512)]
    assert (one.caches, two.caches, three.caches) == (1, 1, 1)
    assert 0 not in one.group_of, "which is of the layer that sees everything"


def of_stages(windows: list[int | None], stages: tuple[int, ...]) -> list[LayerGroups]:
    """Of each stage; what all share must be equal, and each layer have a place of its own."""
    found = [group_layers(windows, LONGEST, stages, stage) for stage in range(len(stages))]
    members = [0] * MAX_GROUPS
    for stage, groups in enumerate(found):
        assert groups is not None
        assert found[0] is not None
        assert (groups.groups, groups.stages) == (found[0].groups, found[0].stages)
        assert groups.digest("ab" * 8) == found[0].digest("ab" * 8)
        first = sum(stages[:stage])
        assert [groups.groups[number].window for number in groups.group_of] == windows[first : first + stages[stage]]
        assert len(set(zip(groups.group_of, groups.cache_of, strict=True))) == stages[stage]
        assert max(groups.cache_of) < groups.caches
        for number in groups.group_of:
            members[number] += 1
    assert found[0] is not None
    assert members[: len(found[0].groups)] == [group.layers for group in found[0].groups]
    return [groups for groups in found if groups is not None]


def test_groups_are_few() -> None:
    groups = groups_of([512] * 99 + [None])
    assert len(groups.groups) <= MAX_GROUPS


@pytest.mark.features("hybrid KV cache", "KV connector", refused=True)
@pytest.mark.parametrize(
    ("different", "reason"),
    [
        ({}, None),
        ({"drafts": "ngram"}, None),
        ({"device": "cuda"}, "groups of layers are not supported on cuda"),
        ({"drafts": "eagle"}, None),
        ({"drafts": "eagle", "windows": [512] * 4}, "drafts by eagle see all tokens, and no layer of the model does"),
        ({"drafts": "medusa", "windows": [512] * 4}, None),
        (
            {"drafts": "eagle", "trees": True},
            "branches of trees of drafts (speculative_eagle_topk) have one block for all layers",
        ),
        ({"connector": True}, "a KV connector knows one block for all layers"),
    ],
)
def test_why_all_layers_have_one_table(different: dict[str, Any], reason: str | None) -> None:
    """With hybrid_kv_cache = on each is an error at start."""
    windows = different.pop("windows", [512, None])
    usual = {"device": "cpu", "drafts": None, "connector": False}
    assert why_one_group(groups_of(windows), **{**usual, **different}) == reason  # type: ignore[arg-type]


def test_rows_of_images_take_the_memory_of_the_layers_that_attend_to_them() -> None:
    """Llama 3.2 Vision 11B: 8 of 40 layers. A block has rows for four times its tokens, each part of it in other
    layers' caches."""
    across = [number % 5 == 3 for number in range(40)]
    groups = encoded_layers([across], 0, 6404)
    own, others = groups.groups
    assert (own.layers, others.layers, others.parts, groups.caches) == (32, 8, 4, 32)
    assert others.most_blocks(0, 16, 0) == 101
    first = [cache for cache, group in zip(groups.cache_of, groups.group_of, strict=True) if group]
    assert first == list(range(0, 32, 4))


def test_stages_have_as_many_parts_as_the_one_that_has_fewest() -> None:
    stages = [[False, True, False], [False] * 4, [True, False, False, False, True]]
    groups = [encoded_layers(stages, stage, 100) for stage in range(3)]
    assert {each.groups for each in groups} == {(KvCacheGroup(layers=9), KvCacheGroup(layers=3, encoded=100))}
    assert [each.caches for each in groups] == [2, 4, 3]
    assert [each.first_cache for each in groups] == [0, 2, 6]
    wide = encoded_layers([[False, True, False], [True, False, False, False, False, True]], 1, 100)
    assert wide.groups[1].parts == 2
    assert wide.cache_of == (0, 0, 1, 2, 3, 2)


def test_a_store_has_blocks_of_tokens_alone_for_stages_of_any_size() -> None:
    across = [number % 5 == 3 for number in range(40)]
    whole, half = encoded_layers([across], 0, 6404), encoded_layers([across[:20], across[20:]], 1, 6404)
    assert (half.digest(MODEL), half.first_cache, sum(half.stages)) == (whole.digest(MODEL), 16, 32)
    ragged = encoded_layers([[False, True, True], [False] * 3], 0, 100)
    assert sum(ragged.stages) > 4
    assert ragged.digest(MODEL) != encoded_layers([[False, True, True, *[False] * 3]], 0, 100).digest(MODEL)
