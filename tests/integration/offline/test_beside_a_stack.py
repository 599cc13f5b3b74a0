"""One stack, and beside it the offline engine, batches, recording, replaying and `baton top`: they agree."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.batch.own_engine import offline_engine
from deploy.cli.batch.run import answer_batch
from deploy.cli.journals import list_journal, replay_journal
from deploy.model_choice import DEMO_MODEL
from services.offline import LLM, SamplingParams
from services.scheduler.replay import replay
from shared.journals.journal import Journal
from shared.journals.traffic import recorded_messages
from tests.support.cluster.stack import RunningStack, running_stack

PROMPTS = ["The capital of France is", "Once upon a time", "1 + 1 =", "Count from 1 to 9:", "The opposite of hot is"]
ENGINE = {"device": "cpu", "dtype": "float32", "kv_memory": "32MiB", "settings": {"worker.threads": 1}}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("stack")
    (folder / "journals").mkdir()
    settings = [f"scheduler.journal={folder / 'journals'}", "scheduler.journal_contents=true", "worker.threads=1"]
    with running_stack(folder, kvstore="0", settings=settings, more=["--kv-memory=32MiB"]) as stack:
        yield stack


def completion(stack: RunningStack, prompt: str, **more: Any) -> str:
    body = json.dumps({"prompt": prompt, "temperature": 0, "max_tokens": 24, **more}).encode()
    request = urllib.request.Request(f"{stack.url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["text"])


def test_offline_text_is_the_served_text(stack: RunningStack) -> None:
    served = [completion(stack, prompt) for prompt in PROMPTS]
    with LLM(str(DEMO_MODEL), **ENGINE) as llm:  # type: ignore[arg-type]
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    assert [output.outputs[0].text for output in outputs] == served


def comparable(path: Path) -> dict[str, Any]:
    """Entries by custom_id, without what goes by the moment: ids, times, and what lay in a cache."""
    found = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        body = (entry["response"] or {}).get("body", {})
        for key in ("id", "created"):
            body.pop(key, None)
        body.get("usage", {}).pop("prompt_tokens_details", None)
        found[entry["custom_id"]] = entry
    return found


def test_a_batch_has_the_same_bodies_from_the_stack_and_from_an_engine_of_its_own(
    stack: RunningStack, tmp_path: Path
) -> None:
    bodies: list[dict[str, Any]] = [{"model": stack.model, "prompt": prompt, "max_tokens": 8} for prompt in PROMPTS]
    bodies[1] |= {"n": 2, "logprobs": 1, "seed": 3}
    bodies[2] |= {"temperature": -1}
    bodies[3] |= {"model": "another"}
    chat = {"model": stack.model, "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 8}
    urls = ["/v1/completions"] * len(bodies) + ["/v1/chat/completions"]
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": url, "body": {"temperature": 0, **body}}
        for i, (url, body) in enumerate(zip(urls, [*bodies, chat], strict=True))
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = stack.baton("batch", str(source), "-o", str(tmp_path / "served"))
    assert done.returncode == 0, done.stderr
    engine = offline_engine(str(DEMO_MODEL), {**ENGINE, "served_model_name": stack.model})
    answer_batch(source, tmp_path / "offline", engine, 8)
    served = comparable(tmp_path / "served")
    assert served == comparable(tmp_path / "offline")
    statuses = [served[f"r{i}"]["response"]["status_code"] for i in range(len(lines))]
    assert statuses == [200, 200, 400, 404, 200, 200]


def test_top_shows_where_the_time_went(stack: RunningStack) -> None:
    watching = start(stack, "top", "--once", "--json", "--interval=1")
    while watching.poll() is None:
        completion(stack, PROMPTS[0] * 8, max_tokens=100, ignore_eos=True)
    found = json.loads(watching.communicate(timeout=60)[0])
    (engine,) = found["engines"]
    (rank,) = engine["ranks"]
    assert engine["tokens_per_second"] > 0
    assert rank["steps_per_second"] > 0
    assert 0 <= rank["idle_share"] < 1
    assert rank["forward_ms"] > 0
    assert engine["hit_rate"] > 0, "the same prompt again and again"
    assert {each["service"] for each in found["others"]} >= {"gateway", "tokenizer", "coordinator", "detokenizer"}


def start(stack: RunningStack, *argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "deploy.cli", *argv, "--run-dir", str(stack.run_dir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_what_a_scheduler_hears_is_recorded_and_its_own_journal_replays(
    stack: RunningStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "heard.journal"
    recording = start(stack, "record", str(path), "--engine=engine-1", "--for=2s")
    while recording.poll() is None:
        completion(stack, PROMPTS[1], max_tokens=8)
    said = recording.communicate(timeout=60)[1]
    assert recording.returncode == 0, said
    with Journal(path) as journal:
        subjects = {heard.subject for heard in recorded_messages(journal)}
    assert {"engine.engine-1.requests", "engine.engine-1.results", "lifecycle.gateway.gateway-1"} <= subjects
    assert "engine.engine-1.steps" not in subjects
    capsys.readouterr()
    list_journal(path, as_json=False)
    assert "engine.engine-1.requests" in capsys.readouterr().out

    (decisions,) = (stack.run_dir.parent / "journals").iterdir()
    copy = tmp_path / "engine-1.journal"
    copy.write_bytes(decisions.read_bytes())  # the scheduler goes on writing
    replay_journal(copy, as_json=False)
    assert "answers are the same" in capsys.readouterr().out
    result = replay(copy)
    assert result.difference is None
    assert result.events > 100

    tampered = bytearray(copy.read_bytes())
    at = tampered.rindex(b"StepFinished")
    start_of_digest = tampered.index(b"\xc4\x10", at) + 2
    tampered[start_of_digest] ^= 1
    copy.write_bytes(tampered)
    told = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "replay", str(copy)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 1
    assert "is decided differently" in told.stdout
    assert "expected" in told.stdout
