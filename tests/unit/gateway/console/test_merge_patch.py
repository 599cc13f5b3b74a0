"""A patch makes the later document of the earlier one, and says no more than what changed."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.console.merge_patch import merge_patch, without_none

NAMES = st.sampled_from("abcd")
VALUES = st.one_of(st.integers(0, 3), st.booleans(), st.text("xy", max_size=2), st.lists(st.integers(0, 2), max_size=2))
DOCUMENTS = st.dictionaries(NAMES, st.recursive(VALUES, lambda inner: st.dictionaries(NAMES, inner, max_size=3)))


def applied(target: Any, patch: Any) -> Any:
    """MergePatch of RFC 7386, section 2, as it stands there."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = applied(result.get(name), value)
    return result


@given(DOCUMENTS, DOCUMENTS)
def test_the_patch_makes_one_document_of_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert applied(before, merge_patch(before, after)) == after
    assert merge_patch(after, after) == {}


def test_only_what_changed_is_in_it() -> None:
    before = {"same": {"x": 1}, "engine": {"running": 1, "waiting": 0}, "gone": 1}
    after = {"same": {"x": 1}, "engine": {"running": 2, "waiting": 0}, "new": [1]}
    assert merge_patch(before, after) == {"engine": {"running": 2}, "gone": None, "new": [1]}


def test_nothing_unknown_is_in_a_document_and_floats_are_short() -> None:
    document = {"a": None, "b": {"c": None, "d": 1.23456789}, "e": [{"f": None}], "g": (1, 2)}
    assert without_none(document) == {"b": {"d": 1.2346}, "e": [{}], "g": [1, 2]}
