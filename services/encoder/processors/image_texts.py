"""What kinds of models have in a prompt for an image: text around and among the tokens that have rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol


class ImageText(Protocol):
    """What a kind of models has in a prompt for an image: text around and among the tokens that have rows."""

    settings: Mapping[str, Any]
    """Of the processor of images, beside its own."""

    def written(self, made: dict[str, Any], token: str) -> str:
        """`made`: what the processor of images made of one. `token`: stands for a row. Raises ValueError for an image
        that the tower does not take."""
        ...


NameOf = Callable[[int], str]
"""Of a token."""


class PixtralText:
    """Pixtral's and Mistral 3's: a line of rows for each line of squares, with the end of each written behind it."""

    def __init__(self, config: Any, name_of: NameOf) -> None:
        self._side = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
        self.settings: Mapping[str, Any] = {"patch_size": {"height": self._side, "width": self._side}}

    def written(self, made: dict[str, Any], token: str) -> str:
        """See :class:`ImageText`. Raises ValueError for an image of one row, which the library's tower takes apart."""
        height, width = (int(side) // self._side for side in made["image_sizes"][0])
        if height * width == 1:
            raise ValueError(f"{self._side} times {self._side} pixels are too few; one side has to have more")
        return "[IMG_BREAK]".join(height * [width * token]) + "[IMG_END]"

    def longest_edge(self, size: tuple[int, int], most: int, max_pixels: int) -> int:
        """Of an image of `size`, at most `most`, with which it has no more pixels than that once it is scaled."""
        longest = min(most, max(size))
        while longest > self._side and self._pixels(size, longest) > max_pixels:
            longest -= 1
        return longest

    def _pixels(self, size: tuple[int, int], longest: int) -> int:
        return math.prod(-(-side * longest // max(size) // self._side) * self._side for side in size)


class LightOnText(PixtralText):
    """LightOnOCR's: rows alone, of whole squares; its file says of how many pixels an image's sides are multiples."""

    def __init__(self, config: Any, name_of: NameOf) -> None:
        super().__init__(config, name_of)
        self.settings = {}

    def written(self, made: dict[str, Any], token: str) -> str:
        """See :class:`ImageText`. Raises ValueError for an image without a whole square."""
        count: int = math.prod(int(side) // self._side for side in made["image_sizes"][0])
        if not count:
            raise ValueError(f"each side has to have {self._side} pixels once it is scaled")
        return count * token


class IdeficsText:
    """Idefics3's and SmolVLM's: the rows of each tile behind its place, those of the whole image at the end."""

    settings: Mapping[str, Any] = {"return_row_col_info": True}

    def __init__(self, config: Any, name_of: NameOf) -> None:
        self._rows = (config.vision_config.image_size // config.vision_config.patch_size // config.scale_factor) ** 2

    def written(self, made: dict[str, Any], token: str) -> str:
        """See :class:`ImageText`."""
        (lines,), (columns,) = made["rows"][0], made["cols"][0]
        mark, rows = "<fake_token_around_image>", self._rows * token
        tiles = [
            "".join(f"{mark}<row_{line + 1}_col_{column + 1}>{rows}" for column in range(columns)) + "\n"
            for line in range(lines)
        ]
        return "".join(tiles) + ("\n" if tiles else "") + f"{mark}<global-img>{rows}{mark}"


class DoclingText:
    """Granite Docling's: as Idefics3's, but for an image of one tile, which has its rows once. The line break behind
    these is the tokenizer's to write, as it may be one token with what follows."""

    settings: Mapping[str, Any] = {}

    def __init__(self, config: Any, name_of: NameOf) -> None:
        tower = config.vision_config
        self._rows = (tower.image_size // tower.patch_size // tower.scale_factor) ** 2
        self._has_fine = tower.use_fine_route

    def written(self, made: dict[str, Any], token: str) -> str:
        """See :class:`ImageText`. Raises ValueError where its file asks for a path that the tower has not."""
        if (fine := "tile_fine_mask" in made) and not self._has_fine:
            raise ValueError("fine_route: true is not allowed; the model has no vision_config.use_fine_route")
        (lines,), (columns,) = made["rows"][0], made["cols"][0]
        mark, rows = "<fake_token_around_image>", self._rows * (4 if fine else 1) * token
        tiles = [
            "".join(f"{mark}<row_{line + 1}_col_{column + 1}>{rows}" for column in range(columns))
            for line in range(lines)
        ]
        if lines * columns == 1:
            return tiles[0]
        return "\n".join(tiles) + f"\n\n{mark}<global-img>{rows}{mark}"


class InternText:
    """InternVL's: the rows of all tiles, one behind the other."""

    settings: Mapping[str, Any] = {"crop_to_patches": True}

    def __init__(self, config: Any, name_of: NameOf) -> None:
        tower = config.vision_config
        (high, wide), (patch_high, patch_wide) = tower.image_size, tower.patch_size
        self._rows = int((high // patch_high) * (wide // patch_wide) * config.downsample_ratio**2)

    def written(self, made: dict[str, Any], token: str) -> str:
        """See :class:`ImageText`."""
        return f"<img>{int(made['num_patches'][0]) * self._rows * token}</img>"


class LlamaText:
    """Llama 4's: the rows of each tile, line by line, with separators behind them, those of the whole image at the
    end."""

    settings: Mapping[str, Any] = {}

    def __init__(self, config: Any, name_of: NameOf) -> None:
        tower = config.vision_config
        self._rows = int((tower.image_size // tower.patch_size) ** 2 * tower.pixel_shuffle_ratio**2)

    def written(self, made: dict[str, Any], token: str) -> str:
        """See :class:`ImageText`."""
        (lines, columns), rows = made["aspect_ratios"][0].tolist(), self._rows * token
        line = "<|tile_x_separator|>".join(columns * [rows]) + "<|tile_y_separator|>"
        tiles = lines * line if lines * columns > 1 else ""
        return f"<|image_start|>{tiles}<|image|>{rows}<|image_end|>"


class Gemma4Text:
    """Gemma 4's: rows between two marks."""

    settings: Mapping[str, Any] = {}

    def __init__(self, config: Any, name_of: NameOf) -> None:
        self._begin, self._end = name_of(config.boi_token_id), name_of(config.eoi_token_id)

    def written(self, made: dict[str, Any], token: str) -> str:
        """See :class:`ImageText`."""
        return f"{self._begin}{int(made['num_soft_tokens_per_image'][0]) * token}{self._end}"


class AyaText:
    """Aya Vision's: the rows of each tile behind its number, those of the whole image at the end."""

    settings: Mapping[str, Any] = {"crop_to_patches": True}

    def __init__(self, config: Any, name_of: NameOf) -> None:
        self._rows = _rows_of_a_tile(config)

    def written(self, made: dict[str, Any], token: str) -> str:
        """See :class:`ImageText`."""
        rows = self._rows * token
        tiles = (f"TILE_{number}{rows}" for number in range(1, int(made["num_patches"][0])))
        return f"<|START_OF_IMG|>{''.join(tiles)}TILE_GLOBAL{rows}<|END_OF_IMG|>"


class CommandText:
    """Command A Vision's: a line break behind the rows of each tile, those of the whole image at the end."""

    settings: Mapping[str, Any] = {}

    def __init__(self, config: Any, name_of: NameOf) -> None:
        self._rows = _rows_of_a_tile(config)

    def written(self, made: dict[str, Any], token: str) -> str:
        """See :class:`ImageText`."""
        tile = f"{self._rows * token}<|IMG_LINE_BREAK|>"
        return f"<|START_OF_IMG|>{int(made['num_patches'][0]) * tile}<|END_OF_IMG|>"


class OvisText:
    """Ovis2's: rows of the whole image, then those of each tile, with marks between them that have rows, too."""

    settings: Mapping[str, Any] = {}

    def __init__(self, config: Any, name_of: NameOf) -> None:
        tower = config.vision_config
        self._rows = (-(-(tower.image_size // tower.patch_size) // tower.hidden_stride)) ** 2
        self._marks = [name_of(each) for each in config.visual_indicator_token_ids]

    def written(self, made: dict[str, Any], token: str) -> str:
        """See :class:`ImageText`."""
        begin, whole, column, line, end = self._marks
        (lines, columns), rows = made["grids"][0].tolist(), self._rows * token
        tiles = line.join(lines * [column.join(columns * [rows])]) if lines * columns > 1 else ""
        return f"{begin}{rows}{whole}{tiles}{end}"


class LfmText:
    """LFM2-VL's: the rows of each tile behind its place, those of the whole image at the end."""

    settings: Mapping[str, Any] = {}

    def __init__(self, config: Any, name_of: NameOf) -> None:
        self._factor = config.downsample_factor

    def written(self, made: dict[str, Any], token: str) -> str:
        """See :class:`ImageText`."""
        rows = [math.prod(each // self._factor for each in shape) * token for shape in made["spatial_shapes"].tolist()]
        lines, columns = made["tile_grid"].tolist()
        if lines * columns == 1:
            return f"<|image_start|>{rows[0]}<|image_end|>"
        places = [f"<|img_row_{line + 1}_col_{column + 1}|>" for line in range(lines) for column in range(columns)]
        marked = [*places, *(["<|img_thumbnail|>"] if len(rows) > len(places) else [])]
        whole = "".join(mark + own for mark, own in zip(marked, rows, strict=True))
        return f"<|image_start|>{whole}<|image_end|>"


class MiniCpmText:
    """MiniCPM-V's: the rows of the whole image, then those of each tile, line by line; its number in a chat, which
    comes first, is the tokenizer's to write."""

    settings: Mapping[str, Any] = {}

    def __init__(self, config: Any, name_of: NameOf) -> None:
        self._merged = 4 if config.downsample_mode == "4x" else 16

    def written(self, made: dict[str, Any], token: str) -> str:
        """See :class:`ImageText`."""
        (lines, columns), counts = made["grids"][0], (made["target_sizes"].prod(-1) // self._merged).tolist()
        whole, *tiles = (count * token for count in counts)
        marked = [f"<slice>{rows}</slice>" for rows in tiles]
        written = ("".join(marked[line * columns : (line + 1) * columns]) for line in range(lines))
        return f"<image>{whole}</image>" + "\n".join(written)


class DeepseekOcrText:
    """DeepSeek-OCR 2's: the rows of each tile, those of the whole image, and one that stands behind them."""

    settings: Mapping[str, Any] = {"crop_to_patches": True, "min_patches": 2, "max_patches": 6}

    def __init__(self, config: Any, name_of: NameOf) -> None:
        pass

    def written(self, made: dict[str, Any], token: str) -> str:
        """See :class:`ImageText`."""
        return (int(made["num_local_patches"][0]) * _QUERIES_OF_A_TILE + _QUERIES_OF_THE_WHOLE + 1) * token


class MiniMaxText:
    """MiniMax-M3's: its rows between two marks."""

    settings: Mapping[str, Any] = {}

    def __init__(self, config: Any, name_of: NameOf) -> None:
        self._merged = config.vision_config.spatial_merge_size**2

    def written(self, made: dict[str, Any], token: str) -> str:
        """See :class:`ImageText`."""
        rows = int(made["image_grid_thw"][0].prod()) // self._merged
        return f"]<]start of image[>[{rows * token}]<]end of image[>["


class BoundedText:
    """Idefics2's: the rows of an image's four quarters and of the whole, with a mark between them, or of the whole
    alone; the marks on both sides are the tokenizer's to write."""

    settings: Mapping[str, Any] = {}

    def __init__(self, config: Any, name_of: NameOf) -> None:
        self._rows = int(config.perceiver_config.resampler_n_latents)

    def written(self, made: dict[str, Any], token: str) -> str:
        """See :class:`ImageText`."""
        return "<fake_token_around_image>".join(made["pixel_values"].shape[1] * [self._rows * token])


class AriaText:
    """Aria's: rows alone, of an image that its processor never cuts, whatever its file says."""

    settings: Mapping[str, Any] = {"max_image_size": 980, "split_image": False}

    def __init__(self, config: Any, name_of: NameOf) -> None:
        self._rows = config.projector_patch_to_query_dict
        self._side = config.vision_config.patch_size

    def written(self, made: dict[str, Any], token: str) -> str:
        """See :class:`ImageText`."""
        return int(self._rows[math.prod(side // self._side for side in made["pixel_values"].shape[-2:])]) * token


_QUERIES_OF_A_TILE, _QUERIES_OF_THE_WHOLE = 12**2, 16**2
"""DeepSeek-OCR 2's tower has so many, whatever its configuration says."""


def _rows_of_a_tile(config: Any) -> int:
    tower = config.vision_config
    return int((tower.image_size // tower.patch_size // config.downsample_factor) ** 2)


TEXTS: dict[str, Callable[[Any, NameOf], ImageText]] = {
    "pixtral": PixtralText,
    "lighton_ocr": LightOnText,
    "qianfan_ocr": InternText,
    "idefics3": IdeficsText,
    "smolvlm": IdeficsText,
    "granite_docling": DoclingText,
    "internvl": InternText,
    "llama4": LlamaText,
    "gemma4": Gemma4Text,
    "gemma4_unified": Gemma4Text,
    "aya_vision": AyaText,
    "cohere2_vision": CommandText,
    "ovis2": OvisText,
    "lfm2_vl": LfmText,
    "minicpmv4_6": MiniCpmText,
    "deepseek_ocr2": DeepseekOcrText,
    "minimax_m3_vl": MiniMaxText,
    "idefics2": BoundedText,
    "aria": AriaText,
}
"""By `model_type` of the model, or else of the tower. Others have nothing but rows for an image."""
