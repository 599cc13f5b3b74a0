"""Tokenizers of each kind, small enough to be made in a moment, and model directories that hold them."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = (
    "The quick brown fox jumps over the lazy dog. Hello, world! Hello there, how are you today?\n"
    "Der Bär fährt über die Straße nach Köln. Çà et là, où est l'été? Привет, мир! こんにちは世界 안녕하세요 你好\n"
    '😀 smiles 😀😀 and 👩‍👩‍👧 families 🇫🇷 flags. {"a": [1, 2.5, null], "b": "c"}\n'
    "one two three four five six seven eight nine ten, user assistant system\n\n"
)
SPECIAL_FIRST = ["<pad>", "<s>", "</s>"]
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]


@cache
def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: merges over bytes spelled as letters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    # Added tokens that are not special: within the letters of the alphabet (é), and outside of it (space, 好).
    tokenizer.add_tokens(["<tool>", "caf\u00e9", "two words", "\u597d"])
    return tokenizer


@cache
def byte_fallback(*, strip: bool) -> Tokenizer:
    """As Llama 2 (`strip`) and Gemma: pieces with ▁ for a space, byte tokens for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({c for c in TEXT if c.isascii() and c.isprintable() and c != " "} | set("▁äöüßé世"))
    words = ["▁▁", "▁T", "he", "▁The", "qu", "ick", "▁qu", "▁H", "el", "lo", "ello", "▁H" + "ello", "wor", "ld", "世"]
    pieces += letters + [w for w in words if w not in letters]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "▁"), ("▁", "T"), ("h", "e"), ("▁T", "he"), ("▁", "H"), ("e", "l"), ("l", "o"), ("el", "lo")]
    merges += [("▁H", "ello")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


@cache
def wordpiece() -> Tokenizer:
    """As BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        [TEXT], trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    )
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """As T5 and others converted from sentencepiece's unigram models."""
    words = Counter("▁" + word for word in TEXT.split())
    pieces = Counter({letter: sum(letter in word for word in words) for letter in sorted(set("".join(words)))})
    for word, times in sorted(words.items()):
        pieces.update({word[start:end]: times for start in range(2) for end in range(start + 2, len(word) + 1)})
    # Not trained: that gives other pieces in each process.
    scored = [(piece, math.log(times / pieces.total())) for piece, times in pieces.most_common(250)]
    tokenizer = Tokenizer(models.Unigram([("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *scored], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return tokenizer


@cache
def regex_byte_fallback() -> Tokenizer:
    """Byte fallback behind a decoder that only the general scheme knows: its space is matched by an expression."""
    tokenizer = Tokenizer.from_str(byte_fallback(strip=False).to_str())
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("▁"), " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def letters(vocab_size: int) -> Tokenizer:
    """A token for each printable letter of ASCII behind three special ones, and no merges: for vocabularies that have
    no room for all bytes. Further ones are `<fill-1>` and so on."""
    spelled = [*SPECIAL_FIRST, *(chr(code) for code in range(33, 127))]
    spelled += [f"<fill-{number}>" for number in range(1, vocab_size - len(spelled) + 1)]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(spelled)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_FIRST])
    return tokenizer


def write_model(
    folder: Path, tokenizer: Tokenizer, settings: dict[str, Any] | None = None, config: dict[str, Any] | None = None
) -> Path:
    """A model directory without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama", "vocab_size": size}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings if settings is not None else CHAT_SETTINGS))
    return folder


CHAT_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True, "normalized": False},
    "unk_token": "<unk>",
    "chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}
