"""A model's vision tower and projector, by `transformers`: pixels to rows."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from services.encoder.image_decoder import DecodedFrames
from services.encoder.image_process import DecodedImage
from services.encoder.processors.frame_patches import CanvasFrames, FramePatches, SoftFrames, SquareFrames
from services.encoder.processors.image_processor import ImageProcessor, PreparedImage
from services.encoder.processors.own_processors import OWN_PROCESSORS
from shared.messages.generation import EMBEDDING_BYTES, MAX_MEDIA_BYTES, EmbeddingDtype, ImageGrid, PromptEmbeds
from shared.models.image_models import ImageModel, check_tower_sizes, read_image_model
from shared.models.library_builds import BUILDING, first_line

DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]

DTYPES: dict[EmbeddingDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_LANGUAGE_MODELS = ("language_model.", "text_model.", "lm_head.", "embed_tokens.", "norm.")
_LOADED_WHOLE = ("lighton_ocr",)
"""By `model_type`, those of which the library finds no tensors but with their head."""
_COUNT_FRAMES = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr")
"""By `model_type`, those whose bounds are of all frames that a patch is deep, though an image is the same in each."""
_ONE_AXIS = ("lfm3_vl", "video_llama_3", "glm5_next", "minimax_m3_vl", "exaone4_5", "hyperclovax_vision_v2")
"""By `model_type`, those whose tokens of images have positions as those of texts, though their patches lie in grids."""
_CAUSAL_WITHOUT_PADDING = "Phi4MultimodalVisionAttention"
"""The library's attention of a tower that it calls causal: its kernels read that where no patch is white, and an image
would have other rows alone than beside another one. Its own plain attention never does."""
_SCALE = "_scale"
"""What the name of a tensor ends with, or nearly so, that belongs to quantised weights."""
_log = logging.getLogger(__name__)


class TowerUnusable(Exception):
    """The model's images cannot be encoded; the text says why."""


class ImageTower:
    """Owns the weights of a tower and what prepares images for it. One thread at a time.

    An image is encoded alone, so its rows depend on no other, at most on whether there is one.
    """

    hears = False
    """Whether it takes sounds, too."""

    def __init__(self, folder: Path, dtype: DtypeChoice = "auto", max_pixels: int | None = None) -> None:
        """Loads it on the processors. `max_pixels`: of an image of a model that takes images as large as they are,
        beyond which it is scaled down; None: as many as the model's own processor allows. No image gets more rows than
        a prompt may have. Raises TowerUnusable."""
        if (images := read_image_model(folder)) is None:
            raise TowerUnusable(f"{folder}: the model takes no images")
        self._folder, self._mutual, self._beside = folder, images.mutual, images.beside
        with refusing(folder):
            check_tower_sizes(folder)
            config = self._read(images, dtype, max_pixels)
        if not self.hears and hasattr(config, "audio_config"):
            config.audio_config = None
        self._model: Any = load_tower(folder, config, DTYPES[self.dtype])
        self._check_an_image()

    def _read(self, images: ImageModel, dtype: DtypeChoice, max_pixels: int | None) -> Any:
        """What the files but the weights say. Returns the library's configuration of the model. Raises TowerUnusable,
        and whatever the library does."""
        from transformers import AutoConfig, AutoImageProcessor

        config, processors = thinking(AutoConfig.from_pretrained(self._folder)), cast("Any", AutoImageProcessor)
        self._processor: Any
        self._projects = config.model_type == "llama4"
        """Whether what the library calls features of an image are those of its tower alone."""
        if (own := OWN_PROCESSORS.get(config.model_type)) is not None:
            self._processor = own(self._folder)
        else:
            self._processor = processors.from_pretrained(self._folder, backend="pil")
        self._images = ImageProcessor(self._folder, images, config, self._processor, max_pixels)
        self.dtype: EmbeddingDtype = own_dtype(config) if dtype == "auto" else dtype
        levels = list(getattr(config.vision_config, "deepstack_visual_indexes", ()))
        if config.model_type == "granite4_vision":
            levels = [*config.deepstack_layer_map, *config.spatial_target_layers]
        self.size: int = language_config(config).hidden_size * (1 + len(levels))
        """Elements of a row; of models that take some of them behind their first layers, those of all of these."""
        self._max_rows = MAX_MEDIA_BYTES // (self.size * EMBEDDING_BYTES[self.dtype])
        self._merged: int = getattr(self._processor, "merge_size", 1)
        """Patches that a row is made of, on each side; of models whose images have one size 1."""
        self._has_axes = hasattr(self._processor, "temporal_patch_size") and config.model_type not in _ONE_AXIS
        """Whether positions of rows have three axes."""
        self._frames: FramePatches | CanvasFrames | SquareFrames | SoftFrames | None
        given = (self._folder, config, self._processor, self._max_rows)
        self._frames = SquareFrames.of_model(*given) or SoftFrames.of_model(*given)
        if hasattr(self._processor, "merge_size"):
            bounds = self._max_rows, max_pixels
            self._frames = CanvasFrames.of_model(self._folder, config, self._processor, *bounds)
            self._frames = self._frames or FramePatches.of_model(self._folder, self._processor, *bounds)
            counted = self._processor.temporal_patch_size if config.model_type in _COUNT_FRAMES else 1
            if hasattr(self._processor, "max_image_tokens"):
                self._bound_rows(max_pixels)
            else:
                self._processor.size = self._bounded_size(max_pixels, counted)
        elif max_pixels is not None and not self._images.bounds_sides:
            raise TowerUnusable(
                f"{self._folder}: max_pixels is not allowed, as the model gives images sizes of its own"
            )
        return config

    @torch.inference_mode()
    def encode(self, image: DecodedImage | DecodedFrames) -> PromptEmbeds:
        """A row for each token of an image, or of frames of a video. Raises TowerUnusable where they are no
        numbers."""
        if isinstance(image, DecodedFrames):
            prepared = PreparedImage(self._prepared_frames(image))
        else:
            pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)
            prepared = self._prepared(pixels, several=image.several)
        rows, grid = self._rows_of(prepared)
        if getattr(self._frames, "closed", False) and isinstance(image, DecodedFrames) and not image.group.last:
            rows = rows[:-1]  # but for what stands at a video's end
        if len(rows) > self._max_rows:
            raise TowerUnusable(f"the image has {len(rows)} rows; {self._max_rows} are allowed")
        run, texts = self._images.placed(prepared.tokens, len(rows))
        return PromptEmbeds(
            dtype=self.dtype,
            size=self.size,
            rows=packed_rows(rows, self.dtype, "image"),
            runs=(run,),
            grids=() if grid is None else (grid,),
            mutual=(True,) if self._mutual else (),
            texts=texts,
            encoded=self._beside,
        )

    def heeds_others(self, *, sound: bool) -> bool:
        """Whether an image, or a `sound`, has other rows where its chat has further images."""
        return self._images.heeds_others and not sound

    def _prepared(self, pixels: np.ndarray[Any, Any], *, several: bool = False) -> PreparedImage:
        """pixels [height, width, 3]. Raises TowerUnusable where the processor makes nothing of them."""
        from PIL import Image

        try:
            return self._images.prepared(Image.fromarray(pixels), several=several)
        except ValueError as error:
            raise TowerUnusable(f"the model's processor does not take the image: {error}") from None

    def _prepared_frames(self, frames: DecodedFrames) -> dict[str, Tensor]:
        if self._frames is None:
            raise TowerUnusable("the model takes no videos")
        try:
            return self._frames.prepared(frames)
        except ValueError as error:
            raise TowerUnusable(f"the frames cannot be scaled: {error}") from None

    def _rows_of(self, image: PreparedImage) -> tuple[Tensor, ImageGrid | None]:
        """What the processor made → [tokens, hidden], and how these lie where the model's positions tell. Frames of a
        video see nothing of each other in these towers but the two that a patch has, so each two of them are as an
        image, and where a patch has one, each is a video."""
        prepared = image.inputs
        if "image_pixel_values" in prepared:
            return self._rows_of_crops(**prepared), None
        pixels = next(name for name in prepared if name.startswith("pixel_values"))
        for name in (pixels, "high_res_pixel_values", "pixel_values_local"):
            if name in prepared:
                prepared[name] = prepared[name].to(DTYPES[self.dtype])
        if self._beside:
            return self._rows_of_tiles(prepared), None
        encode = self._model.get_image_features if pixels == "pixel_values" else self._model.get_video_features
        features = encode(**prepared)
        if self._projects:
            return self._model.multi_modal_projector(features.last_hidden_state.flatten(0, 1)), None
        levels = getattr(features, "deepstack_features", None) or []
        if features.pooler_output is None:  # Granite 4 Vision's, whose rows begin with nothing
            levels = [packed for _, packed in levels]
            features.pooler_output = [torch.zeros_like(levels[0][0])]
        rows: Tensor = torch.cat(tuple(features.pooler_output))  # of one image, or of its tiles
        rows = torch.cat((rows, *(level[0] for level in levels)), dim=1)
        if (marks := getattr(features, "visual_indicator_features", None)) is not None:
            rows = self._among_marks(rows, marks, torch.tensor(image.tokens))
        patches = prepared.get("image_grid_thw")
        if patches is None or not self._has_axes:
            return rows, None
        frames, height, width = patches[0].tolist()
        return rows, (frames, height // self._merged, width // self._merged)

    def _rows_of_tiles(self, prepared: dict[str, Tensor]) -> Tensor:
        """[tiles · rows, hidden] of Llama 3.2 Vision's: those of the tiles that an image has, and of none that fill it
        up, which no token sees."""
        states = self._model.vision_model(**prepared).last_hidden_state[0, 0]  # [most tiles, rows, levels]
        tiles = int(prepared["aspect_ratio_mask"].sum())
        rows: Tensor = self._model.multi_modal_projector(states[:tiles].flatten(0, 1))
        return rows

    def _rows_of_crops(self, num_img_tokens: Tensor, **prepared: Tensor) -> Tensor:
        """[tokens, hidden] of Phi-4 Multimodal's, whose tower puts rows in place of tokens itself."""
        ids = torch.full((1, int(num_img_tokens)), self._model.config.vision_config.image_token_id)
        empty = torch.zeros(1, ids.shape[1], self.size, dtype=DTYPES[self.dtype])
        rows: Tensor = self._model.embed_tokens_extend.image_embed(ids, empty, **prepared)[0]
        return rows

    def _among_marks(self, rows: Tensor, marks: Tensor, tokens: Tensor) -> Tensor:
        """Ovis2's: [tokens, hidden] of `rows` and of the rows that its tower has for what is written among them."""
        whole = rows.new_empty(len(tokens), rows.shape[1])
        whole[tokens == self._model.config.image_token_id] = rows
        for mark, row in zip(self._model.config.visual_indicator_token_ids, marks, strict=True):
            whole[tokens == mark] = row
        return whole

    def _bounded_size(self, max_pixels: int | None, counted: int) -> Any:
        """As the processor has it, pixels of the smallest and the largest image, but never more than `max_pixels` and
        what has as many rows as a prompt may. `counted`: how often it counts each pixel."""
        size, side = self._processor.size, self._processor.patch_size * self._merged
        own = size["longest_edge"] // counted
        most = min(own, self._max_rows * side**2, own if max_pixels is None else max_pixels)
        if most < side**2:
            raise TowerUnusable(f"max_pixels {most} is not allowed; at least {side**2}, a row")
        return {"shortest_edge": min(size["shortest_edge"], counted * most), "longest_edge": counted * most}

    def _bound_rows(self, max_pixels: int | None) -> None:
        """The same of GLM-5-Next's, which counts rows."""
        own, each = self._processor, (self._processor.patch_size * self._merged) ** 2
        most = min(own.max_image_tokens, self._max_rows)
        most = most if max_pixels is None else min(most, max_pixels // each)
        if most < 1:
            raise TowerUnusable(f"max_pixels {max_pixels} is not allowed; at least {each}, a row")
        own.min_image_tokens, own.max_image_tokens = min(own.min_image_tokens, most), most

    @torch.inference_mode()
    def _check_an_image(self) -> None:
        """That one can be encoded, and has no more rows than are allowed. Raises TowerUnusable."""
        try:
            prepared = self._prepared(np.zeros((64, 64, 3), np.uint8))
            tokens = len(self._rows_of(prepared)[0])
            self._images.placed(prepared.tokens, tokens)
        except (KeyError, TypeError) as error:
            why = f"the processor of images is one of another kind of model ({error})"
            raise TowerUnusable(f"{self._folder}: {why}") from None
        except (ValueError, RuntimeError, IndexError) as error:
            raise TowerUnusable(f"{self._folder}: an image cannot be encoded: {error}") from None
        if tokens > self._max_rows:
            size = tokens * self.size * EMBEDDING_BYTES[self.dtype]
            most = f"{MAX_MEDIA_BYTES} are allowed in a prompt"
            raise TowerUnusable(f"an image has {tokens} rows in {self.dtype}, {size} bytes; {most}")


@contextmanager
def refusing(folder: Path) -> Iterator[None]:
    """Raises TowerUnusable for whatever the library raises over what files in `folder` say."""
    try:
        yield
    except TowerUnusable:
        raise
    except Exception as error:
        raise TowerUnusable(f"{folder}: {first_line(error)}") from None


def thinking(config: Any) -> Any:
    """The library's configuration of the part of Qwen-Omni that writes text, of that of the whole; or it itself."""
    if (part := getattr(config, "thinker_config", None)) is None:
        return config
    part.dtype = part.dtype or config.dtype
    return part


def own_dtype(config: Any) -> EmbeddingDtype:
    """The checkpoint's; float32 where it does not say."""
    text = getattr(config, "text_config", None)
    name = str(config.dtype or getattr(text, "dtype", None) or "float32").removeprefix("torch.")
    return next((each for each in DTYPES if each == name), "float32")


def language_config(config: Any) -> Any:
    """What the library's configuration of a model says of its language model; of some it says that of the whole."""
    return getattr(config, "text_config", None) or config


def packed_rows(rows: Tensor, dtype: EmbeddingDtype, noun: str) -> bytes:
    """[tokens, size] as they are sent. `noun`: what they were made of. Raises TowerUnusable where they are no
    numbers."""
    if not torch.isfinite(rows).all():
        raise TowerUnusable(f"in {dtype} the tower makes numbers of the {noun} that are none")
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


def load_tower(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """The model without its language model. Of a quantised checkpoint too, where the tower's own weights are numbers,
    as published ones have them: nothing of the library's quantizers is needed. Raises TowerUnusable."""
    from transformers import AutoModel, AutoModelForImageTextToText

    text = language_config(config)
    for part in (config, text):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    text.num_hidden_layers = 0
    text.vocab_size = 1
    text.pad_token_id = None
    if hasattr(text, "layer_types"):
        text.layer_types = []
    models: Any = AutoModelForImageTextToText if config.model_type in _LOADED_WHOLE else AutoModel
    model = load_part(models, folder, config, dtype, _is_of_the_tower, "; --language-model-only serves it for texts")
    model = model.model if config.model_type in _LOADED_WHOLE else model
    for module in model.modules():
        if type(module).__name__ == _CAUSAL_WITHOUT_PADDING:
            module.is_causal = False
    setattr(model, "text_model" if hasattr(model, "text_model") else "language_model", None)
    return model.eval()


def _is_of_the_tower(name: str) -> bool:
    return not name.removeprefix("model.").startswith(_LANGUAGE_MODELS)


@contextmanager
def _without_adapter(folder: Path) -> Iterator[Path]:
    """A folder that has no adapter of a language model, as Granite Speech's has: the library would look for that model,
    which is left out."""
    if not (folder / "adapter_config.json").exists():
        yield folder
        return
    with TemporaryDirectory() as bare:
        for file in folder.iterdir():
            if not file.name.startswith("adapter_"):
                (Path(bare) / file.name).symlink_to(file.absolute())
        yield Path(bare)


def load_part(
    models: Any, folder: Path, config: Any, dtype: torch.dtype, needs: Callable[[str], bool], instead: str = ""
) -> Any:
    """A model of one of the library's classes, `config` having left the rest out of it. `needs`: whether a tensor of
    that name is of the part. `instead`: what to say of a checkpoint without them. Pickles are not read. Raises
    TowerUnusable."""
    from transformers.utils import logging as library_logging

    quiet: Any = library_logging
    quiet.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)  # of the rest's tensors
    with refusing(folder), BUILDING, warnings.catch_warnings(), _without_adapter(folder) as base:
        warnings.simplefilter("ignore")
        model, found = models.from_pretrained(
            base,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    modules, scales = dict(model.named_modules()), (name for name in found["unexpected_keys"] if _SCALE in name)
    if codes := sorted(name for name in scales if name.removeprefix("model.").rpartition(".")[0] in modules):
        raise TowerUnusable(f"{folder}: {codes[0]}: quantised weights of a tower are not read")
    wrong = sorted(filter(needs, (*found["missing_keys"], *(str(each[0]) for each in found["mismatched_keys"]))))
    if wrong:
        raise TowerUnusable(f"{folder}: the checkpoint has no {', '.join(wrong[:3])} of the shape it needs{instead}")
    _log.info("tower loaded: %d parameters", sum(each.numel() for each in model.parameters()))
    return model
