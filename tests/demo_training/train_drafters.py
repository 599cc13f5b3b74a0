"""Trains the demo model's drafters: `python -m tests.demo_training.train_drafters` writes deploy/demo/medusa, eagle,
eagle3 and draft.

Minutes on two cores; the same seed gives the same weights on the same machine.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from tests.demo_training.drafters import (
    EAGLE3_LAYERS,
    EAGLE3_WORDS,
    DraftModel,
    Eagle3Layer,
    EagleLayer,
    MedusaHeads,
    Taught,
    frequent_words,
)
from tests.demo_training.own_outputs import own_outputs
from tests.demo_training.packing import Batch, Document, Encoder, batches
from tests.support.paths import DEMO

Drafter = MedusaHeads | EagleLayer | Eagle3Layer | DraftModel

KINDS: dict[str, Callable[[LlamaForCausalLM, list[Document]], Drafter]] = {
    "medusa": lambda model, _: MedusaHeads(model),
    "eagle": lambda model, _: EagleLayer(model),
    "eagle3": lambda model, documents: Eagle3Layer(
        model, frequent_words(documents, model.config.vocab_size, EAGLE3_WORDS)
    ),
    "draft": lambda model, _: DraftModel(model),
}
WEIGHTS = {"medusa": "medusa_lm_head.safetensors"}
"""Names of their files; others are model.safetensors."""
SEED = 11
WARM_UP = 20


class Lesson(NamedTuple):
    """A batch, and what the model makes of it."""

    batch: Batch
    taught: Taught


@torch.no_grad()
def lessons(model: LlamaForCausalLM, documents: list[Document], step_tokens: int, *, taps: bool) -> list[Lesson]:
    """All documents, in batches of a step each: what the model says of them is found out once."""
    found: list[Lesson] = []
    taken: list[Document] = []
    room = step_tokens
    for document in Random(SEED).sample(documents, len(documents)):
        taken.append(document)
        room -= len(document[0])
        if room <= 0:
            found += [_lesson(model, batch, taps) for batch in batches(taken, step_tokens)]
            taken, room = [], step_tokens
    return found


def _lesson(model: LlamaForCausalLM, batch: Batch, taps: bool) -> Lesson:
    kept: list[torch.Tensor] = []
    hooks = [
        model.model.layers[layer].register_forward_hook(lambda _module, _inputs, output: kept.append(output))
        for layer in (EAGLE3_LAYERS if taps else ())
    ]
    with torch.autocast("cpu", torch.bfloat16):
        features = model.model(
            input_ids=batch.ids, position_ids=batch.positions, attention_mask=batch.mask, use_cache=False
        ).last_hidden_state
    for hook in hooks:
        hook.remove()
    tapped = torch.cat(kept, dim=-1).bfloat16() if kept else None
    return Lesson(batch, Taught(features.float(), model.lm_head.weight.detach(), tapped))


def train(drafter: Drafter, taught: list[Lesson], rounds: int, rate: float) -> Iterator[int]:
    """Goes over all lessons so many times, each time in another order; gives the rounds that are over."""
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    steps, random, begun = rounds * len(taught), Random(SEED), time.perf_counter()
    pace = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP, 0.02 + 1.5 * (steps - step) / steps)
    )
    for number in range(1, rounds + 1):
        agreed = []
        for batch, what in random.sample(taught, len(taught)):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16):
                learnt = drafter.learn(batch, what)
            learnt.loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            pace.step()
            agreed.append(learnt.agreed)
        shares = "  ".join(f"{sum(one) / len(one):.1%}" for one in zip(*agreed, strict=True))
        print(f"round {number}/{rounds}  agreed {shares}  {time.perf_counter() - begun:.0f} s", flush=True)
        yield number


def ship(drafter: Drafter, folder: Path, weights: str) -> None:
    """bf16 weights and the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.detach().bfloat16() if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in drafter.tensors()
    }
    save_file(tensors, folder / weights, metadata={"format": "pt"})
    settings = json.dumps(drafter.settings(), indent=2, default=str)
    (folder / "config.json").write_text(settings + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO / "model")
    parser.add_argument("--out", type=Path, default=DEMO, help="folder of the drafters' folders")
    parser.add_argument("--prompts", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=6, help="how often each document is read")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--step-tokens", type=int, default=4096, help="about so many are learnt from at once")
    parser.add_argument("--outputs", type=Path, help="file that keeps the model's outputs between runs")
    parser.add_argument("only", nargs="*", choices=[*KINDS, []], help="which of them; by default all")
    options = parser.parse_args(arguments)
    model = LlamaForCausalLM.from_pretrained(options.model, dtype=torch.float32).requires_grad_(False)
    model.train(False)
    documents = _documents(options.model, options.prompts, options.outputs)
    print(f"{len(documents)} documents, {sum(sum(counts) for _, counts in documents):,} tokens of output", flush=True)
    kinds = options.only or list(KINDS)
    taught = lessons(model, documents, options.step_tokens, taps="eagle3" in kinds)
    for kind in kinds:
        torch.manual_seed(SEED)
        drafter = KINDS[kind](model, documents)
        print(kind, flush=True)
        for _ in train(drafter, taught, options.rounds, options.rate):
            ship(drafter, options.out / kind, WEIGHTS.get(kind, "model.safetensors"))


def _documents(folder: Path, count: int, kept: Path | None) -> list[Document]:
    if kept is not None and kept.exists():
        return [(ids, [bool(c) for c in counts]) for ids, counts in json.loads(kept.read_text())]
    encoder = Encoder(Tokenizer.from_file(str(folder / "tokenizer.json")))
    documents = list(own_outputs(folder, encoder, SEED, count))
    if kept is not None:
        kept.write_text(json.dumps([(ids, [int(c) for c in counts]) for ids, counts in documents]))
    return documents


if __name__ == "__main__":
    main()
