"""A supervisor lives while it holds its lock; without one for long enough its processes end."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.supervisor.state_file import LOCK, held
from shared.supervision import looks_until_orphaned, supervisor_lives


def test_a_supervisor_lives_while_it_holds_its_lock(tmp_path: Path) -> None:
    assert not supervisor_lives(tmp_path / LOCK)
    with held(tmp_path):
        assert supervisor_lives(tmp_path / LOCK)
    assert not supervisor_lives(tmp_path / LOCK)


def test_a_new_supervisor_starts_the_count_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("shared.supervision.time.monotonic", lambda: now)
    looks = looks_until_orphaned(tmp_path / LOCK, 3.0)
    now += next(looks)
    now += next(looks)
    with held(tmp_path):
        pause = next(looks)
    seen_at = now
    now += pause
    for pause in looks:
        now += pause
    assert now - seen_at == 3.0
