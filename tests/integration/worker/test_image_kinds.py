"""Images of further kinds on one rank: what `transformers` generates of the same files, in every kind of batch."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers

from services.encoder.image_process import DecodedImage, DecodingRequest, decode_image
from services.encoder.processors.merged_patches import minimax_processor
from services.encoder.tower import ImageTower, TowerUnusable
from services.tokenizer.__main__ import load
from services.tokenizer.config import TokenizerConfig
from services.worker.models.config import ModelError
from shared.ids import Attempt, EngineId, GatewayId, ModelName, RequestId
from shared.messages.coordinator import Route
from shared.messages.gateway import RequestRejected
from shared.messages.generation import SamplingOptions, StopConditions
from shared.messages.tokenizer import ChatPrompt, Tokenize
from shared.models.image_models import read_image_model
from shared.models.video_models import read_video_tokens
from shared.packing import unpack
from tests.integration.worker.test_images import check_images_before_states, check_logits, check_written_images
from tests.integration.worker.test_nested_models import as_published
from tests.support.engines.real_engine import OUTPUT, RealEngine, asked
from tests.support.kv.arenas import Clock, new_directory, remove, store_in
from tests.support.models.image_kinds import IMAGE_KINDS
from tests.support.models.pillow_processor import pillow_processor
from tests.support.models.tiny_images import ImageModel, picture
from tests.support.models.tiny_kimi_vision import MOST, MOST_OF_A_SIDE, PATCH
from tests.support.models.tiny_llava_like import LlavaLikeKind, make_llava_like_model
from tests.support.models.tiny_minicpm_v import make_minicpm_model
from tests.support.models.tiny_models import TinyModel
from tests.support.models.tiny_newest import KINDS, make_newest_model
from tests.support.worker.image_chats import ImageChat
from tests.support.worker.tiny_backend import tiny_backend

AS_OTHERS = ("vip-llava", "llava-next-video")
"""Whose language model other kinds have, too, and whose images are runs of rows alone."""
BEFORE_STATES = ("lfm2", "lfm3", "minicpm", "glm-5-next", "qwen4")
"""Whose language model has states."""
SLOW = ("mistral-large-4", "glm-5-next", "qwen4")
"""Of the library's reference, which chooses keys token by token."""
SHORT = ("glm-ocr", "paddle-ocr", "video-llama3", "minimax-m3", "exaone4.5", "hyperclovax")
"""Whose second chat has fewer tokens."""
SHOWN_VIDEOS = ("LlavaNextVideo", "Exaone4_5_", "glm-5-next")
HANDED_OVER = {
    "mistral-large-4": "[IMG]",
    "glm-5-next": "<|image|>",
    "minimax-m3": "]<]image[>[",
    "command": "<|IMG_PATCH|>",
    "glm-ocr": "<|image|>",
    "paddle-ocr": "<|IMAGE_PLACEHOLDER|>",
    "lighton-ocr": "<|image_pad|>",
    "qianfan-ocr": "<IMG_CONTEXT>",
    "minicpm": "<|image_pad|>",
    "lfm3": "<|image_pad|>",
    "qwen4": "<|image_pad|>",
    "granite4-vision": "<image>",
    "granite-docling": "<image>",
    "hyperclovax": "<|image_pad|>",
    "idefics2": "<image>",
}
"""What stands for an image, of kinds whose whole stack would be one that others have (tests/integration/cluster)."""


@pytest.fixture
def directory() -> Iterator[Path]:
    directory = new_directory()
    yield directory
    remove(directory)


@pytest.mark.features("prompt embeds", "images", "chunked prefill", "preemption", "prefix cache", "speculative")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.extras if "-ocr" in kind or kind in (*SLOW, *AS_OTHERS) else ())
        for kind in IMAGE_KINDS
    ],
)
def test_greedy_text_and_logits_are_the_librarys(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several images in a prompt, cut within one, beside texts, preempted, with drafts, behind a shared prefix."""
    model = IMAGE_KINDS[kind](tmp_path)
    if kind in BEFORE_STATES:
        check_images_before_states(model, "native")
    else:
        check_written_images(model, "native", 32 if kind in SHORT else 48)
    check_logits(model, ImageChat("What is ", picture(0, (150, 40)), " here?"), monkeypatch)


def routing(model: ImageModel) -> Callable[[ImageChat], Route | RequestRejected]:
    """What the tokenizer makes of chats, with the rows that the encoder makes."""
    encoding, tower = load(TokenizerConfig(model=str(model.path)), model.path), ImageTower(model.path)

    def route(chat: ImageChat) -> Route | RequestRejected:
        rows = [tower.encode(decode_image(DecodingRequest(each))) for each in chat.images]  # type: ignore[arg-type]
        prompt = ChatPrompt(
            messages=json.dumps(chat.messages).encode(), embeds=tuple(rows), images=tuple(range(len(rows)))
        )
        message = Tokenize(
            request=RequestId("r"),
            attempt=Attempt(1),
            gateway=GatewayId("gateway-1"),
            model=ModelName("m"),
            prompt=prompt,
            sampling=SamplingOptions(seed=0),
            stopping=StopConditions(),
        )
        return encoding.route(message, prompt)

    return route


@pytest.mark.extras
@pytest.mark.features("prompt embeds", "images", "prefill/decode")
@pytest.mark.parametrize("kind", HANDED_OVER)
def test_images_are_handed_over(kind: str, tmp_path: Path, directory: Path) -> None:
    """Chats as the tokenizer makes prompts of them, with the rows that the encoder makes, computed by one engine and
    decoded by another."""
    model = IMAGE_KINDS[kind](tmp_path)
    route, store = routing(model), store_in(directory, 64 << 20, Clock())
    prefill, decode = (
        RealEngine(name, model, store, directory, kv_memory_bytes=16 << 20) for name in ("prefill", "decode")
    )
    flat, tall = picture(0, (150, 40)), picture(1, (60, 300))
    chats = [ImageChat(flat, "Compare it with", tall), ImageChat(tall, "What?"), ImageChat("A question.")]
    for number, chat in enumerate(chats):
        routed = route(chat)
        assert isinstance(routed, Route)
        ids, embeds = unpack(routed.generation.tokens), routed.generation.prompt_embeds
        assert ids == chat.prompt(model)[0]
        prefill.send(asked(str(number), ids, embeds=embeds, decode_on=EngineId("decode")))
    prefill.run()
    assert len(prefill.handed) == len(chats)
    for request in prefill.handed:
        decode.send(request)
    decode.run()
    assert decode.computed == len(chats) * (OUTPUT - 1), "the decode engine computed what was handed over"
    for number, chat in enumerate(chats):
        said = prefill.tokens[str(number)] + decode.tokens[str(number)]
        assert said == chat.logits(model, said).argmax(-1).tolist()
    refused = route(ImageChat(flat, HANDED_OVER[kind]))
    assert isinstance(refused, RequestRejected)
    assert "to show each of the 1 images" in refused.message


@pytest.mark.parametrize("said", [{}, {"size": [672, 672]}, {"max_pixels": 12 * 28**2, "min_pixels": 28**2}])
def test_sizes_of_minimax_m3_are_the_librarys(said: dict[str, object], tmp_path: Path) -> None:
    """Where its files name none, or what they name as published, which counts for nothing."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 14, **said}))
    name = "minimax_m3_vl.image_processing_minimax_m3_vl"
    theirs = pillow_processor(name, "MiniMaxM3VLImageProcessor", **copy.deepcopy(said))
    made = minimax_processor(tmp_path).size
    assert (made["shortest_edge"], made["longest_edge"]) == (theirs.size.shortest_edge, theirs.size.longest_edge)
    assert made["longest_edge"] == said.get("max_pixels", 451_584)


def test_images_of_glm_next_have_as_many_rows_as_are_allowed(tmp_path: Path) -> None:
    path, side = IMAGE_KINDS["glm-5-next"](tmp_path).path, 28
    decoded = decode_image(DecodingRequest(picture(3, (500, 300))))
    assert isinstance(decoded, DecodedImage)
    most = [ImageTower(path, max_pixels=pixels).encode(decoded).count for pixels in (None, 5 * side**2, side**2)]
    assert 5 < most[0] <= 12
    assert 1 < most[1] <= 5
    assert most[2] == 1
    with pytest.raises(TowerUnusable, match=f"max_pixels {side} is not allowed; at least {side**2}, a row"):
        ImageTower(path, max_pixels=side)


def test_images_of_qwen4_are_refused_where_a_part_is_chosen(tmp_path: Path) -> None:
    """Keys that are scored would have to be rotated by where their images stand."""
    path = make_newest_model(tmp_path, "qwen4", indexer_budget=32).path
    with pytest.raises(ModelError, match=r"images are served up to a max_model_len of 47 tokens.*--language-model-on"):
        tiny_backend(path)
    assert tiny_backend(path, max_model_len=47).card.images == 48
    assert tiny_backend(path, language_model_only=True).card.images is None
    with pytest.raises(ModelError, match="enable_prompt_embeds: n-grams are made of tokens, which embeddings do not"):
        tiny_backend(path, max_model_len=47, prompt_embeds=True)


@pytest.mark.parametrize(
    "kind",
    [
        *("mistral-large-4", "glm-5-next", "qwen4", "minimax-m3"),
        *("VipLlava", "LlavaNextVideo", "GotOcr2", "Idefics2", "Aria", "Exaone4_5_", "GraniteDocling"),
        "HyperCLOVAXVisionV2",
    ],
)
def test_who_names_no_token_of_an_image_has_the_librarys(kind: str, tmp_path: Path) -> None:
    if kind in KINDS:
        config, architecture = KINDS[kind].config(), KINDS[kind].architecture
    else:
        config, architecture = getattr(transformers, f"{kind}Config")(), f"{kind}ForConditionalGeneration"
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    images = read_image_model(tmp_path)
    assert images is not None
    assert images.token_id == config.image_token_id
    shown = read_video_tokens(tmp_path)
    assert (None if shown is None else shown.video) == (config.video_token_id if kind in SHOWN_VIDEOS else None)


@pytest.mark.parametrize(("kind", "splits"), [("idefics2", True), ("idefics2", False), ("granite-docling", True)])
def test_what_stands_around_images_is_the_librarys(kind: LlavaLikeKind, splits: bool, tmp_path: Path) -> None:
    """Marks of Idefics2, once between images that touch, with a space before a word behind them, in four quarters and
    not; the line break behind an image of one tile of Granite Docling's, which others end with a mark."""
    model = make_llava_like_model(tmp_path, kind, splits=splits)
    flat, tall, route = picture(0, (150, 40)), picture(1, (60, 300)), routing(model)
    small = picture(2, (20, 20))
    for parts in (
        ("What is", flat, "there?"),
        (flat, tall, " and ", flat, "\nand", tall, "<b>"),
        (small, "\nand", small, small, " one", small),
        ("No image at all.",),
    ):
        routed = route(ImageChat(*parts))
        assert isinstance(routed, Route)
        assert unpack(routed.generation.tokens) == ImageChat(*parts).prompt(model)[0]


def test_granite_docling_takes_the_path_that_its_file_asks_for(tmp_path: Path) -> None:
    """The fine one has four rows for each, where its tower has it."""
    model, image = make_llava_like_model(tmp_path, "granite-docling"), picture(0, (150, 40))
    model.processor.image_processor.fine_route = True
    model.processor.image_processor.save_pretrained(tmp_path)
    decoded = decode_image(DecodingRequest(image))
    assert isinstance(decoded, DecodedImage)
    made = ImageTower(tmp_path).encode(decoded)
    rows = torch.frombuffer(bytearray(made.rows), dtype=torch.float32).view(-1, made.size)
    torch.testing.assert_close(rows, model.rows(image))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"]["use_fine_route"] = False
    path.write_text(json.dumps(config))
    with pytest.raises(
        TowerUnusable, match=r"fine_route: true is not allowed; the model has no vision_config\.use_fine"
    ):
        ImageTower(tmp_path)


def test_images_of_minicpm_may_have_no_numbers(tmp_path: Path) -> None:
    """As its file says, which counts for tokenizers."""
    for said, numbered in ((True, "<image_id>{number}</image_id>{rows}"), (False, None)):
        make_minicpm_model(tmp_path, use_image_id=said)
        images = read_image_model(tmp_path)
        assert images is not None
        assert images.numbered == numbered


def test_the_tower_of_kimi_as_it_is_published(tmp_path: Path) -> None:
    """Its own words for the same settings, and codes of four bits beside it."""
    model = IMAGE_KINDS["kimi"](tmp_path)
    as_published(TinyModel("Kimi_K25", model.path, model.reference))
    path = model.path / "config.json"
    config = json.loads(path.read_text())
    config["media_placeholder_token_id"] = config["image_token_id"]
    path.write_text(json.dumps(config))
    settings = {"in_patch_limit": MOST, "patch_size": PATCH, "patch_limit_on_one_side": MOST_OF_A_SIDE}
    whole = {"auto_map": {"AutoImageProcessor": "kimi_k25_vision_processing.It"}, "media_proc_cfg": settings}
    (model.path / "preprocessor_config.json").write_text(json.dumps(whole))
    image = picture(3, (90, 70))
    decoded = decode_image(DecodingRequest(image))
    assert isinstance(decoded, DecodedImage)
    made = ImageTower(model.path).encode(decoded)
    rows = torch.frombuffer(bytearray(made.rows), dtype=torch.float32).view(-1, made.size)
    torch.testing.assert_close(rows, model.rows(image))
    assert ImageTower(model.path, max_pixels=4 * (2 * PATCH) ** 2).encode(decoded).count <= 4
