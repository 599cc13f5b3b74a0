"""The demo model's drafters as they are trained: Medusa heads, an EAGLE layer, a small draft model. Pure modules.

Tensors are named as the published checkpoints of each method name them.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from tests.demo_training.packing import Batch

MEDUSA_HEADS = 3
DRAFT_HIDDEN = 128
FEATURE_WEIGHT = 0.5
"""Of EAGLE's feature loss beside the loss of its words."""
ROLLED_OUT = (1.0, 0.7)
"""Weights of EAGLE's passes: on the model's own features, on on features that it has predicted (as in HASS,
arXiv:2408.15766: when it drafts, it has nothing better)."""


class Taught(NamedTuple):
    """What the model says of a batch."""

    features: Tensor
    """[rows, length, hidden] the last hidden state, normed."""
    words: Tensor
    """[vocabulary, hidden] the model's head."""

    def chances(self, ahead: int, rows: Tensor) -> Tensor:
        """[n, vocabulary] of the token after each position that is `ahead` places behind one of `rows`."""
        with torch.no_grad():
            return F.linear(self.features[:, ahead:][rows], self.words).float().softmax(dim=-1)


class Learnt(NamedTuple):
    loss: Tensor
    agreed: list[float]
    """How often the first, the second … draft is the model's likeliest token."""


class ResidualBlock(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """Head i foresees the token i + 2 places behind (Cai et al., arXiv:2401.10774); keys `0.0.linear.weight`,
    `0.1.weight`."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        hidden, words = model.config.hidden_size, model.config.vocab_size
        self.heads = nn.ModuleList()
        for _ in range(MEDUSA_HEADS):
            head = nn.Linear(hidden, words, bias=False)
            head.weight.data.copy_(model.lm_head.weight)
            self.heads.append(nn.Sequential(ResidualBlock(hidden), head))

    def learn(self, batch: Batch, taught: Taught) -> Learnt:
        losses, agreed = [], []
        for ahead, head in enumerate(self.heads, start=1):
            rows = foreseen(batch, ahead)
            loss, same = compared(head(taught.features[:, :-ahead][rows]), taught.chances(ahead, rows))
            losses.append(loss * 0.8 ** (ahead - 1))
            agreed.append(same)
        return Learnt(torch.stack(losses).sum(), agreed)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.heads.state_dict().items()

    def settings(self) -> dict[str, object]:
        return {"medusa_num_heads": MEDUSA_HEADS, "medusa_num_layers": 1, "model_type": "medusa"}


class EagleLayer(nn.Module):
    """One decoder layer on the model's features and the next token's embedding (Li et al., arXiv:2401.15077); keys
    `fc.weight`, `layers.0.…`. Embedding and head are the model's own."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.config = LlamaConfig(**(model.config.to_dict() | {"num_hidden_layers": 1}))
        self.body = LlamaModel(self.config)
        self.body.layers[0].input_layernorm = nn.Identity()
        self.body.norm = nn.Identity()  # type: ignore[assignment]
        self.body.embed_tokens = nn.Embedding(1, 1)
        self.fc = nn.Linear(2 * self.config.hidden_size, self.config.hidden_size, bias=False)
        self._words = [model.lm_head.weight.detach()]

    def forward(self, features: Tensor, ids: Tensor, batch: Batch) -> Tensor:
        """The features of the next position, for each position and the token behind it."""
        embedded = F.embedding(ids, self._words[0])
        inputs = self.fc(torch.cat((embedded, features), dim=-1))
        foreseen_ones: Tensor = self.body(
            inputs_embeds=inputs,
            position_ids=batch.positions[:, :-1],
            attention_mask=batch.mask[:, :, :-1, :-1],
            use_cache=False,
        ).last_hidden_state
        return foreseen_ones

    def learn(self, batch: Batch, taught: Taught) -> Learnt:
        following = batch.ids[:, 1:]
        rows = foreseen(batch, 1)
        features = taught.features[:, :-1]
        begins = (batch.positions[:, :-1] == 0).unsqueeze(-1)
        chances = taught.chances(1, rows)
        losses, agreed = [], []
        for number, weight in enumerate(ROLLED_OUT):
            out = self(features, following, batch)
            words = F.linear(out[rows], self._words[0])
            loss, same = compared(words, chances)
            missed = F.smooth_l1_loss(out[rows], taught.features[:, 1:][rows])
            losses.append(weight * (loss + FEATURE_WEIGHT * missed))
            agreed.append(same)
            if number + 1 < len(ROLLED_OUT):
                shifted = torch.cat((taught.features[:, :1], out[:, :-1]), dim=1)
                features = torch.where(begins, taught.features[:, :-1], shifted)
        return Learnt(torch.stack(losses).sum(), agreed)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "fc.weight", self.fc.weight
        for name, tensor in self.body.layers.state_dict().items():
            yield f"layers.{name}", tensor

    def settings(self) -> dict[str, object]:
        return self.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "bias": False, "dtype": "bfloat16"}


class DraftModel(nn.Module):
    """A Llama of one narrow layer with the model's vocabulary, an ordinary checkpoint."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        changes = {"num_hidden_layers": 1, "hidden_size": DRAFT_HIDDEN, "intermediate_size": 3 * DRAFT_HIDDEN}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        self.config = LlamaConfig(**(model.config.to_dict() | changes | heads))
        self.body = LlamaForCausalLM(self.config)

    def learn(self, batch: Batch, taught: Taught) -> Learnt:
        rows = batch.targets >= 0
        out = self.body(input_ids=batch.ids, position_ids=batch.positions, attention_mask=batch.mask, use_cache=False)
        loss, same = compared(out.logits[rows], taught.chances(0, rows))
        return Learnt(loss, [same])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.body.state_dict().items():
            if name != "lm_head.weight":
                yield name, tensor

    def settings(self) -> dict[str, object]:
        return self.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}


def foreseen(batch: Batch, ahead: int) -> Tensor:
    """[rows, length - ahead] whether a position's token `ahead + 1` places behind is one of the same document's that
    are to be learnt."""
    same = batch.positions[:, ahead:] == batch.positions[:, : batch.positions.shape[1] - ahead] + ahead
    return same & (batch.targets[:, ahead:] >= 0)


def compared(logits: Tensor, chances: Tensor) -> tuple[Tensor, float]:
    """(mean cross entropy of `logits` [n, vocabulary] against `chances`, how often both have the same favourite)."""
    same = (logits.argmax(-1) == chances.argmax(-1)).float().mean().item() if len(logits) else 0.0
    return -(chances * F.log_softmax(logits.float(), dim=-1)).sum(-1).mean(), same
