"""Videos of a few frames, and what `transformers` makes of them with tiny models: the reference.

The library's processors of videos ask for torchvision. What they do is done here of the whole video at once, by those
of their functions that do without it, and by Pillow's scaling.
"""

from __future__ import annotations

import base64
import io
import json
import re
import struct
from collections.abc import Mapping, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import av
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import GenerationConfig
from transformers.image_utils import SizeDict
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as of_each
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_all
from transformers.video_utils import VideoMetadata

from services.gateway.videos.video_process import DecodedGroup, VideoShape, decode_video
from shared.models.video_models import read_frame_size, read_video_model
from tests.support.models.tiny_gemma4 import GemmaVideos
from tests.support.models.tiny_images import ImageModel, logits_behind
from tests.support.models.tiny_qwen_vl import END, MERGED, PATCH, SIDE, START
from tests.support.models.torchvision_stub import import_without_torchvision

_GLM_5_NEXT = "transformers.models.glm5_next.video_processing_glm5_next"
VIDEO_PAD = "<|video_pad|>"
Frames = NDArray[np.uint8]
UPRIGHT = (0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)


def noise(count: int, size: tuple[int, int] = (160, 40), seed: int = 0) -> Frames:
    """[frames, height, width, 3] of coarse random squares."""
    width, height = size
    coarse = np.random.default_rng(seed).integers(0, 256, (count, -(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    return coarse.repeat(8, axis=1).repeat(8, axis=2)[:, :height, :width]


def video(
    frames: Frames,
    rate: int | Fraction = 5,
    form: str = "mp4",
    codec: str = "libx264",
    matrix: tuple[int, ...] | None = None,
) -> bytes:
    """The file of a video. `matrix`: how an MP4 asks to be shown, in its own numbers."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as to:
        stream: Any = to.add_stream(codec, rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            to.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        to.mux(stream.encode())
    made = file.getvalue()
    if matrix is None:
        return made
    head, name, tail = made.partition(b"tkhd")
    return head + name + tail.replace(struct.pack(">9i", *UPRIGHT), struct.pack(">9i", *matrix), 1)


def padded(file: bytes, size: int) -> bytes:
    """An MP4 of `size` bytes that is the same video."""
    return file + struct.pack(">I4s", size - len(file), b"free") + bytes(size - len(file) - 8)


def video_part(file: bytes, form: str = "mp4") -> dict[str, Any]:
    """A part of a message."""
    url = f"data:video/{form};base64,{base64.b64encode(file).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}


def shown_with_videos(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the library's chat templates take them."""
    kinds = {"image_url": "image", "video_url": "video"}
    return [
        {**each, "content": [{"type": kinds[p["type"]]} if p["type"] in kinds else p for p in each["content"]]}
        for each in messages
    ]


class _Prepared(NamedTuple):
    patches: torch.Tensor
    grid: list[int]
    text: str
    shape: VideoShape


class _VideoProcessor:
    """Stands for the library's processor of videos, which asks for torchvision."""

    merge_size, temporal_patch_size = MERGED, 2
    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def __init__(self, made: list[_Prepared], name: str = "pixel_values_videos") -> None:
        """`name`: of the pixels of frames that are no patches."""
        self._made, self._name = made, name

    def __call__(self, videos: Any, **settings: Any) -> dict[str, Any]:
        """What it made of videos, one after the other."""
        seen = [
            VideoMetadata(0, fps=1.0, frames_indices=cast("Any", list(each.shape.times)), duration=each.shape.seconds)
            for each in self._made
        ]
        if not self._made[0].grid:
            patches = [each.patches for each in self._made]
            return {self._name: torch.stack(patches), "video_metadata": seen}
        return {
            "pixel_values_videos": torch.cat([each.patches for each in self._made]),
            "video_grid_thw": torch.tensor([each.grid for each in self._made]),
            "video_metadata": seen,
        }


class _Qwen3Processor(Qwen3VLProcessor):
    """Without the processor of videos, which asks for torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        super().__init__(image_processor, tokenizer, cast("Any", None))

    def create_mm_token_type_ids(self, input_ids: Any) -> list[list[int]]:
        """As the library's, which makes arrays of tensors in a way that NumPy warns of."""
        kinds: list[list[int]] = super().create_mm_token_type_ids(torch.as_tensor(input_ids).tolist())
        return kinds


def _as_images(inputs: dict[str, Any], text: str) -> dict[str, Any]:
    """The same, with each two frames of GLM's as an image: where a chat has both, the library finds more tokens of
    images than it has rows."""
    patches, grids = list[torch.Tensor](), list[list[int]]()
    given = {
        "<|image|>": (inputs["pixel_values"], inputs["image_grid_thw"]),
        "<|video|>": (inputs.pop("pixel_values_videos"), inputs.pop("video_grid_thw")),
    }
    shown = {
        mark: iter(list(zip(grid.tolist(), pixels.split(grid.prod(dim=1).tolist()), strict=True)))
        for mark, (pixels, grid) in given.items()
    }
    for mark in re.findall(r"<\|(?:image|video)\|>", text):
        (frames, *sides), pixels = next(shown[mark])
        patches.append(pixels)
        grids += frames * [[1, *sides]]
    kinds = inputs["mm_token_type_ids"].clamp(max=1)
    together = {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids), "mm_token_type_ids": kinds}
    return inputs | together


class VideoReference:
    """What the library's own model generates of the frames that are looked at."""

    def __init__(self, model: ImageModel, kind: str) -> None:
        """`kind`: as the model was made, of Qwen's or GLM's, onevision, gemma4, or of `image_kinds`."""
        self._model, self._second = model, kind == "qwen2.5"
        self._unified = kind == "gemma4-unified"
        self._timed = not kind.startswith(("qwen2", "exaone"))
        self._square, self._cropped = kind in ("onevision", "internvl", "smolvlm"), kind == "llava-next-video"
        self._qwen, self._glm, self._gemma = (kind.startswith(each) for each in ("qwen", "glm", "gemma4"))
        self._canvas, self._smol = kind == "glm-5-next", kind == "smolvlm"

    def greedy(self, messages: list[dict[str, Any]], images: list[bytes], videos: list[bytes], count: int) -> list[int]:
        """`count` tokens."""
        return self.greedy_of(self.inputs(messages, images, videos), count)

    @torch.inference_mode()
    def greedy_of(self, inputs: Mapping[str, Any], count: int, said: Sequence[int] = ()) -> list[int]:
        """`count` tokens behind a prompt. `said`: what somebody holds them to be; one pass shows whether each is the
        likeliest behind those before it, in a fraction of the time of `generate`. Marks of images and frames among them
        would be read as such."""
        found = list(said)
        marks = self._model.processor.tokenizer.get_added_vocab().values()
        if len(found) == count and set(found).isdisjoint(marks):
            logits = logits_behind(self._model.reference, inputs, found)
            if found == logits.argmax(-1).tolist():
                return found
        settings = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None)
        output = self._model.reference.generate(**inputs, generation_config=settings)
        tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens

    def inputs(self, messages: list[dict[str, Any]], images: list[bytes], videos: list[bytes]) -> dict[str, Any]:
        """What its model is given of a chat."""
        processor = self._model.processor
        text = processor.apply_chat_template(shown_with_videos(messages), add_generation_prompt=True)
        made = [self._prepared(each) for each in videos]
        if not self._qwen:
            return self._processed(processor, text, images, made)
        if self._timed:
            # release 5.24 leaves the template's marks around those of frames, which earlier ones took away
            text = text.replace(f"{START}{VIDEO_PAD}{END}", VIDEO_PAD)
            timed = _Qwen3Processor(processor.image_processor, processor.tokenizer)
            return self._processed(timed, text, images, made)
        first, *behind = text.split(VIDEO_PAD)
        for each, part in zip(made, behind, strict=True):
            first += each.text + part
        loaded = [Image.open(io.BytesIO(each)).convert("RGB") for each in images]
        inputs = processor(first, loaded, add_special_tokens=False, return_tensors="pt")
        token = processor.tokenizer.convert_tokens_to_ids(VIDEO_PAD)
        inputs["mm_token_type_ids"] = inputs["mm_token_type_ids"] + 2 * (inputs["input_ids"] == token).int()
        if made:
            inputs["pixel_values_videos"] = torch.cat([each.patches for each in made])
            inputs["video_grid_thw"] = torch.tensor([each.grid for each in made])
        if made and self._second:
            inputs["second_per_grid_ts"] = torch.tensor([each.shape.seconds_of_two for each in made])
        return inputs

    def _processed(self, processor: Any, text: str, images: list[bytes], made: list[_Prepared]) -> dict[str, Any]:
        """By the library's processor of chats, given what that of videos would make."""
        seen = [(each.patches, each.shape.times) for each in made]
        own = _VideoProcessor(made, "pixel_values" if self._smol else "pixel_values_videos")
        before = getattr(processor, "video_processor", None)
        processor.video_processor = GemmaVideos(seen, unified=self._unified) if self._gemma else own
        loaded: Any = [Image.open(io.BytesIO(each)).convert("RGB") for each in images]
        inputs = processor(
            text=text,
            images=[loaded] if self._model.heeds_others and loaded else loaded or None,
            videos=[np.zeros((1, 1, 1, 3), np.uint8) for _ in made] or None,
            add_special_tokens=False,
            return_tensors="pt",
        )
        processor.video_processor = before
        if self._smol:
            return self._tiles_and_frames(dict(inputs), text, loaded, made)
        together = images and made and self._glm and not self._canvas
        return _as_images(dict(inputs), text) if together else dict(inputs)

    def _tiles_and_frames(
        self, inputs: dict[str, Any], text: str, images: list[Any], made: list[_Prepared]
    ) -> dict[str, Any]:
        """The same of SmolVLM, whose library takes no images beside videos: pixels of all in the prompt's order."""
        tiles = (self._model.processor.image_processor(each, return_tensors="pt")["pixel_values"][0] for each in images)
        shown = {"<image>": iter(tiles), "<video>": (each.patches for each in made)}
        pixels = [next(shown[mark]) for mark in re.findall("<image>|<video>", text)]
        inputs.pop("pixel_attention_mask", None)
        return inputs | ({"pixel_values": torch.cat(pixels)[None]} if pixels else {})

    def _prepared(self, file: bytes) -> _Prepared:
        how = read_video_model(self._model.path)
        assert how is not None
        size = read_frame_size(self._model.path, how.sampling)
        shape, *pairs = decode_video(file, how)
        assert isinstance(shape, VideoShape), shape
        packed = b"".join(each.pixels for each in pairs if isinstance(each, DecodedGroup))
        frames = np.frombuffer(packed, np.uint8).reshape(-1, shape.height, shape.width, 3)
        if self._gemma:
            return _Prepared(torch.from_numpy(frames.copy()), [], "", shape)
        bounds = size.shortest_edge, size.longest_edge
        side = self._model.reference.config.vision_config.image_size if self._square or self._cropped else 0
        if self._square:
            height = width = side[0] if isinstance(side, list) else side
        elif self._cropped:
            height, width = (int(side * each / min(frames.shape[1:3])) for each in frames.shape[1:3])
        elif self._timed:
            height, width = of_all(len(shape.times), shape.height, shape.width, 2, SIDE, *bounds)
        else:
            height, width = of_each(shape.height, shape.width, SIDE, *bounds)
        images = self._model.processor.image_processor
        if self._canvas:
            return self._on_canvas(frames, shape)
        if self._smol:
            library = import_without_torchvision("transformers.models.smolvlm.video_processing_smolvlm")
            high, wide = library.get_resize_output_image_size(
                torch.from_numpy(frames.copy()).permute(0, 3, 1, 2), 2 * side
            )
            frames = np.stack(
                [np.asarray(Image.fromarray(each).resize((wide, high), images.resample)) for each in frames]
            )
        scaled = np.stack([Image.fromarray(each).resize((width, height), images.resample) for each in frames])
        mean, std = (np.array(each, np.float32)[:, None, None] for each in (images.image_mean, images.image_std))
        pixels = torch.tensor((scaled.transpose(0, 3, 1, 2).astype(np.float32) * images.rescale_factor - mean) / std)
        if self._cropped:
            library, size_of = self._model.processor.image_processor, SizeDict(height=side, width=side)
            pixels = torch.from_numpy(np.stack([library.center_crop(each, size_of) for each in pixels.numpy()]))
        if self._square or self._cropped:
            return _Prepared(pixels, [], "", shape)
        patchify: Any = Qwen3VLVideoProcessor.patchify  # of all kinds the same
        patches, *grid = patchify(None, pixels[None], PATCH, MERGED, 2)
        written = grid[0] * (grid[1] * grid[2] // MERGED**2) * VIDEO_PAD if self._qwen else ""
        return _Prepared(patches[0], grid, written, shape)

    def _on_canvas(self, frames: Frames, shape: VideoShape) -> _Prepared:
        """By the library's processor of GLM-5-Next, with Pillow's scaling in place of torchvision's."""
        module, images = import_without_torchvision(_GLM_5_NEXT), self._model.processor.image_processor

        def resize(_own: Any, video: torch.Tensor, size: Any, resample: Any) -> torch.Tensor:
            pictures = (Image.fromarray(each.permute(1, 2, 0).numpy()) for each in video[0])
            made = [np.asarray(each.resize((size.width, size.height), resample)) for each in pictures]
            return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2)[None]

        def pad(video: torch.Tensor, sides: list[int], fill: int) -> torch.Tensor:
            return torch.nn.functional.pad(video, (0, sides[2], 0, sides[3]), value=fill)

        module.TorchvisionBackend, module.tvF = SimpleNamespace(resize=resize), SimpleNamespace(pad=pad)
        processor = module.Glm5NextVideoProcessor
        own = SimpleNamespace(
            resize=lambda **more: processor.resize(None, **more),
            rescale_and_normalize=lambda video, _rescales, factor, _normalizes, mean, std: (
                (video.float() * factor - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
            ),
            patchify=lambda video, **sizes: processor.patchify(None, video, **sizes),
        )
        video = torch.from_numpy(frames.copy()).permute(0, 3, 1, 2)
        made = processor._preprocess(
            own,
            [video],
            resample=images.resample,
            image_mean=images.image_mean,
            image_std=images.image_std,
            patch_expand_factor=1,
            patch_size=images.patch_size,
            temporal_patch_size=2,
            merge_size=images.merge_size,
            **json.loads((self._model.path / "video_preprocessor_config.json").read_text()),
            return_tensors="pt",
        )
        return _Prepared(made["pixel_values_videos"], made["video_grid_thw"][0].tolist(), "", shape)
