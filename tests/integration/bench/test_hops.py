"""`baton bench hops` on a whole stack with a simulated device: messages and bytes of real processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from services.bench.hops.command import hops_options
from tests.support.cluster.stack import running_stack

REQUEST_HOPS = 6


def test_every_hop_of_a_token_and_of_a_request_is_measured(tmp_path: Path) -> None:
    with running_stack(tmp_path, device="sim", more=("--sim-step-ms=20",), kvstore="0") as stack:
        flags = ("--streams", "4", "--seconds", "2", "--requests", "8", "--output-len", "1500", "--json")
        real_time = ("--real-time",) if os.geteuid() == 0 else ()  # others are not allowed to
        done = stack.baton("bench", "hops", *flags, *real_time)
        assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["request"]) == REQUEST_HOPS
    assert all(hop["count"] > 0 for hop in result["request"].values())
    (level,) = result["levels"]
    assert (level["streams"], level["steps"] > 10) == (4, True)
    assert level["tokens"] >= 4 * level["steps"]
    assert all(hop["count"] > 0 and hop["p50_us"] > 0 for hop in level["hops"].values())
    sent = {name.partition(":")[0]: hop["bytes_per_step"] for name, hop in level["hops"].items()}
    assert sent["detokenizer"] > 4 * 20, "four streams' text, with their names"
    assert level["frame_bytes"] > 100, "a chunk in OpenAI's shape"
    assert set(level["processor_us_per_step"]) >= {"gateway", "scheduler", "worker", "detokenizer", "nats-server"}


def test_bad_flags_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        hops_options(["--streams", "0"])
    assert ended.value.code == 2
    assert "'0': a whole number from 1 is expected" in capsys.readouterr().err
