"""Tiny random encoders with a decoder, of BART's kin and of T5's, and what `transformers` generates by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig

from shared.messages.generation import PromptEmbeds
from tests.support.models.embedded_prompts import prompt_embeds
from tests.support.models.tiny_tokenizers import TEXT

POSITIONS = 96
PAD, END = 0, 1
FORCED = 3

_BART: dict[str, Any] = {
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": POSITIONS,
    "init_std": 0.2,
}
_T5: dict[str, Any] = {
    "num_layers": 3,
    "num_heads": 4,
    "d_kv": 12,
    "d_ff": 96,
    "n_positions": POSITIONS,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 24,
    "initializer_factor": 1.0,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("Bart", _BART),
    "mbart": ("MBart", _BART),
    "marian": ("Marian", {**_BART, "scale_embedding": True}),
    "pegasus": ("Pegasus", _BART),
    "blenderbot": ("Blenderbot", _BART),
    "t5": ("T5", _T5),
    "flan-t5": ("T5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", _T5),
    "umt5": ("UMT5", _T5),
}
"""By a name of ours: what the library calls it, and how it differs from its default."""

FORCING = ("bart", "mbart")
"""Those whose answers begin with `FORCED`."""


class EncoderDecoder(NamedTuple):
    """A model that was written to a folder, and the library's own of the same weights."""

    path: Path
    reference: Any
    tokenizer: Tokenizer
    start: tuple[int, ...]
    """What its answers are drawn behind."""

    def ids(self, text: str) -> list[int]:
        """Of a prompt."""
        found: list[int] = self.tokenizer.encode(text).ids
        return found

    @torch.inference_mode()
    def rows(self, prompt: list[int]) -> PromptEmbeds:
        """What its encoder makes of a prompt, as a message has it."""
        rows = self.reference.get_encoder()(torch.tensor([prompt])).last_hidden_state[0]
        made = prompt_embeds(rows)
        return PromptEmbeds(dtype=made.dtype, size=made.size, rows=made.rows, encoded=True)

    @torch.inference_mode()
    def generated(self, prompt: list[int], count: int, begin: tuple[int, ...] | None = None) -> list[int]:
        """Up to `count` tokens as the library's `generate` draws them behind `start`, or behind `begin`."""
        forced = self.start[1] if begin is None and len(self.start) > 1 else None
        behind = len(self.start if begin is None else begin)
        given = {} if begin is None else {"decoder_input_ids": torch.tensor([begin])}
        output = self.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=GenerationConfig(
                max_new_tokens=count + (forced is not None),
                do_sample=False,
                num_beams=1,
                eos_token_id=END,
                pad_token_id=PAD,
                decoder_start_token_id=self.start[0],
                forced_bos_token_id=forced,
            ),
            **given,
        )
        tokens: list[int] = output[0, behind:].tolist()
        return tokens

    def text(self, tokens: list[int]) -> str:
        """Without special tokens."""
        found: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return found


def make_encoder_decoder(
    folder: Path, kind: str, seed: int = 2, *, dtype: torch.dtype = torch.float32
) -> EncoderDecoder:
    """Writes a model of this `kind` to `folder`."""
    tokenizer = _tokenizer()
    name, different = KINDS[kind]
    forced = FORCED if kind in FORCING else None
    library: Any = transformers
    start = PAD if forced is None else END
    config = getattr(library, f"{name}Config")(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=48,
        pad_token_id=PAD,
        bos_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=start,
        **different,
    )
    torch.manual_seed(seed)
    written = "MarianMTModel" if name == "Marian" else f"{name}ForConditionalGeneration"
    reference = getattr(library, written)(config).eval()
    bias = getattr(reference, "final_logits_bias", None)
    if bias is not None:
        bias.normal_(0.0, 0.02)
    _unsettle(reference)
    reference.generation_config.forced_bos_token_id, reference.generation_config.forced_eos_token_id = forced, None
    reference.to(dtype).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return EncoderDecoder(folder, reference, tokenizer, (start,) if forced is None else (start, forced))


def _tokenizer() -> Tokenizer:
    """As T5's: words, then letters, with an end behind; not trained, which would make another one in each process."""
    words = sorted({f"▁{word}" for word in TEXT.split()})
    letters = sorted({letter for word in words for letter in word})
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0), ("<s>", 0.0)]
    pieces = [*special, *((each, -5.0) for each in words), *((each, -10.0) for each in letters)]
    tokenizer = Tokenizer(models.Unigram(list(dict(pieces).items()), unk_id=2))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each, _ in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return tokenizer


@torch.no_grad()
def _unsettle(reference: Any) -> None:
    """Has what it writes depend on places and on the prompt: random models with one table of tokens for both ends write
    the same token for ever."""
    relative = "T5" in type(reference).__name__
    tokens = 0.02 if relative else 0.2
    larger = ("wi", "wi_0", "wi_1", "wo", "q", "k") if relative else ()
    scaled = getattr(reference.config, "scale_embedding", False)
    reference.get_input_embeddings().weight.mul_(tokens / (7.0 if scaled else 1.0))
    for name, weight in reference.named_parameters():
        last = name.split(".")[-2]
        if last == "relative_attention_bias":
            weight.normal_(0.0, 3.0)
        elif last == "embed_positions" and weight.requires_grad:
            weight.mul_(6.0)
        elif last in larger or "encoder_attn" in name or "EncDecAttention" in name:
            weight.mul_(3.0)
