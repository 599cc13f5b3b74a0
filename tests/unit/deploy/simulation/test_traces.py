"""Traces of Mooncake and Azure, as they are published: times, lengths, shared blocks, and what is said of bad ones."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from deploy.simulation.prompts import PromptSegment
from deploy.simulation.traces import TraceError, TraceLoad
from tests.support.engines.simulated_fleet import CARD, run

MOONCAKE = """\
{"timestamp": 0, "input_length": 1300, "output_length": 12, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 1053, "output_length": 4, "hash_ids": [0, 1, 774]}
{"timestamp": 5999, "input_length": 898, "output_length": 0, "hash_ids": [0, 1099]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,480,10
2023-11-16 18:17:04.0319600,318,8
2023-11-16 18:17:04.4781490,110,27
"""


def written(folder: Path, text: str, name: str = "trace") -> Path:
    (path := folder / name).write_text(text)
    return path


def test_mooncakes_trace_has_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    requests = list(TraceLoad(path=written(tmp_path, MOONCAKE)).requests())
    assert [request.at for request in requests] == [0.0, 3.0, 5.999]
    assert [request.prompt_tokens for request in requests] == [1300, 1053, 898]
    assert [request.output_tokens for request in requests] == [12, 4, 1]
    assert requests[1].segments == (PromptSegment(0, 512), PromptSegment(1, 512), PromptSegment(774, 29))


def test_azures_trace_has_times_and_lengths_and_nothing_is_shared(tmp_path: Path) -> None:
    requests = list(TraceLoad(path=written(tmp_path, AZURE)).requests())
    assert [request.at for request in requests] == pytest.approx([0.0, 0.052, 0.498189], abs=1e-6)
    assert [(request.prompt_tokens, request.output_tokens) for request in requests] == [(480, 10), (318, 8), (110, 27)]
    assert len({request.segments[0].name for request in requests}) == 3


def test_times_are_scaled_and_a_part_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE)
    assert [each.at for each in TraceLoad(path=path, time_scale=0.5).requests()] == [0.0, 1.5, 2.9995]
    assert len(list(TraceLoad(path=path, count=2).requests())) == 2
    assert len(list(TraceLoad(path=path, seconds=2.0, time_scale=0.5).requests())) == 2


def test_a_packed_trace_is_read(tmp_path: Path) -> None:
    (path := tmp_path / "trace.jsonl.gz").write_bytes(gzip.compress(MOONCAKE.encode()))
    assert len(list(TraceLoad(path=path).requests())) == 3


def test_a_trace_is_simulated_and_finds_its_shared_blocks(tmp_path: Path) -> None:
    result = run(TraceLoad(path=written(tmp_path, MOONCAKE), time_scale=0.1), engines=1)
    cached = {name: record.cached_tokens for name, record in result.records.items()}
    assert cached == {"r0": 0, "r1": 1024, "r2": 512}
    assert CARD.max_model_len > 1300


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (MOONCAKE + "{}\n", "line 4: .*timestamp"),
        (MOONCAKE.replace("[0, 1, 2]", "[0, 1]"), "line 1: 2 hash_ids for 1300 tokens, not 3"),
        (MOONCAKE.replace("3000", "-1"), "line 2: .*timestamp"),
        (MOONCAKE.replace("3000", "7000"), "request 3 comes before"),
        (AZURE.replace("ContextTokens", "Context"), "line 1: no column ContextTokens"),
        (AZURE.replace("318", "many"), "line 3: invalid literal"),
        (AZURE.replace("318", "-3"), "line 3: a number of tokens is below 0"),
        (AZURE.replace("2023-11-16 18:17:04.0319600", "soon"), "line 3: Invalid isoformat"),
    ],
)
def test_a_bad_trace_is_explained_with_its_line(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=complaint):
        list(TraceLoad(path=written(tmp_path, text)).requests())


def test_a_missing_trace_is_explained(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        list(TraceLoad(path=tmp_path / "none").requests())
