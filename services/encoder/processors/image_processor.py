"""Prepares an image as the model's own processor does: what its tower takes, and what is written for it in a prompt.

The library's processors of whole chats are not asked: some want torchvision, or what they need for videos.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from services.encoder.processors.image_texts import TEXTS, ImageText, PixtralText
from shared.models.image_models import ImageModel
from shared.models.tokenizer_files import load_tokenizer

_OF_TEXTS = frozenset(
    {"num_crops", "num_tiles", "num_patches", "num_patches_per_image", "num_soft_tokens_per_image", "rows", "cols"}
    | {"aspect_ratios", "grids", "tile_grid"}
)
"""What processors of images say for the text alone."""
_COUNTED = "batch_num_images"
"""How many images each chat has, of models that look at each of several less closely."""
Texts = tuple[tuple[int, tuple[int, ...]], ...]


class PreparedImage(NamedTuple):
    """An image, as the model's processor gives it to the model."""

    inputs: dict[str, Tensor]
    """What the tower takes, by the names that it has for them."""
    tokens: list[int] | None = None
    """The ids that stand for it in a prompt; None: as many of its token as it has rows."""


class ImageProcessor:
    """Holds the library's processor of a model's images, and what is written for them. One thread at a time."""

    def __init__(self, folder: Path, model: ImageModel, config: Any, images: Any, max_pixels: int | None) -> None:
        """`config`, `images`: the library's, of the model and of what prepares its images. `max_pixels`: of an image
        of a model that bounds the longer side alone, beyond which it is scaled down; None: as many as the longer side
        allows. Raises ValueError where the tokenizer does not know what is written for images."""
        self._images, self._max_pixels = images, max_pixels
        kind = TEXTS.get(config.model_type, TEXTS.get(config.vision_config.model_type))
        self._text: ImageText | None = None
        self.heeds_others = _COUNTED in getattr(images, "model_input_names", ())
        """Whether an image is prepared otherwise where its chat has others."""
        if kind is not None:
            self._tokenizer = load_tokenizer(folder).tokenizer
            self._token = self._name_of(model.token_id)
            self._with_rows = {model.token_id, *getattr(config, "visual_indicator_token_ids", ())}
            self._text = kind(config, self._name_of)

    def _name_of(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""

    @property
    def bounds_sides(self) -> bool:
        """Whether images are as large as they are, up to a longest side."""
        return isinstance(self._text, PixtralText)

    def prepared(self, image: Any, *, several: bool = False) -> PreparedImage:
        """`image`: Pillow's. `several`: its chat has others, too. Raises what the processor does that makes nothing of
        it."""
        if several and self.heeds_others:
            return PreparedImage(self._beside_another(image))
        settings = {} if self._text is None else self._text.settings
        if self._max_pixels is not None and isinstance(self._text, PixtralText):
            longest = self._text.longest_edge(image.size, self._images.size["longest_edge"], self._max_pixels)
            settings = {**settings, "size": {"longest_edge": longest}}
        made = dict(self._images(image, return_tensors="pt", **settings))
        inputs = {name: value for name, value in made.items() if name not in _OF_TEXTS}
        if self._text is None:
            return PreparedImage(inputs)
        text = self._text.written(made, self._token)
        return PreparedImage(inputs, self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _beside_another(self, image: Any) -> dict[str, Tensor]:
        """What LLaVA-OneVision's processor makes of an image that is not alone: it is padded to a square, and no tile
        is cut. The tower is told of two, and gets one."""
        made = self._images([[image, image.resize((1, 1))]], return_tensors="pt")
        return {name: value if name == _COUNTED else value[:1] for name, value in made.items()}

    def placed(self, tokens: list[int] | None, rows: int) -> tuple[tuple[int, int], Texts]:
        """Of an image of so many rows, the run of tokens from the first that has one up to the last, and the pieces of
        text before, within and behind it. Raises ValueError where the tower and the processor do not go together."""
        if tokens is None:
            return (0, rows), ()
        pieces, end = list[tuple[int, tuple[int, ...]]](), 0
        for has_row, ids in groupby(tokens, self._with_rows.__contains__):
            piece = tuple(ids)
            if not has_row:
                pieces.append((end, piece))
            end += len(piece)
        places = [place for place, token in enumerate(tokens) if token in self._with_rows]
        if len(places) != rows or not rows:
            counted = f"the processor writes {len(places)} tokens for them"
            raise ValueError(f"the tower makes {rows} rows of an image, {counted}")
        return (places[0], places[-1] + 1 - places[0]), tuple(pieces)
