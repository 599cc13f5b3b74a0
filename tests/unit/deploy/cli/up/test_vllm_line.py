"""A line of `vllm serve` behind `baton up`."""

from __future__ import annotations

import itertools
import shlex

import pytest

from deploy.cli.app import loaded
from deploy.cli.up.vllm_line import CONVERTED, INSTEAD, NEEDLESS, SAME, SETTINGS, switches_of, translated
from deploy.configuration import CONFIGS
from deploy.errors import CommandError
from shared.settings import settings_of

THEIRS = """
    owner/qwen:Q8_0 --revision v1.0 --max_model_len=4096 --gpu-memory-utilization 0.9 -tp 2 --enable-prefix-caching
    --served-model-name a b --api-key k l --chat-template f.jinja --tool-call-parser hermes
    --enable-auto-tool-choice --reasoning-parser deepseek_r1 --max-num-batched-tokens 2048 --dtype half
    --trust-remote-code --kv-cache-dtype=fp8_e4m3 --disable-log-requests --speculative-config '{"method": "ngram"}'
    --enable-lora --ssl-certfile c.pem --ssl-keyfile=k.pem --lora-modules x=/a '{"name": "y", "path": "/b"}'
"""
OURS = """
    --model owner/qwen@v1.0:Q8_0 --max-model-len=4096 --gpu-memory-utilization 0.9 --tp 2
    --enable-prefix-caching --served-model-name a --alias b --api-key k --api-key l
    --set tokenizer.chat_template=f.jinja --tool-call-parser hermes --reasoning-parser deepseek_r1
    --max-batch-tokens 2048 --dtype float16 --trust-remote-code
    --kv-cache-dtype fp8 --speculative '{"method": "ngram"}' --ssl-certfile c.pem --ssl-keyfile=k.pem
    --lora x=/a --lora y=/b
"""


def options() -> set[str]:
    return {name for each in loaded("up").params for name in (*each.opts, *each.secondary_opts)}


def test_a_usual_line_comes_to_options_of_ours() -> None:
    line, said = translated(shlex.split(THEIRS), switches_of(loaded("up")))
    assert line == shlex.split(OURS)
    assert [each.partition(" ")[0] for each in said] == [
        *("--enable-auto-tool-choice", "--disable-log-requests", "--enable-lora")
    ]
    assert {each.partition("=")[0] for each in line if each.startswith("--")} <= options()


def test_values_that_are_written_otherwise_are_converted() -> None:
    line, _ = translated(
        [
            *("m", "--limit-mm-per-prompt", '{"image": 2, "video": {"count": 1}}', "--allowed-origins", '["a", "b"]'),
            *("--structured-outputs-config", '{"backend": "guidance"}', "--kv-offloading-size=1.5"),
            *("--tokenizer-mode", "auto", "--tokenizer", "owner/t", "--tokenizer-revision", "v2"),
        ]
    )
    assert line == [
        *("--model", "m", "--set", "gateway.max_images=2", "--set", "gateway.max_videos=1"),
        *("--set", "gateway.cors_origins=a,b", "--grammar-backend", "llguidance"),
        *("--kvstore-memory", str(3 * 2**29), "--tokenizer", "owner/t@v2"),
    ]
    settings = [each for name, each in itertools.pairwise(line) if name == "--set"]
    for service, _, key in (each.partition("=")[0].partition(".") for each in settings):
        assert key in settings_of(CONFIGS[service])


def test_a_line_of_ours_stays_as_it_is() -> None:
    line = ["--model", "a_b", "--set", "worker.seed_x=-1", "--lora", "x=/a_b", "-d", "--no-enable-prefix-caching"]
    assert translated(line) == (line, [])
    assert translated([]) == ([], [])
    assert translated(["--scheduling-policy"]) == (["--scheduling-policy"], []), "what lacks its value says the parser"


@pytest.mark.parametrize(
    "line", ["--detach m", "--port 0 m", "--port=0 -d m", "--enable-auto-tool-choice m", "--api-key=k m"]
)
def test_a_model_may_stand_behind_options(line: str) -> None:
    made, _ = translated(shlex.split(line), switches_of(loaded("up")))
    assert made[-2:] == ["--model", "m"]
    assert translated(["a", "--port", "0", "b"])[0] == ["--model", "a", "--port", "0", "b"], "two say the parser"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["m", "--seed", "0"], "--seed is vLLM's and no option here: requests have seeds"),
        (["--revision", "v1"], "--revision: of one model"),
        (["m", "--ssl-cert-reqs=2"], "--ssl-ca-certs"),
        (["m", "--tokenizer-revision", "v1"], "--tokenizer-revision: of one tokenizer with --tokenizer"),
        (["m", "--limit-mm-per-prompt", '{"image": -1}'], "image: a number from 0 on is expected"),
        (["m", "--limit-mm-per-prompt", '{"smell": 1}'], "'smell' is none of image, video, audio"),
        (["m", "--allowed-origins", "x"], "--allowed-origins x: "),
        (["m", "--structured-outputs-config", '{"backend": "xgrammar", "x": 1}'], "x: only backend is taken"),
        (["m", "--tokenizer-mode", "mistral"], "--tokenizer-mode mistral: only auto and hf"),
        (["m", "--structured-outputs-config", '{"backend": ["guidance"]}'], "backend: a string is expected"),
        (["m", "--kv-offloading-size", "much"], "--kv-offloading-size much: "),
        (["m", "--kv-offloading-size", "inf"], "--kv-offloading-size inf: "),
        (["m", "--hf-token", "hf_x"], "HF_TOKEN"),
        *(
            (["m", name, "[" * 3000], rf"{name} \[+… \(3000 characters\): maximum recursion depth")
            for name in ("--limit-mm-per-prompt", "--allowed-origins", "--structured-outputs-config")
        ),
        (["m", "--lora-modules", '{"a":' * 3000], r"\(15000 characters\): {\"name\": …"),
        (["m", "--lora-modules", "{}"], "--lora-modules {}: "),
    ],
)
def test_what_there_is_none_for_says_what_to_do(line: list[str], said: str) -> None:
    with pytest.raises(CommandError, match=said):
        translated(line)


def test_names_on_the_right_are_ours_and_names_on_the_left_are_not() -> None:
    ours = options()
    assert set(SAME.values()) <= ours
    assert not ours & {*SAME, *SETTINGS, *NEEDLESS, *INSTEAD, *CONVERTED}
    for setting in SETTINGS.values():
        service, _, key = setting.partition(".")
        assert key in settings_of(CONFIGS[service])
