"""Trains the demo model from nothing and ships it: `python -m tests.demo_training.train --out deploy/demo/model`."""

import argparse
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from tests.demo_training import evaluation
from tests.demo_training.architecture import MAX_POSITIONS, generation_config, llama_config
from tests.demo_training.mixture import SHARES, TUNING_SHARES, training_examples
from tests.demo_training.packing import Batch, Document, Encoder, batches
from tests.demo_training.vocabulary import save_tokenizer, train_tokenizer

TOKENIZER_EXAMPLES = 40_000
MICRO_BATCH_TOKENS = 1024
"""A step is cut into small batches that single-threaded workers take one by one: on a machine with other work, two
threads inside each operation would wait for the slower one a thousand times a step."""
REPORT_EVERY = 40


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, apart from the text."""

    steps: int
    tuning_steps: int
    seed: int = 1
    tokens_per_step: int = 4096
    matrix_rate: float = 5e-3
    other_rate: float = 4e-3
    warm_up: int = 100
    weight_decay: float = 0.05
    clip: float = 1.0

    @property
    def all_steps(self) -> int:
        """Of both parts."""
        return self.steps + self.tuning_steps

    def rate(self, step: int) -> float:
        """The learning rate's factor: a short warm-up, a plateau, and a straight line down over the last quarter.

        On the plateau nothing depends on the number of steps, so a run may be stopped and given another length.
        Tuning does it once more, half as high.
        """
        if step < self.steps:
            return min(1.0, (step + 1) / self.warm_up, 0.01 + 4 * (self.steps - step) / self.steps)
        tuned = step - self.steps
        return 0.5 * min(1.0, (tuned + 1) / self.warm_up, 0.01 + 2 * (self.tuning_steps - tuned) / self.tuning_steps)

    def same_text_and_rates(self, other: "Recipe") -> bool:
        """Whether a run of the other recipe may be continued with this one."""
        return replace(self, steps=0, tuning_steps=0) == replace(other, steps=0, tuning_steps=0)


class Training:
    """Owns model and optimizers. A step's text depends on seed and step alone, so a stopped run resumes exactly."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, workers: int) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.step = 0
        self.model = LlamaForCausalLM(llama_config())
        self._workers = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
        self._encoder = Encoder(tokenizer)
        # Muon makes each matrix's update orthogonal (Jordan et al., 2024), for about 10% of a step's time here;
        # embeddings and norms are no matrices in that sense and stay with AdamW.
        matrices = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in self.model.named_parameters() if p.ndim != 2 or "embed" in name]
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (
                torch.optim.Muon(matrices, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"),
                recipe.matrix_rate,
            ),
            (torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=True), recipe.other_rate),
        ]

    def documents(self) -> Iterator[Document]:
        """The text of the present step."""
        left = self.recipe.tokens_per_step
        shares = SHARES if self.step < self.recipe.steps else TUNING_SHARES
        for example in training_examples(Random(f"{self.recipe.seed} {self.step}").getrandbits(48), shares):
            document = self._encoder.document(example)
            yield document
            left -= len(document[0])
            if left <= 0:
                return

    def advance(self) -> float:
        """One optimizer step; the mean loss per learnt token."""
        step = list(batches(self.documents(), MICRO_BATCH_TOKENS))
        learnt = sum(int((batch.targets >= 0).sum()) for batch in step)
        total = 0.0
        parameters = list(self.model.parameters())
        # `map` keeps the order, so that the sums do not depend on which worker was quicker.
        for loss, gradients in self._workers.map(self._gradients, step):
            total += loss / learnt
            for parameter, gradient in zip(parameters, gradients, strict=True):
                part = gradient / learnt
                parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        for optimizer, rate in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * self.recipe.rate(self.step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total

    def _gradients(self, batch: Batch) -> tuple[float, tuple[torch.Tensor, ...]]:
        """Loss and gradients of one batch; leaves the shared parameters untouched."""
        loss = self._loss(batch)
        return loss.item(), torch.autograd.grad(loss, list(self.model.parameters()))

    def _loss(self, batch: Batch) -> torch.Tensor:
        """The sum of the losses; the output layer runs only where something is to be learnt."""
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.model(
                input_ids=batch.ids, position_ids=batch.positions, attention_mask=batch.mask, use_cache=False
            ).last_hidden_state
            learnt = batch.targets >= 0
            logits = self.model.lm_head(hidden[learnt])
        return torch.nn.functional.cross_entropy(logits.float(), batch.targets[learnt], reduction="sum")

    def save(self, path: Path) -> None:
        """Write a checkpoint whole or not at all."""
        state = {
            "recipe": asdict(self.recipe),
            "tokenizer": self.tokenizer.to_str(),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers],
        }
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path)
        if state["tokenizer"] != self.tokenizer.to_str() or not self.recipe.same_text_and_rates(
            Recipe(**{"tuning_steps": 0} | state["recipe"])
        ):
            raise SystemExit(f"{path} is of another recipe or another text: remove it, or give --checkpoints")
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def train(training: Training, checkpoint: Path, save_every: int) -> None:
    """Run to the end of the recipe, reporting and saving on the way."""
    started, tokens = time.perf_counter(), 0
    losses: list[float] = []
    while training.step < training.recipe.all_steps:
        losses.append(training.advance())
        tokens += training.recipe.tokens_per_step
        if training.step % REPORT_EVERY == 0:
            speed = tokens / (time.perf_counter() - started)
            loss = sum(losses) / len(losses)
            print(
                f"step {training.step}/{training.recipe.all_steps}  loss {loss:.4f}  {speed:,.0f} tokens/s", flush=True
            )
            losses.clear()
        if training.step % save_every == 0 or training.step == training.recipe.all_steps:
            training.save(checkpoint)


def ship(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write bf16 weights, configuration, tokenizer and chat template. The model given keeps its fp32 weights."""
    shipped = LlamaForCausalLM(llama_config())
    shipped.load_state_dict(model.state_dict())
    shipped.bfloat16()
    shipped.generation_config = generation_config()
    shipped.save_pretrained(out)
    save_tokenizer(tokenizer, out, MAX_POSITIONS)


def report(out: Path, count: int) -> str:
    """Evaluate what was shipped and write the table beside it; returns the table."""
    scores = evaluation.evaluate(out, count)
    for score in scores:
        for question, wanted, given in score.mistakes[:5]:
            print(f"{score.kind}: {question!r}\n    wanted {wanted!r}\n    given  {given!r}")
    table = evaluation.table(scores)
    heading = "Held-out questions, greedy decoding, the shipped weights computed in bf16, as they are served.\n\n"
    (out / "EVALUATION.md").write_text(heading + table + "\n", encoding="utf-8")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """The whole way: tokenizer, training (resumed if a checkpoint is there), shipping, evaluation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the shipped model")
    parser.add_argument("--checkpoints", type=Path, default=Path("build/demo"), help="folder of the resumable state")
    parser.add_argument("--steps", type=int, default=4600)
    parser.add_argument("--tuning-steps", type=int, default=1400, help="further steps that add tools and bare sums")
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--questions", type=int, default=200, help="held-out questions of each kind")
    parser.add_argument(
        "--workers", type=int, default=2, help="threads that compute; the result does not depend on them"
    )
    parser.add_argument("--evaluate-only", action="store_true", help="only print the table of the model in --out")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if not options.evaluate_only:
        recipe = Recipe(options.steps, options.tuning_steps)
        options.checkpoints.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(islice(training_examples(recipe.seed), TOKENIZER_EXAMPLES))
        training = Training(recipe, tokenizer, options.workers)
        checkpoint = options.checkpoints / "checkpoint.pt"
        if checkpoint.exists():
            training.resume(checkpoint)
        train(training, checkpoint, options.save_every)
        ship(training.model, tokenizer, options.out)
    print(report(options.out, options.questions))


if __name__ == "__main__":
    main()
