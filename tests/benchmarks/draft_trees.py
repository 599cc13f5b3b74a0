"""What trees of drafts yield: `python -m tests.benchmarks.draft_trees FOLDER` on what `wide_demo FOLDER` makes.

Without a scheduler: every decode has as many drafts as there may be. For each shape of tree, each number of sequences
and each temperature: tokens of a pass and sequence (length), and tokens of a second of processor time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from services.bench.prefixes.prompt_files import read_prompts
from services.worker.executor.host_runner import HostRunner
from services.worker.speculation.settings import Method, SpeculationSettings
from shared.messages.generation import SamplingOptions
from tests.support.paths import DEMO
from tests.support.worker.plan_driver import Driver
from tests.support.worker.tiny_backend import tiny_backend

REQUESTS, TOKENS = 16, 40
TEMPERATURES = (0.0, 0.8)
SHAPES = ((1, None), (2, None), (4, None), (8, None))
"""topk, rows of a tree"""


def runner_of(folder: Path, method: Method | None, depth: int, topk: int, rows: int | None) -> HostRunner:
    """One rank on one thread; `method` None: it drafts nothing."""
    drafts = None
    if method is not None:
        drafts = SpeculationSettings(
            method=method,
            num_speculative_tokens=depth,
            model=str(folder / method),
            speculative_eagle_topk=topk,
            speculative_num_draft_tokens=rows,
        )
    return tiny_backend(
        folder / "model", ops="native", max_num_seqs=REQUESTS, kv_memory_bytes=64 << 20, speculation=drafts
    )


Case = tuple[Method | None, int, int, int | None]


def answers_of(runner: HostRunner, prompts: list[list[int]], temperature: float, stop: set[int]) -> list[list[int]]:
    """What the model says to each prompt, up to its end."""
    runner.reset()
    driver = Driver(runner)
    sequences = [
        driver.add(prompt, TOKENS, sampling=SamplingOptions(seed=seed, temperature=temperature))
        for seed, prompt in enumerate(prompts)
    ]
    driver.run()
    ends = [next((at for at, token in enumerate(one.output) if token in stop), TOKENS - 1) + 1 for one in sequences]
    return [one.output[:end] for one, end in zip(sequences, ends, strict=True)]


def measured(
    runner: HostRunner, prompts: list[list[int]], answers: list[list[int]], streams: int, temperature: float
) -> tuple[float, float]:
    """(length, tokens a second of processor time)"""
    decodes = tokens = 0
    seconds = 0.0
    for first in range(0, len(prompts), streams):
        runner.reset()
        driver = Driver(runner, speculate=runner.max_speculate)
        sequences = [
            driver.add(prompts[seed], len(answers[seed]), sampling=SamplingOptions(seed=seed, temperature=temperature))
            for seed in range(first, min(first + streams, len(prompts)))
        ]
        while not all(sequence.output for sequence in sequences):
            driver.step()
        while not all(sequence.done for sequence in sequences):
            before = sum(len(sequence.output) for sequence in sequences)
            decodes += sum(not sequence.done for sequence in sequences)
            begun = time.process_time()
            driver.step()
            seconds += time.process_time() - begun
            tokens += sum(len(sequence.output) for sequence in sequences) - before
        said = [sequence.output for sequence in sequences]
        assert said == answers[first : first + streams], "drafts have changed what the model says"
    return tokens / decodes, tokens / seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--depths", default="3,5")
    options = parser.parse_args(argv)
    encoder = Tokenizer.from_file(str(options.folder / "model" / "tokenizer.json"))
    texts = itertools.islice(read_prompts(DEMO / "prompts.jsonl", "jsonl", "all"), REQUESTS)
    prompts = [list(encoder.encode(str(text), add_special_tokens=False).ids) for text in texts]
    stop = set(json.loads((options.folder / "model" / "generation_config.json").read_bytes())["eos_token_id"])
    plain = runner_of(options.folder, None, 0, 1, None)
    answers = {temperature: answers_of(plain, prompts, temperature, stop) for temperature in TEMPERATURES}
    cases: list[Case] = [(None, 0, 1, None)]
    cases += [(options.method, int(depth), *shape) for depth in options.depths.split(",") for shape in SHAPES]
    for method, depth, topk, rows in cases:
        runner = runner_of(options.folder, method, depth, topk, rows)
        cells = [
            measured(runner, prompts, answers[temperature], streams, temperature)
            for streams in (1, 8)
            for temperature in TEMPERATURES
        ]
        figures = " | ".join(f"{length:.2f}, {speed:.0f}" for length, speed in cells)
        print(f"| {method}, depth {depth}, topk {topk}, rows {rows} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
