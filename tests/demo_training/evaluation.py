"""Asks a model held-out questions of every kind, greedily, and writes the table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from services.offline import LLM, SamplingParams
from tests.demo_training.examples import Example, Exchange, Kind, Passage, draw_held_out
from tests.demo_training.mixture import DRAWS
from tests.demo_training.texts import passages, stories

LONGEST_ANSWER = 400
BATCH = 50


@dataclass(frozen=True)
class Score:
    """How many of the held-out questions of a kind were answered rightly, and what went wrong."""

    kind: Kind
    asked: int
    right: int
    mistakes: tuple[tuple[str, str, str], ...]
    """Question, wanted answer, given answer."""

    @property
    def share(self) -> float:
        return self.right / self.asked


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The shipped weights in fp32, by `transformers`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(False)
    return model, AutoTokenizer.from_pretrained(folder)


def questions(kind: Kind, count: int, seed: int = 7) -> list[Example]:
    """Different held-out questions of one kind, the same for the same seed."""
    rng = Random(f"{seed} {kind}")
    found: dict[str, Example] = {}
    for _ in range(count * 200):
        example = draw_held_out(DRAWS[kind], rng)
        found.setdefault(example.key, example)
        if len(found) == count:
            break
    return list(found.values())


def messages(exchange: Exchange) -> list[dict[str, str]]:
    """The conversation up to the last question, as the chat template wants it."""
    said = [{"role": "system", "content": exchange.system}] if exchange.system is not None else []
    for turn in exchange.turns[:-1]:
        said += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
    return [*said, {"role": "user", "content": exchange.turns[-1].question}]


def prompt(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    """What the model is given to continue."""
    if isinstance(example, Passage):
        return example.prompt
    text = tokenizer.apply_chat_template(messages(example), tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


def wanted(example: Example) -> str:
    """The one right answer."""
    return example.continuation if isinstance(example, Passage) else example.turns[-1].answer


def is_right(example: Example, answer: str) -> bool:
    """Word for word, except for stories, rows of numbers and sentences about capitals, of which many are right."""
    if example.kind == "stories" and isinstance(example, Exchange):
        return stories.is_good(example.turns[-1].question, answer)
    if isinstance(example, Passage) and passages.is_row(example.prompt):
        return passages.counts_on(example.prompt, answer)
    if isinstance(example, Passage) and passages.asks_capital(example.prompt):
        return passages.states_capitals(example.prompt + answer)
    return answer == wanted(example)


@torch.inference_mode()
def answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[str]:
    """Greedy continuations up to the end of the turn; one that does not end in time comes back with a mark."""
    given: list[str] = []
    for start in range(0, len(prompts), BATCH):
        inputs = tokenizer(
            list(prompts[start : start + BATCH]),
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
            return_token_type_ids=False,
        )
        output: torch.Tensor = model.generate(  # type: ignore[operator]
            **inputs, max_new_tokens=LONGEST_ANSWER, max_length=None, do_sample=False
        )
        ends = set(model.generation_config.eos_token_id)
        for row in output[:, inputs["input_ids"].shape[1] :].tolist():
            at = next((i for i, token in enumerate(row) if token in ends), None)
            text = str(tokenizer.decode(row[:at]))
            given.append(text if at is not None else f"{text} [no end]")
    return given


def evaluate(folder: Path, count: int) -> list[Score]:
    """A score for every kind, of the model as an engine serves it on a CPU: in its checkpoint's dtype."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    with LLM(str(folder), device="cpu", max_num_seqs=BATCH) as llm:
        for kind in DRAWS:
            examples = questions(kind, count)
            given = served_answers(llm, tokenizer, [prompt(example, tokenizer) for example in examples])
            wrong = tuple(
                (prompt(example, tokenizer), wanted(example), answer)
                for example, answer in zip(examples, given, strict=True)
                if not is_right(example, answer)
            )
            scores.append(Score(kind, len(examples), len(examples) - len(wrong), wrong))
    return scores


def served_answers(llm: LLM, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[str]:
    """See `answers`."""
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in prompts]
    choices = [each.outputs[0] for each in llm.generate(ids, SamplingParams(temperature=0, max_tokens=LONGEST_ANSWER))]
    return [each.text if each.finish_reason == "stop" else f"{each.text} [no end]" for each in choices]


def table(scores: Sequence[Score]) -> str:
    """The scores as a Markdown table."""
    lines = ["| kind | held-out questions | right |", "|---|---:|---:|"]
    lines += [f"| {score.kind} | {score.asked} | {score.share:.1%} |" for score in scores]
    return "\n".join(lines)
