"""The three benchmarks, as a user types them, against a small server that streams words."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.bench.__main__ import main
from services.bench.client.processes import find_stack, used
from services.bench.options import serve_options
from tests.support.cluster.openai_server import FakeOpenAI, count
from tests.support.paths import DEMO_MODEL


class Server:
    """A FakeOpenAI on a thread of its own: the benchmark's `main` runs its own event loop."""

    def __init__(self, **options: Any) -> None:
        self.fake = FakeOpenAI(**options)
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        async with self.fake:
            self._up.set()
            await self._end.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.01)

    def __enter__(self) -> FakeOpenAI:
        self._thread.start()
        assert self._up.wait(60)
        return self.fake

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(60)
        self._loop.close()


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    with Server() as fake:
        yield fake


def bench(command: str, fake: FakeOpenAI, flags: str, *, file: Path) -> dict[str, Any]:
    assert main([command, "--base-url", fake.url, "--result-file", str(file), *flags.split()]) == 0
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def test_serve_counts_what_the_server_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-prompts 20 --input-len 24 --output-len 6 --max-concurrency 4 --warmup 2 --detailed"
    with Server(interval=0.002) as fake:
        result = bench("serve", fake, f"{flags} --goodput ttft:60000", file=tmp_path / "deep" / "result.json")
    assert (result["completed"], result["failed"]) == (20, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (480, 120)
    assert result["input_lens"] == [24] * 20
    assert result["output_lens"] == [6] * 20
    assert [len(itls) for itls in result["itls"]] == [5] * 20
    assert result["max_concurrent_requests"] == fake.most_concurrent == 4
    assert result["request_goodput"] == result["request_throughput"]
    assert result["model_id"] == "fake"
    assert result["request_rate"] == "inf"
    assert result["mean_e2el_ms"] >= result["mean_ttft_ms"] > 0
    assert result["client_cpu_s"] > 0
    assert len(fake.bodies) == 22
    assert all(len(body["prompt"]) == 24 and body["stream_options"]["include_usage"] for body in fake.bodies)
    assert all(body["ignore_eos"] for body in fake.bodies), "random prompts have answers of exact lengths"
    assert len({tuple(body["prompt"]) for body in fake.bodies}) == 22
    printed = capsys.readouterr().out
    assert "Output token throughput (tok/s):" in printed
    assert "P99 ITL (ms):" in printed
    assert "Client CPU (s):" in printed


def test_connections_are_kept(server: FakeOpenAI, tmp_path: Path) -> None:
    bench("serve", server, "--num-prompts 30 --output-len 2 --max-concurrency 3", file=tmp_path / "r")
    assert server.connections <= 4


def test_chat_prompts_have_their_length_by_the_servers_own_count(server: FakeOpenAI, tmp_path: Path) -> None:
    flags = "--endpoint chat --num-prompts 5 --input-len 30 --output-len 4 --random-range-ratio 0.4"
    result = bench("serve", server, f"{flags} --request-rate 200 --ignore-eos", file=tmp_path / "r")
    lengths = [count(body) for body in server.bodies]
    assert result["total_input_tokens"] == sum(lengths[1:])
    assert all(18 <= length <= 42 for length in lengths)
    assert all(body["ignore_eos"] and "messages" in body for body in server.bodies)


def test_text_prompts_have_their_length_by_the_servers_own_count(server: FakeOpenAI, tmp_path: Path) -> None:
    bench("serve", server, "--prompt-format text --num-prompts 4 --input-len 9 --output-len 1", file=tmp_path / "r")
    assert [count(body) for body in server.bodies] == [9] * 5
    assert all(isinstance(body["prompt"], str) for body in server.bodies)


def test_shared_prefixes_reach_the_server(server: FakeOpenAI, tmp_path: Path) -> None:
    sizes = "--prefix-groups 3 --prefix-questions 4 --prefix-len 32 --question-len 8 --output-len 2"
    result = bench("serve", server, f"--dataset shared-prefix --warmup 0 {sizes}", file=tmp_path / "r")
    assert result["num_prompts"] == result["completed"] == 12
    assert len({tuple(body["prompt"][:32]) for body in server.bodies}) == 3


def test_vllms_names_for_shared_prefixes_are_understood(server: FakeOpenAI, tmp_path: Path) -> None:
    flags = "--dataset-name prefix_repetition --num-prompts 10 --warmup 0 --prefix-repetition-num-prefixes 5"
    sizes = "--prefix-repetition-prefix-len 16 --prefix-repetition-suffix-len 4 --prefix-repetition-output-len 3"
    result = bench("serve", server, f"{flags} {sizes}", file=tmp_path / "r")
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (10, 200, 30)
    beginnings = [tuple(body["prompt"][:16]) for body in server.bodies]
    assert [beginnings.count(each) for each in set(beginnings)] == [2] * 5


def test_the_hit_rate_is_what_the_server_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--num-prefixes 2 --prefix-questions 5 --prefix-len 24 --suffix-len 6 --output-len 2 --vocab-size 100000"
    with Server(prefix_cache=True) as fake:
        flags = f"--dataset shared-prefix --warmup 0 --max-concurrency 1 --detailed {sizes}"
        result = bench("serve", fake, flags, file=tmp_path / "r")
    assert sorted(result["cached_tokens"]) == [0, 0, *[24] * 8]
    assert result["cache_hit_rate"] == pytest.approx(8 * 24 / 300)
    assert (result["cached_requests"], result["uncached_requests"]) == (8, 2)
    assert "Requests half or more cached:" in capsys.readouterr().out


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_conversations_go_on_from_the_servers_own_answers(
    endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--num-conversations 4 --num-turns 3 --user-len 8 --output-len 5 --system-len 10"
    flags = f"--dataset multi-turn --endpoint {endpoint} --warmup 0 --max-concurrency 2 {sizes}"
    with Server(prefix_cache=True, verbose=True) as fake:
        result = bench("serve", fake, flags, file=tmp_path / "r")
        assert fake.most_concurrent <= 2
    assert (result["completed"], result["num_prompts"]) == (12, 12)
    first, second, third = result["turns"]
    assert [turn["completed"] for turn in (first, second, third)] == [4, 4, 4]
    assert third["mean_input_tokens"] > second["mean_input_tokens"] > first["mean_input_tokens"]
    assert third["cache_hit_rate"] > second["cache_hit_rate"] > 0.5
    for body in fake.bodies:
        said = re.findall(r"said\d+-\d", json.dumps(body))
        assert len(said) in (0, 5, 10)
        assert [number[-1] for number in said] == list("01234") * (len(said) // 5)
    assert "By turn (ms)" in capsys.readouterr().out


def test_a_conversation_ends_with_its_first_failure(tmp_path: Path) -> None:
    with Server(fail_every=2) as fake:
        flags = ["--dataset", "multi-turn", "--num-conversations", "1", "--num-turns", "5", "--warmup", "0"]
        assert main(["serve", "--base-url", fake.url, "--result-file", str(tmp_path / "r"), *flags]) == 1
    result = json.loads((tmp_path / "r").read_text())
    assert (result["completed"], result["failed"], result["num_prompts"]) == (1, 1, 5)


def test_conversations_from_a_file_reach_the_server(server: FakeOpenAI, tmp_path: Path) -> None:
    turns = [(f"what is the number after {i}", f"the number after that one is {i + 1}") for i in range(6)]
    entries = [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in turns]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(entries))
    flags = f"--dataset sharegpt --dataset-path {path} --endpoint chat --num-prompts 5 --warmup 1"
    result = bench("serve", server, flags, file=tmp_path / "r")
    assert (result["completed"], result["total_output_tokens"]) == (5, 35)
    assert {body["messages"][0]["content"] for body in server.bodies} == {question for question, _ in turns}


def test_a_local_tokenizer_is_enough(server: FakeOpenAI, tmp_path: Path) -> None:
    tokenizer = DEMO_MODEL
    flags = f"--tokenizer {tokenizer} --num-prompts 3 --input-len 12 --output-len 1 --warmup 0"
    bench("serve", server, flags, file=tmp_path / "r")
    assert all(len(body["prompt"]) == 12 for body in server.bodies)
    bench("serve", server, f"{flags} --prompt-format text", file=tmp_path / "r")
    local = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    assert [len(local.encode(body["prompt"]).ids) for body in server.bodies[3:]] == [12] * 3


def test_the_same_seed_asks_the_same_and_says_so_where_that_was_cached(
    server: FakeOpenAI, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.prefix_cache = True
    said = []
    for _ in range(2):
        bench("serve", server, "--num-prompts 4 --output-len 2 --max-concurrency 1", file=tmp_path / "r")
        said.append(capsys.readouterr().err)
    assert server.bodies[:5] == server.bodies[5:]
    assert [("cached for 4 of 4 requests" in each) for each in said] == [False, True]


def test_failures_are_counted_explained_and_end_in_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(fail_every=3) as fake:
        flags = ["--base-url", fake.url, "--num-prompts", "9", "--output-len", "2", "--warmup", "0", "--json"]
        assert main(["serve", *flags]) == 1
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["completed"], result["failed"]) == (6, 3)
    assert result["total_output_tokens"] == 12
    assert "HTTP 503: told to fail" in printed.err
    assert result["error_kinds"] == ["HTTP 503: told to fail"]


def test_latency_repeats_a_batch(server: FakeOpenAI, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--batch-size 3 --input-len 8 --output-len 4 --num-iters 5 --num-iters-warmup 2"
    result = bench("latency", server, flags, file=tmp_path / "r")
    assert len(result["latencies"]) == 5
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 5)
    assert set(result["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert len(server.bodies) == 21
    assert all("stream" not in body and body["ignore_eos"] for body in server.bodies)
    assert "Avg latency (s):" in capsys.readouterr().out


def test_throughput_sends_everything_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(interval=0.05) as fake:
        flags = "--num-prompts 40 --input-len 8 --output-len 4 --num-iters-warmup 0"
        result = bench("throughput", fake, flags, file=tmp_path / "r")
        assert fake.most_concurrent == 40
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (320, 160)
    assert result["total_num_tokens"] == 480
    assert result["tokens_per_second"] == pytest.approx(3 * result["output_tokens_per_second"])
    assert "Output token throughput" in capsys.readouterr().out


STEADY = "--streams 3 --stream-output-len 20 --quiet 1 --duration 0.4 --long-rate 20 --long-input-len 50"


def test_steady_streams_are_measured_before_and_while_long_prompts_arrive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    first, plot = tmp_path / "first.json", tmp_path / "plot.svg"
    with Server(interval=0.004) as fake:
        bench("interference", fake, f"{STEADY} --label one", file=first)
        fake.bodies.clear()
        result = bench("interference", fake, f"{STEADY} --plot {plot} --beside {first}", file=tmp_path / "second")
    lengths = [len(body["prompt"]) for body in fake.bodies]
    assert set(lengths) == {32, 50}
    assert lengths.count(50) == result["long_prompts"] + 1 > 1
    assert result["failed"] == 0
    for phase in ("quiet", "disturbed"):
        assert result[phase]["tokens"] > 0
        assert result[phase]["max_itl_ms"] >= result[phase]["p99_itl_ms"] >= result[phase]["median_itl_ms"] >= 0
    assert 0 < result["median_long_ttft_ms"] <= result["p99_long_ttft_ms"]
    assert plot.stat().st_size > 5000
    assert "P99 ITL, times that before:" in capsys.readouterr().out


def test_what_keeps_interference_from_being_measured_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Server(interval=0.2) as fake:
        flags = ["--base-url", fake.url, "--quiet", "0.05", "--duration", "0.1", "--long-rate", "50"]
        assert main(["interference", *flags, "--streams", "2", "--stream-output-len", "2", "--warmup", "0"]) == 1
        assert "a longer --quiet" in capsys.readouterr().err
    with Server(fail_every=1) as fake:
        assert main(["interference", "--base-url", fake.url, "--quiet", "0.05", "--duration", "0.1"]) == 1
        assert "told to fail" in capsys.readouterr().err
        assert main(["interference", "--base-url", fake.url, "--beside", str(tmp_path / "nowhere")]) == 1
        assert "--beside" in capsys.readouterr().err


def test_the_servers_processes_are_found_by_its_port(server: FakeOpenAI) -> None:
    found = find_stack(server.url)
    assert os.getpid() in found.values()
    assert all(reading.seconds >= 0 and reading.actor for reading in used(found).values())
    assert find_stack("http://192.0.2.1:80") == {}
    assert used({"nobody": 2**22 + 1}) == {}


def test_named_processes_are_reported(server: FakeOpenAI, tmp_path: Path) -> None:
    pids = f"mine={os.getpid()},gone={2**22 + 1}"
    result = bench("serve", server, f"--num-prompts 3 --output-len 2 --pids {pids}", file=tmp_path / "r")
    (share,) = result["server_cpu"]
    assert share["name"] == "mine"
    assert share["us_per_token"] == pytest.approx(share["seconds"] * 1e6 / result["total_output_tokens"])


def test_a_server_that_is_not_there_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--base-url", "http://127.0.0.1:1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench: 127.0.0.1:1 cannot be reached: ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("serve --request-rate 0", "--request-rate"),
        ("serve --num-prompts x", "--num-prompts"),
        ("serve --goodput itl:5", "--goodput"),
        ("serve --percentiles 50,101", "--percentiles"),
        ("serve --dataset sharegpt", "--dataset-path"),
        ("serve --dataset shared-prefix --prefix-popularity -1", "--prefix-popularity"),
        ("serve --dataset multi-turn --num-prompts 3", "--num-conversations"),
        ("serve --dataset multi-turn --prompt-format tokens", "--prompt-format"),
        ("serve --endpoint chat --prompt-format tokens", "--prompt-format"),
        ("serve --pids nonsense", "NAME=PID"),
        ("serve --extra-body []", "JSON object"),
        ("latency --batch-size 0", "--batch-size"),
    ],
)
def test_a_bad_flag_is_named(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_answers_end_where_the_model_ends_them_unless_prompts_are_random() -> None:
    assert serve_options([]).ignore_eos
    assert not serve_options(["--no-ignore-eos"]).ignore_eos
    assert not serve_options(["--dataset", "shared-prefix"]).ignore_eos
    assert serve_options(["--dataset", "shared-prefix", "--ignore-eos"]).ignore_eos


def test_a_command_that_is_none_shows_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 2
    assert "throughput" in capsys.readouterr().err
    assert main(["--help"]) == 0
