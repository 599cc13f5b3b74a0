"""Tiny random encoders with tokenizers of their kind, as `transformers` and sentence-transformers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

WORDS = 120
LONGEST = 64
ENCODERS = (
    *(
        "Bert",
        "Roberta",
        "ModernBert",
        "Gemma3Text",
        "DistilBert",
        "Electra",
        "Albert",
        "MPNet",
        "Deberta",
        "DebertaV2",
    ),
    *(
        "NomicBert",
        "Gte",
        "JinaEmbeddingsV3",
        "EuroBert",
        "XLMRobertaXL",
        "Data2VecText",
        "RobertaPreLayerNorm",
        "Ernie",
    ),
)
SEGMENTED = ("Bert", "Electra", "Albert", "NomicBert", "Ernie")
"""Those that tell the texts of a pair apart."""
_SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "pad_token_id": 1,
}
_OWN: dict[str, dict[str, Any]] = {
    "Bert": {"max_position_embeddings": LONGEST, "type_vocab_size": 2},
    "DistilBert": {"max_position_embeddings": LONGEST, "dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 4},
    "Electra": {"max_position_embeddings": LONGEST, "type_vocab_size": 2, "embedding_size": 32},
    "Albert": {"max_position_embeddings": LONGEST, "type_vocab_size": 2, "embedding_size": 32},
    "Roberta": {"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1},
    "MPNet": {"max_position_embeddings": LONGEST + 2},
    # As deberta-v3-base has it, with buckets that tokens of one prompt share.
    "DebertaV2": {
        "max_position_embeddings": LONGEST,
        "type_vocab_size": 0,
        "relative_attention": True,
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
    },
    "Deberta": {
        "max_position_embeddings": LONGEST,
        "type_vocab_size": 0,
        "relative_attention": True,
        "max_relative_positions": 24,
        "pos_att_type": ["c2p", "p2c"],
        "position_biased_input": False,
    },
    "NomicBert": {"max_position_embeddings": LONGEST, "type_vocab_size": 2},
    "Ernie": {"max_position_embeddings": LONGEST, "type_vocab_size": 2, "use_task_id": True},
    "Gte": {"max_position_embeddings": LONGEST, "type_vocab_size": 1},
    "JinaEmbeddingsV3": {"max_position_embeddings": LONGEST, "type_vocab_size": 1},
    "EuroBert": {
        "max_position_embeddings": LONGEST,
        "num_key_value_heads": 2,
        "classifier_pooling": "mean",
        "mask_token_id": 4,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
    "XLMRobertaXL": {"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1},
    "Data2VecText": {"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1},
    "RobertaPreLayerNorm": {"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1},
    "Gemma3Text": {
        "max_position_embeddings": LONGEST,
        "use_bidirectional_attention": True,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
    "ModernBert": {
        "max_position_embeddings": LONGEST,
        "local_attention": 16,
        "global_attn_every_n_layers": 2,
        "classifier_pooling": "mean",
        "cls_token_id": 2,
        "sep_token_id": 3,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
}
SPECIAL = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


def make_encoder(
    kind: str, folder: Path, labels: int | None = None, head: str = "ForSequenceClassification", **changes: Any
) -> Any:
    """Writes a checkpoint and a tokenizer of words `w4` to `w119`; the model, with this `head` if there are `labels`.
    `changes`: of its configuration."""
    torch.manual_seed(len(kind))
    more = {} if labels is None else {"num_labels": labels}
    config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **_OWN[kind], **more, **changes})
    automatic: Any = getattr(transformers, f"AutoModel{'' if labels is None else head}")
    model = automatic.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    words = dict(zip(SPECIAL.values(), range(4), strict=True)) | {f"w{i}": i for i in range(4, WORDS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1" if kind in SEGMENTED else "[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = ["input_ids", "token_type_ids", "attention_mask"] if kind in SEGMENTED else ["input_ids", "attention_mask"]
    settings = {**SPECIAL, "tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": names}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"model_max_length": config.max_position_embeddings})
    )
    return model
