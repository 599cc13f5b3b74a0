"""What the demo model itself says to generated prompts: the text that drafters learn from.

A drafter must foresee the model, mistakes included: it learns from the model's outputs rather than from right answers.
"""

from collections.abc import Iterator
from itertools import islice

import torch
from transformers import PreTrainedModel

from tests.demo_training.mixture import training_examples
from tests.demo_training.packing import Document, Encoder

BATCH = 64
LONGEST_OUTPUT = 200
LONGEST_PROMPT = 600
TEMPERATURE = 0.7
"""Of every second batch; the others are greedy."""


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


@torch.inference_mode()
def own_outputs(model: PreTrainedModel, encoder: Encoder, seed: int, count: int) -> Iterator[Document]:
    """Documents of prompt and output; only the output counts. The same for the same seed."""
    torch.manual_seed(seed)
    ordered = iter(sorted(prompts(encoder, seed, count), key=len))
    greedy = True
    while batch := list(islice(ordered, BATCH)):
        yield from _continued(model, batch, greedy)
        greedy = not greedy


def _continued(model: PreTrainedModel, batch: list[list[int]], greedy: bool) -> Iterator[Document]:
    width = max(map(len, batch))
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros(len(batch), width, dtype=torch.long)
    for row, prompt in enumerate(batch):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    drawing = {"do_sample": False} if greedy else {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0}
    output: torch.Tensor = model.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=mask, max_new_tokens=LONGEST_OUTPUT, max_length=None, **drawing
    )
    ends = set(model.generation_config.eos_token_id)
    for prompt, row in zip(batch, output[:, width:].tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        yield [*prompt, *row[:end]], [False] * len(prompt) + [True] * end
