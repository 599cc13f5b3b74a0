"""The demo model's drafters as they are trained: Medusa heads, EAGLE's layers, a small draft model. Pure modules.

Tensors are named as the published checkpoints of each method name them.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

from tests.demo_training.packing import Batch, Document

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
    taps: Tensor | None = None
    """[rows, length, 3 * hidden] what comes out of EAGLE3_LAYERS, in bfloat16."""

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


EAGLE3_WORDS = 1024
"""Words that EAGLE-3's head draws from: the most frequent ones of the outputs."""
EAGLE3_LAYERS = (0, 2, 4)
"""Layers whose outputs it reads."""
EAGLE3_STEPS = 3
"""Passes of its training-time test; each draft's loss weighs 0.8 of the one before."""


class Eagle3Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * hidden, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=False)
        self.groups = config.num_attention_heads // config.num_key_value_heads

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor, before: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """x [rows, length, 2 * hidden] of the pass that follows those `before`, whose keys and values it adds its own
        to. A row sees the first pass up to its own place less the passes since, then one row of each of these."""
        rows, length, _ = x.shape
        queries, keys, values = (
            part(x).view(rows, length, -1, turn[0].shape[-1]).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *turn)
        before.append((keys.repeat_interleave(self.groups, 1), values.repeat_interleave(self.groups, 1)))
        (first_keys, first_values), *chain = before
        back = len(chain)
        seen = mask & torch.ones(length, length, dtype=torch.bool).tril(-back)
        scores = [(queries @ first_keys.transpose(2, 3)).masked_fill(~seen, -torch.inf)]
        shifted = [tuple(_later(each, back - number) for each in pair) for number, pair in enumerate(chain, start=1)]
        scores += [(queries * own_keys).sum(-1, keepdim=True) for own_keys, _ in shifted]
        shares = torch.cat([each.float() for each in scores], dim=-1).mul(keys.shape[-1] ** -0.5).softmax(-1)
        shares = shares.to(first_values.dtype).nan_to_num()
        mixed = shares[..., :length] @ first_values
        for number, (_, own_values) in enumerate(shifted):
            mixed = mixed + shares[..., length + number, None] * own_values
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Eagle3Midlayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.input_layernorm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.self_attn = Eagle3Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)


class Eagle3Layer(nn.Module):
    """One decoder layer on the outputs of three of the model's (Li et al., arXiv:2503.01840), trained as it drafts:
    pass after pass on what it has predicted itself. Keys `fc.weight`, `midlayer.…`, `norm.weight`, `lm_head.weight`,
    `d2t`, `t2d`; the embedding is the model's."""

    def __init__(self, model: LlamaForCausalLM, drafted: Tensor) -> None:
        """`drafted` [words]: the tokens that its head draws from, in order."""
        super().__init__()
        self.config = LlamaConfig(**(model.config.to_dict() | {"num_hidden_layers": 1}))
        hidden = self.config.hidden_size
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = Eagle3Midlayer(self.config)
        self.norm = nn.RMSNorm(hidden, self.config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, len(drafted), bias=False)
        self._drafted = drafted
        self._words = [model.lm_head.weight.detach()]
        self._rotary = [LlamaRotaryEmbedding(self.config)]
        self._begin_as(model)

    @torch.no_grad()
    def _begin_as(self, model: LlamaForCausalLM) -> None:
        """Where it can, it begins as the model's end."""
        hidden, last = self.config.hidden_size, model.model.layers[-1]
        self.fc.weight.mul_(0.1)[:, -hidden:] += torch.eye(hidden)
        self.midlayer.mlp.load_state_dict(last.mlp.state_dict())
        self.norm.weight.copy_(model.model.norm.weight)
        self.lm_head.weight.copy_(model.lm_head.weight[self._drafted])

    def learn(self, batch: Batch, taught: Taught) -> Learnt:
        assert taught.taps is not None, "they were kept"
        following, mask = batch.ids[:, 1:], batch.mask[:, :, :-1, :-1]
        positions = batch.positions[:, :-1]
        embedded = self.midlayer.input_layernorm(F.embedding(following, self._words[0]))
        turn = self._rotary[0](embedded, positions)
        given = self.fc(taught.taps[:, :-1].to(embedded.dtype))
        learnt = foreseen(batch, 1)
        words = self._words[0][self._drafted]
        before: list[tuple[Tensor, Tensor]] = []
        losses, agreed = [], []
        for number in range(EAGLE3_STEPS):
            out = self._next(embedded, given, turn, mask, before)
            rows = learnt & (positions >= number)
            with torch.no_grad():
                chances = F.linear(taught.features[:, 1:][rows], words).float().softmax(dim=-1)
            loss, same = compared(self.lm_head(self.norm(out[rows])), chances)
            losses.append(loss * 0.8**number)
            agreed.append(same)
            given = _later(out, 1)
        return Learnt(torch.stack(losses).sum(), agreed)

    def _next(
        self,
        embedded: Tensor,
        given: Tensor,
        turn: tuple[Tensor, Tensor],
        mask: Tensor,
        before: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        layer = self.midlayer
        x = torch.cat((embedded, layer.hidden_norm(given)), dim=-1)
        out = given + layer.self_attn(x, turn, mask, before)
        added: Tensor = out + layer.mlp(layer.post_attention_layernorm(out))
        return added

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.state_dict().items()
        yield "d2t", self._drafted - torch.arange(len(self._drafted))
        yield "t2d", torch.zeros(self.config.vocab_size, dtype=torch.bool).index_fill_(0, self._drafted, True)

    def settings(self) -> dict[str, object]:
        return self.config.to_dict() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(self._drafted),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(EAGLE3_LAYERS), "use_aux_hidden_state": True},
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }


def frequent_words(documents: list[Document], vocabulary: int, count: int) -> Tensor:
    """The `count` tokens that are learnt most often, in order."""
    learnt = [token for ids, counts in documents for token, counted in zip(ids, counts, strict=True) if counted]
    return torch.bincount(torch.tensor(learnt), minlength=vocabulary).topk(count).indices.sort().values


def _later(x: Tensor, places: int) -> Tensor:
    """x [..., length, elements], each row so many places further on, zeros in front."""
    return x if not places else F.pad(x[..., :-places, :], (0, 0, places, 0))
