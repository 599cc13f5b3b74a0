"""What the demo model itself says to generated prompts: the text that drafters learn from.

A drafter must foresee the model, mistakes included: it learns from the model's outputs rather than from right answers.
"""

from collections.abc import Iterator
from pathlib import Path

from services.offline import LLM, SamplingParams
from tests.demo_training.mixture import training_examples
from tests.demo_training.packing import Document, Encoder

LONGEST_OUTPUT = 200
LONGEST_PROMPT = 600
TEMPERATURE = 0.7
"""Of every second one; the others are greedy."""


def prompts(encoder: Encoder, seed: int, count: int) -> list[list[int]]:
    """Token ids up to where the last answer begins; of plain text, the first part."""
    found: list[list[int]] = []
    for example in training_examples(seed):
        ids = prompt_of(encoder.document(example))
        if 0 < len(ids) <= LONGEST_PROMPT:
            found.append(ids)
        if len(found) == count:
            break
    return found


def prompt_of(document: Document) -> list[int]:
    ids, counts = document
    if all(counts):
        return ids[: max(1, len(ids) // 4)]
    last = max(i for i, counted in enumerate(counts) if counted)
    while counts[last - 1]:
        last -= 1
    return ids[:last]


def own_outputs(folder: Path, encoder: Encoder, seed: int, count: int) -> Iterator[Document]:
    """Documents of prompt and output of the model in `folder`; only the output counts. The same for the same seed."""
    asked = prompts(encoder, seed, count)
    params = [
        SamplingParams(temperature=0.0 if number % 2 else TEMPERATURE, seed=number, max_tokens=LONGEST_OUTPUT)
        for number in range(len(asked))
    ]
    with LLM(str(folder), progress=False) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in asked], params)
    for prompt, output in zip(asked, outputs, strict=True):
        said = list(output.outputs[0].token_ids)
        yield [*prompt, *said], [False] * len(prompt) + [True] * len(said)
