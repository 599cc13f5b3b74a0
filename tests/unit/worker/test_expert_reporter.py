"""What a rank says of its mixture's picks, and keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.worker import metrics
from services.worker.expert_reporter import ExpertReporter
from services.worker.models.expert_parallel.expert_load import ExpertLoad
from services.worker.models.expert_parallel.placement import spread_evenly
from shared.messages.lifecycle import ExpertReport, LayerExpertLoad


def picked(layer: int) -> list[float]:
    return [metrics.EXPERT_PICKS.labels(str(layer), str(rank))._value.get() for rank in range(2)]


async def test_what_came_since_the_last_report_is_counted_and_written(tmp_path: Path) -> None:
    counts = torch.tensor([5, 0, 1, 0])
    reporter = ExpertReporter(ExpertLoad({901: counts}, [spread_evenly(4, 2)] * 902, tmp_path / "file"))
    await reporter.report()
    assert picked(901) == [5.0, 1.0]
    counts += torch.tensor([0, 1, 0, 2])
    await reporter.report()
    assert picked(901) == [6.0, 3.0]
    assert (tmp_path / "file").exists()


async def test_what_of_late_fell_on_each_rank_is_told_logged_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    counts = torch.tensor([5, 0, 1, 0])
    load = ExpertLoad({903: counts}, [spread_evenly(4, 2)] * 904, logs_balance=True)
    reporter = ExpertReporter(load)
    assert reporter.latest is None
    await reporter.report()
    counts += torch.tensor([0, 1, 0, 2])
    await reporter.report()
    await reporter.report()
    assert reporter.latest == ExpertReport((LayerExpertLoad(903, (67, 133)),)), "a report without picks changes nothing"
    assert metrics.EXPERT_BALANCE.labels("903")._value.get() == 0.75
    assert "mean over maximum of the ranks 0.75, in layer 903 0.75" in caplog.text


async def test_a_file_that_cannot_be_written_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "folder").write_text("is none")
    reporter = ExpertReporter(ExpertLoad({902: torch.tensor([1, 1])}, [], tmp_path / "folder" / "file"))
    await reporter.report()
    assert "could not be written" in caplog.text
