"""What a step took is measured once for each engine, code, library and machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.worker.kv import kept_peaks
from services.worker.kv.kept_peaks import MAX_KEPT, kept_peak
from services.worker.models.weight_sharing.holders import holders_of
from services.worker.models.weight_sharing.shared_arena import NotShared


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "baton" / "profiles"


def never() -> int:
    raise AssertionError("it is known")


def test_it_is_measured_once() -> None:
    assert kept_peak(("model", 1), lambda: 1000) == 1000
    assert kept_peak(("model", 1), never) == 1000


def test_another_engine_library_or_code_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept_peak(("model", 1), lambda: 1000) == 1000
    assert kept_peak(("model", 2), lambda: 2000) == 2000
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "0.0")
        assert kept_peak(("model", 1), lambda: 3000) == 3000
    with monkeypatch.context() as other:
        other.setattr(kept_peaks, "_code", lambda: [("kernel.cpp", 1, 1)])
        assert kept_peak(("model", 1), lambda: 4000) == 4000
    assert kept_peak(("model", 1), never) == 1000


@pytest.mark.parametrize("broken", ["", "a lot", "-5", "0", "9" * 40])
def test_what_is_no_figure_is_measured_again(folder: Path, broken: str) -> None:
    kept_peak(("model",), lambda: 1000)
    (path,) = folder.iterdir()
    path.write_text(broken)
    assert kept_peak(("model",), lambda: 2000) == 2000
    assert kept_peak(("model",), never) == 2000


def test_no_more_are_kept_than_a_bound(folder: Path) -> None:
    for number in range(MAX_KEPT + 5):
        kept_peak(("model", number), lambda: 1000)
    assert len(list(folder.iterdir())) == MAX_KEPT


def test_where_nothing_can_be_kept_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept_peak(("model",), lambda: 1000) == 1000
    assert kept_peak(("model",), lambda: 2000) == 2000


def test_for_a_user_without_a_home_it_is_measured(homeless: None) -> None:
    assert kept_peak(("model",), lambda: 1000) == 1000
    assert kept_peak(("model",), lambda: 2000) == 2000
    with (
        pytest.raises(NotShared, match=r"processes cannot be found: user [0-9]+ has no home: set HOME"),
        holders_of("k"),
    ):
        pass
