"""A model on several ranks, called like a function: each rank a process of its own, nothing left of them behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.offline import LLM, EngineFailed, SamplingParams
from tests.support.engines.engine_on_a_bus import make_model
from tests.support.models.tiny_models import make_model as make_tiny_model
from tests.support.models.tiny_models import write_word_tokenizer
from tests.support.paths import REPOSITORY

PROMPTS = [[3, 5, 8, 13, 21], list(range(3, 100)), [7]]
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def _ranks() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # another one, which has ended meanwhile
            if "services.offline.ranks" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.mark.parametrize(
    "size",
    [
        "tensor_parallel_size",
        pytest.param("pipeline_parallel_size", marks=pytest.mark.slow),
        pytest.param("prefill_context_parallel_size", marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_are_those_of_transformers(size: str, tmp_path: Path) -> None:
    reference = make_tiny_model("llama", tmp_path / "tiny")
    write_word_tokenizer(reference.path)
    with LLM(
        str(reference.path),
        device="cpu",
        kv_memory="8MiB",
        settings={"worker.threads": 1},
        **{size: 2},  # type: ignore[arg-type]
    ) as llm:
        ranks = _ranks()
        assert len(ranks) == 2
        outputs = llm.generate(PROMPTS, PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == [reference.greedy(ids, 16) for ids in PROMPTS]
    assert not any(rank.is_running() for rank in ranks)


def test_a_rank_that_dies_ends_the_engine_and_the_others(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "model"))
    with LLM(model, device="sim", tensor_parallel_size=2, settings={"worker.sim_step_ms": 20}) as llm:
        ranks = _ranks()
        ranks[1].kill()
        with pytest.raises(EngineFailed, match=r"rank [01] ended with status -9"):
            llm.generate([[2, 3]], SamplingParams(max_tokens=None, ignore_eos=True))
        assert psutil.wait_procs(ranks, timeout=60)[1] == []


def test_why_a_rank_cannot_serve_is_said_and_nothing_stays(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "model"))
    with pytest.raises(EngineFailed, match=r"weights|safetensors|model_type|architectures|rank"):
        LLM(model, device="cpu", tensor_parallel_size=2)
    assert _ranks() == []


def test_ranks_end_with_a_script_that_is_killed(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    script = (
        f"import sys; sys.path.append({str(REPOSITORY)!r})\nfrom services.offline import LLM\n"
        f"llm = LLM({str(model)!r}, device='sim', tensor_parallel_size=2)\n"
        "print('ready', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        ranks = psutil.Process(owner.pid).children()
        assert len(ranks) == 2
        os.kill(owner.pid, signal.SIGKILL)
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
