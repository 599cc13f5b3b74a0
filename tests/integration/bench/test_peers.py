"""The peer beside ours: transformers has the same weights, gives its own tokens, and every end is told."""

from __future__ import annotations

import asyncio
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.errors import CommandError
from services.bench.client.api import BenchRequest
from services.bench.statistics import BenchResult, RequestOutcome
from tests.campaigns import transformers_process as peer_process
from tests.campaigns.peers import LoadFigures, Side
from tests.campaigns.peers_options import peers_options
from tests.campaigns.peers_report import described, shown
from tests.campaigns.transformers_peer.__main__ import main
from tests.campaigns.transformers_peer.answering import PeerFailed, answer_all, load
from tests.campaigns.transformers_peer.wire import PeerReady, PeerSettings
from tests.campaigns.transformers_process import peer
from tests.support.models.tiny_models import make_config, make_model
from tests.support.worker.plan_driver import Driver
from tests.support.worker.tiny_backend import tiny_backend

PROMPTS = [[7, 3, 99, 12, 150, 31, 8], [44, 5], [(11 * place) % 150 + 3 for place in range(40)]]
OUTPUT = 8


def asked(folder: Path, /, **different: Any) -> PeerSettings:
    known = {"device": "cpu", "dtype": "float32", "threads": 1, "prompt_tokens": 40, "output_tokens": OUTPUT}
    return PeerSettings(**{"folder": str(folder), "requests": len(PROMPTS), **known, **different})


@pytest.mark.parametrize("family", ["llama-biased-tied", "qwen3", "gemma2", "mixtral", "qwen3-moe"])
def test_made_up_weights_are_those_that_our_worker_makes_up(family: str, tmp_path: Path) -> None:
    config = make_config(family)
    architecture = type(config).__name__.replace("Config", "ForCausalLM")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": [architecture]}))
    driver = Driver(tiny_backend(tmp_path, load_format="dummy", dtype="float32"), budget=64)
    ours = [driver.add(prompt, OUTPUT) for prompt in PROMPTS]
    driver.run()
    theirs = load(asked(tmp_path, load_format="dummy"), torch.device("cpu"))
    for prompt, sequence in zip(PROMPTS, ours, strict=True):
        with torch.inference_mode():
            every = theirs(torch.tensor([prompt + sequence.output])).logits[0].argmax(dim=-1).tolist()
        assert every[len(prompt) - 1 : -1] == sequence.output
    assert len({tuple(sequence.output) for sequence in ours}) == len(PROMPTS)


async def test_it_answers_what_is_asked_at_once_with_the_tokens_of_the_model(tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path)
    async with peer(asked(tmp_path), timeout=60.0) as other:
        assert other.ready.attention == "sdpa"
        answers = await asyncio.gather(*(other.answer(BenchRequest(prompt, len(prompt), OUTPUT)) for prompt in PROMPTS))
        outcome = await other.ask(BenchRequest(PROMPTS[0], len(PROMPTS[0]), OUTPUT))
    assert [answer.tokens for answer in answers] == [model.greedy(prompt, OUTPUT) for prompt in PROMPTS]
    assert all(len(answer.times) == OUTPUT and answer.times == sorted(answer.times) for answer in answers)
    assert outcome.error is None
    assert (outcome.prompt_tokens, outcome.output_tokens) == (len(PROMPTS[0]), OUTPUT)
    assert 0 < outcome.ttft <= outcome.latency


@pytest.mark.parametrize(
    ("different", "reason"),
    [
        ({"device": "cuda"}, "PyTorch sees no CUDA device"),
        ({"settings": {"page": 3}}, "unexpected keyword argument 'page'"),
        ({"folder": "/nowhere"}, "/nowhere"),
    ],
)
def test_what_transformers_cannot_is_told(different: dict[str, Any], reason: str, tmp_path: Path) -> None:
    if "device" in different and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    make_model("llama", tmp_path)
    with pytest.raises(PeerFailed, match=reason):
        answer_all(asked(tmp_path, **different), BytesIO(), lambda *told: None)


async def test_a_peer_that_refuses_is_heard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "refusing.py").write_text("""print('{"type":"refused","reason":"not on Sundays"}')""")
    monkeypatch.setattr(peer_process, "MODULE", "refusing")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CommandError, match="not on Sundays"):
        async with peer(asked(tmp_path), timeout=60.0):
            pass


DIES = """
print('{"type":"ready","transformers":"0","device":"CPU","dtype":"float32","attention":"none","load_seconds":0.0,'
      '"warm_up_seconds":0.0,"settings":{}}', flush=True)
sys.stdin.readline()
"""


async def test_a_peer_that_dies_fails_what_waits_and_what_comes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "dying.py").write_text(DIES)
    monkeypatch.setattr(peer_process, "MODULE", "dying")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with peer(asked(tmp_path), timeout=60.0) as other:
        first = await other.ask(BenchRequest([1, 2], 2, 4))
        second = await other.ask(BenchRequest([1, 2], 2, 4))
    assert [each.error for each in (first, second)] == ["transformers' process ended"] * 2


def test_a_question_that_is_none_is_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['{"folder": 3}']) == 2
    assert "$.folder" in capsys.readouterr().err


def test_loads_are_typed_as_for_serve_and_have_prompts_of_their_own() -> None:
    options = peers_options(["--max-concurrency", "4,inf", "--num-prompts", "9", "--random-output-len", "5"], "--tp 2")
    assert [load.max_concurrency for load in options.loads] == [4, None]
    assert [load.seed for load in options.loads] == [0, 1]
    assert all((load.num_prompts, load.output_len, load.ignore_eos) == (9, 5, True) for load in options.loads)
    assert options.up == ["--tp", "2"]


@pytest.mark.parametrize(
    "flags", [["--dataset", "multi-turn"], ["--prompt-format", "text"], ["--max-concurrency", "0"]]
)
def test_what_transformers_cannot_be_asked_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers_options(flags, None)
    assert "error" in capsys.readouterr().err


def side(begin: float, gap: float, tokens: int = 11, ready: PeerReady | None = None) -> Side:
    times = [begin + gap * number for number in range(tokens)]
    outcome = RequestOutcome(0.0, times[-1], 4, 11, times)
    options = peers_options(["--num-prompts", "1", "--max-concurrency", "2"], None).loads[0]
    idle = {} if ready else {"idle": 0.02, "prepare": 0.01}
    return Side([LoadFigures(options, BenchResult([outcome], times[-1], 1, 0.0), idle)], [[1, 2, 3], [4, 5]], ready)


READY = PeerReady(
    transformers="5.0",
    device="CPU",
    dtype="float32",
    attention="sdpa",
    load_seconds=1.0,
    warm_up_seconds=2.0,
    settings={"num_blocks": 4},
)


def test_a_ratio_above_one_is_always_in_our_favour() -> None:
    options = peers_options([], None)
    theirs = side(0.4, 0.02, ready=READY)._replace(greedy=[[1, 2, 3], [4, 6]])
    result = described(options, side(0.1, 0.01), theirs)
    (load,) = result["loads"]
    assert load["ratios"]["median_ttft_ms"] == pytest.approx(4.0)
    assert load["ratios"]["median_itl_ms"] == pytest.approx(2.0)
    assert load["ratios"]["output_throughput"] == pytest.approx(3.0)
    assert result["greedy"] == {"prompts": 2, "equal": 1, "tokens": 5, "tokens_before_the_first_other": 4}
    text = shown(result)
    assert "| TTFT p50 ms | 100.00 | 400.00 | 4.00 × |" in text
    assert "1 of 2 answers equal, 4 of 5 tokens" in text
    assert "2.0% idle between steps, 1.0% preparing" in text


def test_answers_that_were_begun_anew_are_told() -> None:
    result = described(peers_options([], None), side(0.1, 0.01), side(0.1, 0.01, tokens=6, ready=READY))
    assert "began 1 answers anew" in shown(result)


def test_a_load_that_transformers_has_not_come_to_is_left_open() -> None:
    ours, theirs = side(0.1, 0.01), side(0.4, 0.02, ready=READY)
    result = described(peers_options([], None), ours._replace(loads=ours.loads * 2), theirs)
    assert [load["transformers"] is None for load in result["loads"]] == [False, True]
    assert "| TTFT p50 ms | 100.00 | - | - |" in shown(result)


def test_baton_alone_has_a_table_too() -> None:
    text = shown(described(peers_options(["--peer", "none"], None), side(0.1, 0.01), None))
    assert "| TTFT p50 ms | 100.00 | - | - |" in text
    assert "greedy" not in text
