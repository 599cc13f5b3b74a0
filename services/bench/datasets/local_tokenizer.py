"""A tokenizer read from a model's folder, for servers that do not tell their own counts."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from services.bench.api import ApiError, PromptBody


class LocalTokenizer:
    """Counts a prompt's text. A chat's template is not known here: only its contents count."""

    def __init__(self, folder: Path) -> None:
        """Raises ApiError where the folder holds no tokenizer.json."""
        path = folder / "tokenizer.json" if folder.is_dir() else folder
        if not path.is_file():
            raise ApiError(f"{path} is no tokenizer.json")
        self._tokenizer = Tokenizer.from_file(str(path))

    async def count(self, body: PromptBody) -> int:
        if isinstance(body, tuple):
            return sum(len(self._tokenizer.encode(content, add_special_tokens=False).ids) for _, content in body)
        return len(body) if isinstance(body, list) else len(self._tokenizer.encode(body).ids)

    def vocabulary(self) -> list[int]:
        """Every token id that is not special."""
        special = {id_ for id_, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        return sorted(set(self._tokenizer.get_vocab(with_added_tokens=True).values()) - special)
