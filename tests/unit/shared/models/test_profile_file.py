"""The file of an engine's profile: what is read again, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.models.profile_file import VERSION, ProfileError, read_profile
from tests.support.engines.planner_profiles import PROFILE_FILE


def written(folder: Path, **changes: Any) -> Path:
    fields = {"command": "baton bench profile", **msgspec.to_builtins(PROFILE_FILE), **changes}
    path = folder / "profile.json"
    path.write_bytes(msgspec.json.encode(fields))
    return path


def test_what_was_written_is_read_again_and_what_else_is_there_left_out(tmp_path: Path) -> None:
    assert read_profile(written(tmp_path, later="unknown")) == PROFILE_FILE


def cells(*places: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"batch_size": batch, "context_tokens": context, "itl_seconds": 0.1} for batch, context in places]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": "bench"}, "format 'bench': 'baton-engine-profile' is expected"),
        ({"version": VERSION + 1}, f"version {VERSION + 1}: this release reads version {VERSION}"),
        ({"version": "one"}, r"is no profile of baton bench profile .*version"),
        ({"prefill": [{"prompt_tokens": 16, "seconds": 0.1}]}, r"profile\.json: .*prefill"),
        (
            {"prefill": [{"prompt_tokens": 16, "seconds": 0.1}, {"prompt_tokens": 16, "seconds": 0}]},
            r"profile\.json: .*seconds",
        ),
        ({"prefill": [{"prompt_tokens": 16, "seconds": 0.1}] * 2}, "prefill: a point is there twice"),
        ({"decode": cells((1, 8), (1, 9), (2, 9), (3, 8))}, "of batch size 2 a context below 9 is missing"),
        ({"decode": cells((1, 8), (2, 8), (2, 9), (3, 8))}, "of the smallest batch, 1, context 9 is missing"),
        ({"decode": cells((1, 8), (1, 9), (1, 10), (1, 11))}, "two batch sizes and two contexts are needed"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_reason(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ProfileError, match=complaint):
        read_profile(written(tmp_path, **changes))


def test_a_file_that_is_not_there_or_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"missing\.json: No such file"):
        read_profile(tmp_path / "missing.json")
    (tmp_path / "table.md").write_text("| 1 |")
    with pytest.raises(ProfileError, match="is no profile of baton bench profile"):
        read_profile(tmp_path / "table.md")
