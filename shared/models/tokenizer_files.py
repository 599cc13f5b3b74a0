"""A Hugging Face tokenizer read from its files with the `tokenizers` library alone, as `transformers` would read it.

Both the tokenizer and the detokenizer need it: what one encodes, the other must decode by the same vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from shared.models.image_models import read_image_model

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerUnusable(Exception):
    """The directory's tokenizer files cannot be used; the text names the file and says what to do."""


class TokenizerFiles(NamedTuple):
    """The contents of a model directory's tokenizer files."""

    folder: Path
    tokenizer: Tokenizer
    """Without truncation and padding."""
    settings: dict[str, Any]
    """`tokenizer_config.json`; empty where there is none."""
    special_tokens: dict[str, str]
    """`bos_token` and its like, those that are set, as chat templates see them."""
    vocab_size: int
    """Token ids below this are the model's: rows of its embedding, or the tokenizer's own size where that is unsaid."""


def load_tokenizer(folder: Path) -> TokenizerFiles:
    """Reads the tokenizer of a model directory. Raises TokenizerUnusable."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerUnusable(_missing(folder))
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever it cannot read
        raise TokenizerUnusable(f"{path}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = read_json(folder / "tokenizer_config.json")
    declared = _declared_tokens(folder, settings)
    _add_missing(tokenizer, settings, declared)
    named = {name: _content(declared[name]) for name in NAMED_SPECIAL_TOKENS if declared.get(name) is not None}
    return TokenizerFiles(folder, tokenizer, settings, named, _vocab_size(folder, tokenizer))


def _missing(folder: Path) -> str:
    """What to do without a tokenizer.json: a tokenizer that is code of the model's own is not run."""
    files = (*folder.glob("*.model"), *folder.glob("*.tiktoken"))
    pieces = ", ".join(sorted(file.name for file in files))
    auto = read_json(folder / "tokenizer_config.json").get("auto_map")
    own = isinstance(auto, dict) and "AutoTokenizer" in auto
    read = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained('NEW')"
    return (
        f"{folder}: no tokenizer.json there{pieces and f', only {pieces}'}"
        f"{', and code of its own, which is not run' if own else ''}; write one with transformers and sentencepiece "
        f"({read}){', or bring that of a release with the same ids,' if own else ''} and name it: --tokenizer NEW"
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file. Raises TokenizerUnusable."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerUnusable(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerUnusable(f"{path}: a JSON object is expected")
    return value


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that `skip_special_tokens` hides."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def _declared_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Special tokens by attribute. `special_tokens_map.json` counts only where `added_tokens_decoder` is missing."""
    declared = {key: value for key, value in settings.items() if key.endswith(("_token", "_tokens"))}
    if "added_tokens_decoder" not in settings:
        declared.update(read_json(folder / "special_tokens_map.json"))
    return declared


def _add_missing(tokenizer: Tokenizer, settings: dict[str, Any], declared: dict[str, Any]) -> None:
    """Adds the tokens that only the settings name, in order of their ids, as `transformers` does."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    wanted = sorted((settings.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    for _, token in wanted:
        _add(tokenizer, token, known, special=bool(isinstance(token, dict) and token.get("special")))
    for name in NAMED_SPECIAL_TOKENS:
        if declared.get(name) is not None:
            _add(tokenizer, declared[name], known, special=True)
    extra = declared.get("extra_special_tokens") or declared.get("additional_special_tokens") or []
    models_own = [t for name, t in declared.items() if name.endswith("_token") and isinstance(t, (str, dict))]
    for token in [*(extra.values() if isinstance(extra, dict) else extra), *models_own]:
        _add(tokenizer, token, known, special=True)


def _add(tokenizer: Tokenizer, token: Any, known: set[str], *, special: bool) -> None:
    content = _content(token)
    if content in known:
        return
    known.add(content)
    flags = token if isinstance(token, dict) else {}
    added = AddedToken(
        content,
        lstrip=bool(flags.get("lstrip")),
        rstrip=bool(flags.get("rstrip")),
        single_word=bool(flags.get("single_word")),
        normalized=bool(flags.get("normalized", not special)),
    )
    if special:
        tokenizer.add_special_tokens([added])
    else:
        tokenizer.add_tokens([added])


def _content(token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise TokenizerUnusable(f"tokenizer_config.json: a special token is a string or an object, not {token!r}")
    return content


def _vocab_size(folder: Path, tokenizer: Tokenizer) -> int:
    """With what stands for images that are beside the prompt, which is behind all that is drawn."""
    config, images = read_json(folder / "config.json"), read_image_model(folder)
    further = images.token_id + 1 if images is not None and images.beside else 0
    for source in (config, config.get("text_config")):
        if isinstance(source, dict) and isinstance(source.get("vocab_size"), int):
            return max(int(source["vocab_size"]), further)
    return int(tokenizer.get_vocab_size(with_added_tokens=True))
