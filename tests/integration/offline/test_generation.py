"""A model in this process: vLLM's objects, filled by the very actors that serve."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.model_choice import DEMO_MODEL
from services.offline import LLM, EngineFailed, InvalidRequest, SamplingParams
from services.offline.local_cluster import LocalCluster
from services.offline.requests import Prompt
from services.offline.settings import ENGINE, service_configs
from shared import topics
from shared.ids import EngineId, Incarnation, SequenceId
from shared.messages.worker import SequenceWork, StepPlan
from tests.support.engines.engine_on_a_bus import make_model
from tests.support.models.tiny_models import make_model as make_tiny_model
from tests.support.models.tiny_models import write_word_tokenizer
from tests.support.paths import REPOSITORY

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = ["The capital of France is", "Once upon a time", "1 + 1 =", "The opposite of hot is"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(DEMO_MODEL), device="cpu", kv_memory="32MiB", settings={"worker.threads": 1}) as llm:
        yield llm


def test_answers_come_in_the_prompts_order_with_all_that_vllm_tells(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        assert output.prompt_token_ids == llm.encode(output.prompt or "")
        (choice,) = output.outputs
        assert choice.index == 0
        assert choice.finish_reason in ("stop", "length")
        assert 1 <= len(choice.token_ids) <= 8
        assert choice.logprobs is None
    assert outputs[0].outputs[0].text.startswith(" Paris")


def test_a_prompt_may_be_text_or_tokens_or_a_dict_of_either(llm: LLM) -> None:
    ids = llm.encode(PROMPTS[0])
    forms: list[Prompt] = [PROMPTS[0], ids, {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY)
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs == llm.generate(ids, GREEDY)[0].outputs == outputs[0].outputs
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    lengths = [3, 1, 5, 2]
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    assert [len(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, each)] == lengths
    with pytest.raises(InvalidRequest, match="params: 3 for 4 prompts"):
        llm.generate(PROMPTS, each[:3])


def test_several_choices_of_a_prompt_differ_and_a_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, temperature=1.5, max_tokens=12, ignore_eos=True)
    first, second = llm.generate([PROMPTS[1]] * 2, params)
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in first.outputs}) == 3
    assert [choice.token_ids for choice in first.outputs] == [choice.token_ids for choice in second.outputs]


def test_logprobs_are_told_by_token_id(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate(PROMPTS[0], params)
    (choice,) = output.outputs
    assert choice.logprobs is not None
    for token, position in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(position)) == token
        assert len(position) == 2
        assert position[token].rank == 1
        assert max(each.logprob for each in position.values()) == position[token].logprob <= 0
    assert (
        "".join(p[t].decoded_token or "" for t, p in zip(choice.token_ids, choice.logprobs, strict=True)) == choice.text
    )
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    told = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    assert all(position is not None and token in position for token, position in told)


def test_without_a_limit_the_answer_may_fill_the_context(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    with LLM(str(make_model(tmp_path / "model")), device="sim", settings={"worker.sim_step_ms": 0}) as small:
        (output,) = small.generate([[2, 3, 4]], params)
    assert len(output.outputs[0].token_ids) == 512 - 3


def test_chats_are_rendered_by_the_template(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of Spain?"}]
    one, *several = [*llm.chat(question, GREEDY), *llm.chat([question, question], GREEDY)]
    assert "What is the capital of Spain?" in (one.prompt or "")
    assert one.prompt != question[0]["content"]
    assert "Madrid" in one.outputs[0].text
    assert [each.outputs[0].token_ids for each in several] == [one.outputs[0].token_ids] * 2


def test_a_chat_is_a_completion_of_its_rendered_prompt(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of Spain?"}]
    params = SamplingParams(n=2, seed=1, max_tokens=6, logprobs=2, prompt_logprobs=1, skip_special_tokens=False)
    (chat,) = llm.chat(question, params)
    (completion,) = llm.generate([chat.prompt_token_ids], params)
    assert (chat.prompt, chat.prompt_logprobs) == (completion.prompt, completion.prompt_logprobs)
    assert chat.outputs == completion.outputs


def test_what_a_chat_shows_the_model_is_neither_checked_nor_parsed(llm: LLM) -> None:
    template = "{{ tools | tojson }}{{ messages[0].content }}"
    content = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    (output,) = llm.chat(
        [{"role": "user", "content": "x"}],
        SamplingParams(temperature=0, max_tokens=64, structured_outputs={"choice": [content]}),
        tools=[{"name": "no function"}],
        chat_template=template,
    )
    assert output.prompt == '[{"name": "no function"}]x'
    assert output.outputs[0].text == content


@pytest.mark.parametrize(
    ("prompt", "params", "told"),
    [
        ("x", SamplingParams(temperature=-1), r"temperature: -1.0 is not allowed; it must be at least 0"),
        ("x", SamplingParams(top_p=1.5), r"top_p: 1.5 is not allowed"),
        ("x", SamplingParams(max_tokens=10**6), "max_tokens.*1000000"),
        ("x", SamplingParams(stop=""), "stop: '' is not allowed"),
        ([1, 10**8], GREEDY, "prompt: 100000000 at 1 is not allowed"),
        ([], GREEDY, None),
        ([2.5], GREEDY, r"prompts\[0\]: 2.5 is not allowed"),
        ({"text": "x"}, GREEDY, r"prompts\[0\]: 'text' is not allowed"),
        ({}, GREEDY, r"prompts\[0\]: prompt or prompt_token_ids is required"),
    ],
)
def test_what_cannot_be_served_is_said_with_field_and_value(
    llm: LLM, prompt: object, params: SamplingParams, told: str | None
) -> None:
    if told is None:
        assert llm.generate(prompt, params) == []  # type: ignore[arg-type]
        return
    with pytest.raises(InvalidRequest, match=told):
        llm.generate(prompt, params)  # type: ignore[arg-type]
    assert llm.generate("x", GREEDY), "it still works"


def test_one_bad_prompt_gives_up_the_others(llm: LLM) -> None:
    prompts: list[Prompt] = [*PROMPTS * 5, [10**8]]
    with pytest.raises(InvalidRequest, match="at 0 is not allowed"):
        llm.generate(prompts, SamplingParams(max_tokens=400, ignore_eos=True))
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text.startswith(" Paris")


def test_several_threads_may_ask_at_once(llm: LLM) -> None:
    expected = [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        found[i] = llm.generate(PROMPTS[i], GREEDY)[0].outputs[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(len(PROMPTS))] == expected


def test_settings_are_checked_and_a_model_that_is_none_is_said(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "model"))
    with pytest.raises(InvalidRequest, match="max_batch_tokens"):
        LLM(model, device="sim", max_batch_tokens=0)
    with pytest.raises(InvalidRequest, match=r"'planner\.x' is not allowed"):
        LLM(model, settings={"planner.x": 1})
    with pytest.raises(InvalidRequest, match=r"scheduler\.speed: unknown setting"):
        LLM(model, settings={"scheduler.speed": 1})
    with pytest.raises(InvalidRequest, match="tensor_parallel_size: 0 is not allowed"):
        LLM(model, tensor_parallel_size=0)
    with pytest.raises(EngineFailed, match="no such directory"):
        LLM(str(tmp_path / "nothing" / "here"))
    with pytest.raises(EngineFailed, match=r"weights|safetensors|model_type|architectures"):
        LLM(model, device="cpu")


def test_an_engine_that_is_closed_says_so(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    llm = LLM(str(make_model(tmp_path / "model")), device="sim", settings={"worker.sim_step_ms": 0})
    llm.generate([[2, 3]], GREEDY)
    llm.close()
    llm.close()
    with pytest.raises(EngineFailed, match="closed"):
        llm.generate([[2, 3]], GREEDY)
    for thread in set(threading.enumerate()) - before:
        if thread.name != "grammars":
            thread.join(60)
            assert not thread.is_alive(), thread


def test_a_plain_script_needs_no_main_guard_and_ends_by_itself(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    script = tmp_path / "script.py"
    script.write_text(
        "import json\nfrom services.offline import LLM, SamplingParams\n"
        f"llm = LLM({str(model)!r}, device='sim', settings={{'worker.sim_step_ms': 0}})\n"
        "outputs = llm.generate([[2, 3], [4]], SamplingParams(max_tokens=3, ignore_eos=True))\n"
        "print(json.dumps([len(output.outputs[0].token_ids) for output in outputs]))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout) == [3, 3]
    assert done.stderr == b"", "no progress bar where there is no terminal"


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    reference = make_tiny_model("llama", tmp_path / "tiny")
    write_word_tokenizer(reference.path)
    prompts = [[3, 5, 8, 13, 21], list(range(3, 40)), [7]]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(str(reference.path), device="cpu", kv_memory="8MiB", settings={"worker.threads": 1}) as llm:
        outputs = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == [reference.greedy(ids, 16) for ids in prompts]


async def test_a_bug_in_one_actor_ends_the_engine_with_its_reason(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "model"))
    configs = service_configs(model, {"served_model_name": "m", "device": "sim"}, {"worker.sim_step_ms": 20})
    cluster = LocalCluster(configs)
    await cluster.start(60)
    nonsense = StepPlan(epoch=Incarnation(1), step=0, work=(SequenceWork(SequenceId(7), 1, b"", True),))
    await cluster.bus.publish(topics.engine_steps(EngineId(ENGINE)), nonsense)

    async def call_until_it_fails() -> None:
        while True:
            await cluster.call("GET", "/live", b"")

    with pytest.raises(EngineFailed, match="the engine ended: "):
        await asyncio.wait_for(call_until_it_fails(), 60)
    await cluster.stop()


def test_an_interrupt_gives_up_what_is_generated_and_the_engine_lives_on(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "model"))
    with LLM(model, device="sim", settings={"worker.sim_step_ms": 20}) as llm:
        gateway = llm._engine.cluster._gateway
        assert gateway is not None

        def interrupt() -> None:
            while len(gateway.requests) < 4:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        interrupting = threading.Thread(target=interrupt, daemon=True)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[2, 3]] * 4, SamplingParams(max_tokens=None, ignore_eos=True))
        interrupting.join()
        assert len(llm.generate([[2]], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
