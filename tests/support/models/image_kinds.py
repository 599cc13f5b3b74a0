"""Tiny models of every kind whose images were added after Gemma 4's, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.support.models.tiny_cohere_vision import make_cohere_model
from tests.support.models.tiny_deepseek_ocr import make_deepseek_ocr_model
from tests.support.models.tiny_deepseek_vl import make_deepseek_model
from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_kimi_vision import make_kimi_model
from tests.support.models.tiny_lfm_vl import make_lfm3_model, make_lfm_model
from tests.support.models.tiny_library_vl import make_aria_model, make_exaone_model, make_hyperclovax_model
from tests.support.models.tiny_llava_like import make_llava_like_model
from tests.support.models.tiny_minicpm_v import make_minicpm_model
from tests.support.models.tiny_newest import make_newest_model
from tests.support.models.tiny_ocr import make_ocr_model
from tests.support.models.tiny_ovis import make_ovis_model
from tests.support.models.tiny_pixtral import make_pixtral_model
from tests.support.models.tiny_video_llama import make_video_llama_model

IMAGE_KINDS: dict[str, Callable[..., ImageModel]] = {
    "aya": partial(make_cohere_model, kind="aya"),
    "command": partial(make_cohere_model, kind="command", seed=1),
    "kimi": make_kimi_model,
    "deepseek": make_deepseek_model,
    "deepseek-hybrid": partial(make_deepseek_model, hybrid=True, seed=2),
    "ovis2": make_ovis_model,
    "lfm2": make_lfm_model,
    "lfm3": make_lfm3_model,
    "minicpm": make_minicpm_model,
    "video-llama3": make_video_llama_model,
    "deepseek-ocr2": make_deepseek_ocr_model,
    "ministral3": partial(make_pixtral_model, kind="ministral3"),
    "mistral4": partial(make_pixtral_model, kind="mistral4", seed=1),
    **{kind: partial(make_newest_model, kind=kind) for kind in ("mistral-large-4", "glm-5-next", "minimax-m3")},
    **{
        kind: partial(make_llava_like_model, kind=kind)
        for kind in ("vip-llava", "llava-next-video", "got-ocr2", "idefics2", "granite4-vision", "granite-docling")
    },
    "aria": make_aria_model,
    "exaone4.5": make_exaone_model,
    "hyperclovax": make_hyperclovax_model,
    "qwen4": partial(make_newest_model, kind="qwen4", seed=2),
    **{kind: partial(make_ocr_model, kind=kind) for kind in ("glm-ocr", "paddle-ocr", "lighton-ocr", "qianfan-ocr")},
}
