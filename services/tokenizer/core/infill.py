"""Fill in the middle (Bavarian et al., 2022): text before and behind a gap as one prompt, with the tokens that models
of code were trained on. Their answer is what stands in the gap."""

from __future__ import annotations

import re

from services.tokenizer.core.refusal import PromptRefused
from services.tokenizer.core.vocabulary import Vocabulary
from shared.messages.tokenizer import InfillPrompt

TEMPLATES = (
    "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",  # Qwen 2.5 and 3 Coder, CodeGemma, Granite 4
    "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",  # StarCoder, Granite Code, Stable Code
    "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",  # SantaCoder
    "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",  # DeepSeek Coder, V2, V3
    "<|code_prefix|>{prefix}<|code_suffix|>{suffix}<|code_middle|>",  # GLM 4.5 and later
    "<[fim-suffix]>{suffix}<[fim-prefix]>{prefix}<[fim-middle]>",  # Seed-Coder
    "[SUFFIX]{suffix}[PREFIX]{prefix}",  # Codestral
)
"""As their authors publish them. The first one all of whose tokens a vocabulary has is the model's."""
FIELD = re.compile(r"\{(prefix|suffix)\}")
ENDS = (
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|cursor|>", "<|endoftext|>"),
    *("<fim_pad>", "<fim-pad>", "<file_sep>", "<repo_name>", "<filename>", "<reponame>", "<|endofmiddle|>"),
)
"""What such models write behind what they have filled in, beside their end of text and the tokens of templates."""


class Infill:
    """How one model reads the text around a gap."""

    def __init__(self, vocabulary: Vocabulary, template: str | None = None) -> None:
        """`template`: in place of what the vocabulary shows, with {prefix} and {suffix}, each once."""
        known = template or next((each for each in TEMPLATES if _has_all(vocabulary, each)), None)
        self._pieces = None if known is None else FIELD.split(known)
        marks = {mark for each in (*TEMPLATES, known or "") for mark in _marks(each)}
        self.stop_token_ids = tuple(token for token in vocabulary.named({*ENDS, *marks}) if token < vocabulary.size)
        """Tokens that end an answer, as far as the model can write them."""

    def text(self, prompt: InfillPrompt) -> str:
        """The prompt that the model reads. Raises PromptRefused where it has no tokens for that."""
        if self._pieces is None:
            raise PromptRefused(
                "suffix",
                "suffix: this model's vocabulary has no tokens for filling in the middle; tokenizer.infill_template "
                "says how a model without them does it",
            )
        before, first, between, second, behind = self._pieces
        texts = {"prefix": prompt.prefix, "suffix": prompt.suffix}
        return f"{before}{texts[first]}{between}{texts[second]}{behind}"


def _marks(template: str) -> list[str]:
    return [piece for piece in FIELD.split(template) if piece not in ("prefix", "suffix", "")]


def _has_all(vocabulary: Vocabulary, template: str) -> bool:
    marks = _marks(template)
    return len(vocabulary.named(marks)) == len(marks)
