"""A tiny random Qwen-Omni as it is published, and what `transformers` makes of its chats: the reference."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import _get_feat_extract_output_lengths as rows_of_sound
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
    _get_feat_extract_output_lengths as rows_of_sound3,
)

from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_qwen_audio import EAR, WINDOW_S, Sound
from tests.support.models.tiny_qwen_vl import MAX_PIXELS, MERGED, MIN_PIXELS, PATCH, TOWERS, QwenProcessor
from tests.support.models.tiny_towers import TEXT
from tests.support.models.tiny_videos import VideoReference
from tests.support.paths import DEMO_MODEL

SIGHT, FRAMES, SOUND = "<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>"
_AROUND = ("<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>", "<|im_start|>", "<|im_end|>")
_PARTS = {"image_url": "image", "video_url": "video", "input_audio": "audio"}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif content['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif content['type'] == 'video' %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The models' own."""


class OmniReference(VideoReference):
    """What the library's own model generates of images, frames that are looked at, and sounds."""

    def __init__(self, model: ImageModel, extractor: Any, kind: str) -> None:
        super().__init__(model, "qwen2.5-omni")  # whose frames both have
        self._third = kind == "qwen3"
        self.path, self._extractor = model.path, extractor
        self.tokenizer = model.processor.tokenizer

    def of_chat(
        self, messages: list[dict[str, Any]], images: list[bytes], videos: list[bytes], sounds: list[Sound]
    ) -> dict[str, Any]:
        """What its model is given of a chat. `messages`: with parts as clients give them."""
        shown = [
            {**each, "content": [{**part, "type": _PARTS.get(part["type"], part["type"])} for part in each["content"]]}
            for each in messages
        ]
        text = self.tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
        given, counts = dict[str, Any](), dict[str, list[int]]()
        if images:
            loaded = [Image.open(io.BytesIO(each)).convert("RGB") for each in images]
            given |= self._model.processor.image_processor(loaded, return_tensors="pt")
            counts[SIGHT] = [int(grid.prod()) // MERGED**2 for grid in given["image_grid_thw"]]
        if videos:
            made = [self._prepared(each) for each in videos]
            given["pixel_values_videos"] = torch.cat([each.patches for each in made])
            given["video_grid_thw"] = torch.tensor([each.grid for each in made])
            given["video_second_per_grid"] = torch.tensor([each.shape.seconds_of_two for each in made])
            counts[FRAMES] = [int(grid.prod()) // MERGED**2 for grid in given["video_grid_thw"]]
        if sounds:
            how: dict[str, Any] = {"padding": True, "truncation": False} if self._third else {"padding": "max_length"}
            heard = self._extractor(
                sounds, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt", **how
            )
            given["input_features"], given["feature_attention_mask"] = heard.input_features, heard.attention_mask
            rows = rows_of_sound3 if self._third else rows_of_sound
            counts[SOUND] = rows(heard.attention_mask.sum(-1)).tolist()
        left = {token: iter(each) for token, each in counts.items()}
        marks = re.compile("|".join(map(re.escape, (SIGHT, FRAMES, SOUND))))
        whole = marks.sub(lambda found: next(left[found[0]]) * found[0], text)
        return {**self.tokenizer(whole, add_special_tokens=False, return_tensors="pt"), **given}

    @torch.inference_mode()
    def rows_of(self, sound: Sound) -> torch.Tensor:
        """[tokens, hidden] of a sound."""
        given = self.of_chat([{"role": "user", "content": [{"type": "input_audio"}]}], [], [], [sound])
        rows: torch.Tensor = self._model.reference.get_audio_features(
            given["input_features"], given["feature_attention_mask"]
        ).last_hidden_state
        return rows

    @torch.inference_mode()
    def tokens(self, inputs: dict[str, Any], count: int) -> list[int]:
        """`count` tokens as the library's `generate` draws them."""
        settings = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None)
        output = self._model.reference.generate(**inputs, generation_config=settings)
        found: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return found


_THIRD: dict[str, Any] = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "moe_intermediate_size": 48,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
"""Of Qwen3-Omni's language model."""


def make_omni_model(folder: Path, kind: str = "qwen2.5", seed: int = 0) -> OmniReference:
    """Writes it to `folder`, with the demo model's tokenizer: the part that writes text, within the whole. `kind`:
    or qwen3."""
    third = kind == "qwen3"
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": [SIGHT, FRAMES, SOUND, *_AROUND]})
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    models: Any = Qwen3OmniMoeThinkerForConditionalGeneration if third else Qwen2_5OmniThinkerForConditionalGeneration
    reference: Any = models(_config(tokenizer, kind)).eval()
    reference.save_pretrained(folder)
    _publish(folder, third=third)
    tokenizer.save_pretrained(folder)
    images: Any = Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGED, size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    )
    extractor: Any = WhisperFeatureExtractor(feature_size=16, chunk_length=WINDOW_S)
    both = {**json.loads(extractor.to_json_string()), **json.loads(images.to_json_string())}
    (folder / "preprocessor_config.json").write_text(json.dumps(both))
    return OmniReference(ImageModel(folder, reference, QwenProcessor(images, tokenizer)), extractor, kind)


def _config(tokenizer: Any, kind: str) -> Any:
    third, named = kind == "qwen3", tokenizer.convert_tokens_to_ids
    ends = "id" if third else "index"
    configs: Any = Qwen3OmniMoeThinkerConfig if third else Qwen2_5OmniThinkerConfig
    return configs(
        text_config={
            **TEXT,
            "vocab_size": len(tokenizer),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
            **(_THIRD if third else {}),
        },
        vision_config={key: value for key, value in TOWERS[kind].items() if key != "tokens_per_second"},
        audio_config={
            **EAR,
            "n_window": 50 if third else 25,
            "output_dim": 64,
            **({"downsample_hidden_size": 8} if third else {}),
        },
        **{
            f"image_token_{ends}": named(SIGHT),
            f"video_token_{ends}": named(FRAMES),
            f"audio_token_{ends}": named(SOUND),
        },
        vision_start_token_id=named("<|vision_bos|>"),
        audio_start_token_id=named("<|audio_bos|>"),
        audio_end_token_id=named("<|audio_eos|>"),
        position_id_per_seconds=10,
        initializer_range=0.2,
    )


def _publish(folder: Path, *, third: bool) -> None:
    """Makes what the library saved of the part that writes text a part of the whole, beside one that speaks."""
    tensors = load_file(folder / "model.safetensors")
    whole = {f"thinker.{name}": tensor for name, tensor in tensors.items()}
    save_file({**whole, "talker.model.layers.0.weight": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    thinker = json.loads((folder / "config.json").read_text())
    outer: dict[str, Any] = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "model_type": "qwen3_omni_moe"}
    if not third:
        thinker["architectures"] = ["Qwen2OmniNaViTThinkerForConditionalGeneration"]
        outer = {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni"}
    outer["thinker_config"] = thinker
    (folder / "config.json").write_text(json.dumps(outer))
