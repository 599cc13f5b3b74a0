"""`baton support-bundle` of a stack that has served has all that helps, and no key, password, prompt or output."""

from __future__ import annotations

import json
import tarfile
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integration.observability.conftest import KEY, SECRET_PROMPT, TRACE, WatchedStack, ask
from tests.support.cluster.stack import RunningStack

STRANGE = "Ottokar von Nirgendwo"
"""What clients say in wrong requests, of which errors tell."""


def contents(archive: Path) -> Mapping[str, str]:
    """Every file below the archive's folder."""
    with tarfile.open(archive) as bundle:
        files = {member.name: bundle.extractfile(member) for member in bundle.getmembers()}
        return {name.partition("/")[2]: file.read().decode() for name, file in files.items() if file is not None}


@pytest.fixture(scope="module")
def bundle(watched: WatchedStack, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    stack = watched.stack
    wrong = (
        {"model": STRANGE},
        {"model": stack.model, "max_tokens": STRANGE},
        {"model": stack.model, "tools": [STRANGE]},
    )
    for fields in wrong:
        answer = ask(stack, "/v1/chat/completions", messages=[{"role": "user", "content": SECRET_PROMPT}], **fields)
        assert answer.status_code >= 400
    pid = stack.kill("tokenizer-1")
    stack.replaced("tokenizer-1", pid)
    with (stack.run_dir / "logs" / "engine-1-rank0.log").open("a") as log:  # as a library of the model's may write
        log.write(f"RuntimeError: cannot read {SECRET_PROMPT}\n{SECRET_PROMPT}\n")
        log.write(
            json.dumps({"time": "2026-01-01T00:00:00.000Z", "event": f"saw {SECRET_PROMPT}", "text": STRANGE}) + "\n"
        )
    path = tmp_path_factory.mktemp("bundle") / "bundle.tar.gz"
    done = stack.baton("support-bundle", "--output", str(path))
    assert done.returncode == 0, done.stderr
    assert path.stat().st_mode & 0o077 == 0
    return contents(path)


def test_it_says_what_runs_and_how_it_is(stack: RunningStack, bundle: Mapping[str, str]) -> None:
    instances = {member.instance for member in stack.state.members}
    assert json.loads(bundle["versions.json"])["baton"]
    assert {finding["name"] for finding in json.loads(bundle["doctor.json"])} >= {
        "Python",
        "NATS",
        "gateway",
        "services",
    }
    state = json.loads(bundle["state.json"])
    assert {member["instance"] for member in state["members"]} == instances
    assert state["spec"]["settings"]["*"]["trace_sample_rate"] == "0.0"
    assert json.loads(bundle["processes.json"]).keys() <= instances
    assert {f"metrics/{instance}.txt" for instance in instances} <= bundle.keys()
    assert "baton_gateway_requests_total" in bundle["metrics/gateway-1.txt"]


def test_it_has_the_ways_of_the_newest_requests(bundle: Mapping[str, str]) -> None:
    traces = json.loads(bundle["traces.json"])
    ways = [trace for trace in traces if trace["trace"] == TRACE]
    assert len({way["request"] for way in ways}) >= 2
    for way in ways:
        assert {hop["instance"].rpartition("-")[0] for hop in way["hops"]} >= {"gateway", "coordinator", "engine"}
        assert all(hop["ended"] >= hop["begun"] for hop in way["hops"])


def test_logs_keep_events_names_and_times(bundle: Mapping[str, str]) -> None:
    gateways = [line for name in ("gateway-1", "gateway-2") for line in bundle[f"logs/{name}.log"].splitlines()]
    audits = [fields for line in gateways if (fields := json.loads(line))["event"] == "audit"]
    served = [fields for fields in audits if fields["status"] == 200]
    assert len(served) == 2
    assert all(fields["trace"] == TRACE and fields["output_tokens"] == 24 and fields["time"] for fields in served)
    assert "Starting nats-server" in bundle["logs/nats-server.log"]
    rank = bundle["logs/engine-1-rank0.log"]
    assert "RuntimeError: (removed)" in rank
    assert '"event":"phase"' in rank


def test_no_secret_and_no_text_is_in_it(watched: WatchedStack, bundle: Mapping[str, str]) -> None:
    state = watched.stack.state
    secrets = {KEY, *state.nats_passwords.values(), state.nats_password, state.redis_password}
    assert len(secrets) > 5
    assert None not in secrets
    words = {"Wilhelmina", "boathouse", "Ottokar", "Nirgendwo"}
    outputs = {output.strip()[:12] for output in watched.outputs}
    assert all(len(output) >= 8 for output in outputs)
    for looked_for in (*secrets, *words, *outputs):
        for spelled in {looked_for, urllib.parse.quote(looked_for), json.dumps(looked_for)[1:-1]}:
            assert [name for name, text in bundle.items() if spelled in text] == [], spelled
