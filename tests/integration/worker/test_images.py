"""Images on one rank: what `transformers` generates of the same files and texts, in each situation of a batch."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from services.encoder.tower import ImageTower, TowerUnusable
from services.worker.backend import run_step
from services.worker.batch.batch import BrokenPlan
from services.worker.models.config import ModelError
from services.worker.models.hf_config import read_model_config
from services.worker.models.hf_layers.llava import LANGUAGE_MODEL_DEFAULTS, language_model, language_model_name
from services.worker.models.lora.slots import LoraSettings
from services.worker.ops.interface import OpsName, OpsUnavailable
from services.worker.speculation.settings import SpeculationSettings
from shared.ids import Incarnation, ModelName
from shared.messages.worker import StepPlan
from shared.models.image_models import DEEPSEEK_OCR2, GEMMA, MLLAMA
from tests.support.models.library_models import library_model
from tests.support.models.quantised_files import quantise
from tests.support.models.rounded_models import rounded
from tests.support.models.tiny_adapters import ALL_LINEAR, ATTENTION, write_adapter
from tests.support.models.tiny_gemma import make_gemma_model
from tests.support.models.tiny_gemma4 import make_gemma4_model
from tests.support.models.tiny_glm_vl import make_glm_model
from tests.support.models.tiny_images import ImageModel, make_image_model, picture
from tests.support.models.tiny_llama4 import make_llama4_model
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.models.tiny_onevision import make_onevision_model
from tests.support.models.tiny_phi4 import make_phi_model
from tests.support.models.tiny_pixtral import PixtralKind
from tests.support.models.tiny_qwen_vl import make_qwen_model
from tests.support.models.tiny_tiles import TileKind, make_written_model
from tests.support.worker.image_chats import ImageChat, expected_of
from tests.support.worker.plan_driver import Driver, Sequence
from tests.support.worker.planned_engine import LIMITS, PlannedEngine
from tests.support.worker.recorded_logits import record_logits
from tests.support.worker.tiny_backend import tiny_backend

OUTPUT = 6
OF_ANY_SIZE = (
    ImageChat(picture(0, (150, 40)), "What is it?"),
    ImageChat("Compare ", picture(1, (40, 160)), " with ", picture(2, (90, 90)), picture(0, (150, 40))),
    ImageChat("No image at all, only a question."),
    ImageChat("And ", picture(3, (30, 30))),
)
NGRAM = SpeculationSettings(method="ngram", prompt_lookup_min=1)


@pytest.mark.features("prompt embeds", "images", "chunked prefill", "preemption")
@pytest.mark.parametrize(
    ("text", "tower", "ops"),
    [
        ("llama", "clip", "native"),
        ("llama", "clip", "torch"),
        ("mistral", "clip", "torch"),
        ("qwen2", "siglip", "torch"),
        ("mistral", "tiles", "native"),
    ],
)
def test_images_come_to_what_the_library_makes_of_them(tmp_path: Path, text: str, tower: str, ops: OpsName) -> None:
    """Several in a prompt, cut into steps within an image, beside texts, and preempted."""
    model = make_image_model(tmp_path, text, tower)
    try:
        backend = tiny_backend(model.path, ops=ops)
    except OpsUnavailable as reason:
        pytest.skip(str(reason))
    assert (backend.card.images, backend.card.prompt_embeds) == (64, None)
    chats = [
        ImageChat(picture(0), "What is it?"),
        ImageChat("Compare ", picture(1), " with ", picture(2), " and ", picture(0)),
        ImageChat("No image at all, only a question."),
    ]
    driver = Driver(backend, budget=11)
    sequences = [chat.add_to(driver, model, OUTPUT) for chat in chats]
    for _ in range(6):
        driver.step()
    driver.preempt(sequences[1])
    driver.run()
    assert [each.output for each in sequences] == expected_of(chats, model, OUTPUT, sequences)


@pytest.mark.features("prompt embeds", "images", "chunked prefill", "preemption", "prefix cache", "speculative")
@pytest.mark.parametrize(
    ("kind", "ops"),
    [
        ("qwen2", "torch"),
        ("qwen2.5", "native"),
        ("qwen3", "torch"),
        ("qwen3", "native"),
        ("qwen3-moe", "native"),
        ("glm4v", "torch"),
        ("glm4v", "native"),
        ("glm4v-moe", "native"),
    ],
)
def test_images_of_any_size_turn_what_follows_them_as_in_the_library(tmp_path: Path, kind: str, ops: OpsName) -> None:
    """Positions of three axes, by which a whole head is turned or, GLM's, a part of it: flat and tall images, alone and
    several, cut within an image, beside texts, preempted once within an image and once while its text is written, with
    drafts, and behind a prefix that was computed."""
    model = make_turned_model(tmp_path, kind)
    try:
        backend = tiny_backend(model.path, ops=ops, speculation=NGRAM)
    except OpsUnavailable as reason:
        pytest.skip(str(reason))
    count, driver = 30, Driver(backend, budget=11, speculate=2)
    sequences = preempted_within_an_image(driver, model, count)
    while sequences[1].computed < 50:
        driver.step()
    again = OF_ANY_SIZE[1].add_to(driver, model, count)
    assert driver.share_prefix(again, sequences[1]) >= (32 if kind.startswith("glm") else 48)
    driver.run()
    expected = expected_of(OF_ANY_SIZE, model, count, sequences)
    assert [each.output for each in (*sequences, again)] == [*expected, expected[1]]
    assert driver.drafted > 0


def make_turned_model(folder: Path, kind: str) -> ImageModel:
    """Of one of the kinds whose images have positions of three axes."""
    return make_glm_model(folder, kind) if kind.startswith("glm") else make_qwen_model(folder, kind)


@pytest.mark.parametrize("kind", ["glm4v", "glm4v-moe", "glm46v"])
def test_logits_behind_images_are_the_librarys(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_logits(make_glm_model(tmp_path, kind), OF_ANY_SIZE[1], monkeypatch)


def preempted_within_an_image(driver: Driver, model: ImageModel, count: int) -> list[Sequence]:
    """Sequences of all chats, the second of which has to begin anew."""
    sequences = [chat.add_to(driver, model, count) for chat in OF_ANY_SIZE]
    for steps in (3, 8):
        for _ in range(steps):
            driver.step()
        driver.preempt(sequences[1])
    return sequences


@pytest.mark.features("images", "states", "chunked prefill", "preemption", "prefix cache", "speculative")
@pytest.mark.parametrize(("kind", "ops"), [("qwen3.5", "torch"), ("qwen3.5-moe", "native")])
def test_images_of_models_with_states(tmp_path: Path, kind: str, ops: OpsName) -> None:
    """The same, of which a part of a head is rotated; and what a scheduler's core lets go on from a checkpoint of the
    states behind the same images, and from none where one of them is another."""
    check_images_before_states(make_qwen_model(tmp_path, kind, seed=3), ops)


def check_images_before_states(model: ImageModel, ops: OpsName) -> None:
    """Greedy text is the library's, preempted within an image and with drafts, and behind a checkpoint of states."""
    try:
        backend = tiny_backend(model.path, ops=ops, speculation=NGRAM)
    except OpsUnavailable as reason:
        pytest.skip(str(reason))
    count, driver = 30, Driver(backend, budget=11, speculate=2)
    sequences = preempted_within_an_image(driver, model, count)
    driver.run()
    assert [each.output for each in sequences] == expected_of(OF_ANY_SIZE, model, count, sequences)
    assert driver.drafted > 0
    engine = PlannedEngine(tiny_backend(model.path, ops=ops), replace(LIMITS, max_batch_tokens=11))
    text = " with " + 3 * "a picture that is much the same as this one is "
    chat, other = ImageChat(picture(1, (40, 160)), text), ImageChat(picture(2, (40, 160)), text)
    outputs = []
    for each, least in ((chat, 0), (chat, 32), (other, 0), (other, 32)):
        ids, embeds = each.prompt(model)
        output, computed = engine.generate(ids, count, embeds)
        assert output == each.expected(model, count, output)
        assert (computed >= least) if least else not computed
        outputs.append(output)
    assert outputs[0] != outputs[2]


@pytest.mark.features("prompt embeds", "images", "chunked prefill", "preemption", "prefix cache")
@pytest.mark.parametrize(
    ("make", "budget", "ops"),
    [
        (make_gemma_model, 25, "torch"),
        (make_gemma_model, 25, "native"),
        (partial(make_gemma4_model, kind="large"), 90, "torch"),
        (partial(make_gemma4_model, kind="large"), 90, "native"),
        pytest.param(partial(make_gemma4_model, kind="unified"), 90, "native", marks=pytest.mark.extras),
    ],
    ids=["gemma3-torch", "gemma3-native", "gemma4-torch", "gemma4-native", "unified-native"],
)
def test_images_whose_tokens_see_each_other_are_never_cut(
    tmp_path: Path,
    make: Callable[[Path], ImageModel],
    budget: int,
    ops: OpsName,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gemma 3: in layers that see everything and those with a window shorter than an image; Gemma 4: in the latter;
    beside texts, preempted, and behind prefixes that end in front of an image, within it and behind it."""
    model = make(tmp_path)
    try:
        backend = tiny_backend(model.path, ops=ops)
    except OpsUnavailable as reason:
        pytest.skip(str(reason))
    chats = [
        ImageChat(picture(0), "What is it?"),
        ImageChat("Compare ", picture(1), " with ", picture(2), picture(0)),
        ImageChat("No image at all, only a question."),
    ]
    driver = Driver(backend, budget=budget)
    sequences = [chat.add_to(driver, model, OUTPUT) for chat in chats]
    for _ in range(6 if budget < 90 else 3):
        driver.step()
    driver.preempt(sequences[1])
    while not sequences[1].output:
        driver.step()
    embeds = sequences[1].prompt_embeds
    assert embeds is not None
    one, two, _ = (first + count for first, count in embeds.runs)
    shared = []
    for tokens in (16, one - one % 16, two + 16 - two % 16):
        shared.append(chats[1].add_to(driver, model, OUTPUT))
        driver.share_prefix(shared[-1], sequences[1], tokens)
    driver.run()
    expected = expected_of(chats, model, OUTPUT, sequences)
    assert [each.output for each in (*sequences, *shared)] == [*expected, *3 * [expected[1]]]
    check_logits(model, chats[0], monkeypatch)


@pytest.mark.features("prompt embeds", "images", "chunked prefill", "preemption", "prefix cache", "speculative")
def test_an_image_that_is_alone_is_looked_at_more_closely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaVA-OneVision: of one image the tiles, of several a square each; cut within an image, beside texts, preempted,
    with drafts, behind a prefix that ends within an image; and logits."""
    model = make_onevision_model(tmp_path)
    check_written_images(model, "native")
    check_logits(model, ImageChat("What is ", picture(0, (150, 40)), " here?"), monkeypatch)


@pytest.mark.features("prompt embeds", "images", "chunked prefill", "preemption", "prefix cache", "speculative")
@pytest.mark.parametrize("ops", ["torch", "native"])
@pytest.mark.parametrize("make", [make_llama4_model, make_gemma4_model])
def test_images_before_a_language_model_that_the_library_computes(
    tmp_path: Path, make: Callable[[Path], ImageModel], ops: OpsName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4's: tiles with separators behind them, to layers that attend in chunks; small ones of Gemma 4, whose
    layers read of a row what they read of padding; as above."""
    model = make(tmp_path)
    check_written_images(model, ops)
    check_logits(model, ImageChat("What is ", picture(0, (150, 40)), " here?"), monkeypatch)


@pytest.mark.extras
@pytest.mark.features("prompt embeds", "images", "chunked prefill", "preemption", "prefix cache", "LoRA")
def test_images_of_phi_with_its_adapter_and_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above; and an adapter of its language model, as the files beside it are, in one batch of the same image."""
    model = make_phi_model(tmp_path / "model")
    check_written_images(model, "native", budget=96)
    chat, count = ImageChat("What is ", picture(0, (150, 40)), " here?"), 12
    check_logits(model, chat, monkeypatch)
    modules = ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")  # a conformer's have the last parts' names
    adapted = write_adapter(TinyModel("phi", model.path, model.reference), tmp_path / "vision", modules=modules)
    loras = LoraSettings(((ModelName("vision"), tmp_path / "vision"),), 1, 8)
    backend = tiny_backend(model.path, dtype="float32", loras=loras)
    driver, (card,) = Driver(backend, budget=96), backend.card.loras
    ids, embeds = chat.prompt(model)
    sequences = [driver.add(ids, count, prompt_embeds=embeds, lora=lora) for lora in (None, card.id)]
    driver.run()
    plain, seen = chat.expected(model, count), chat.expected(model._replace(reference=adapted.reference), count)
    assert [each.output for each in sequences] == [plain, seen]
    assert plain != seen


@pytest.mark.refuses("images before a native language model", "--model-impl transformers")
def test_who_computes_a_language_model_decides_whether_it_has_images(tmp_path: Path) -> None:
    """Those of a native one are not for `transformers`, which may turn what follows them otherwise; and a client's rows
    are not for a model that reads more of a token than its embedding."""
    gemma3, gemma4 = make_gemma_model(tmp_path / "3"), make_gemma4_model(tmp_path / "4")
    with pytest.raises(ModelError, match=r"images of Gemma3For.* transformers computes .*; --language-model-only serv"):
        tiny_backend(gemma3.path, model_impl="transformers")
    for settings in ({"model_impl": "transformers", "language_model_only": True}, {"language_model_only": True}):
        assert tiny_backend(gemma3.path, **settings).card.images is None
    assert tiny_backend(gemma4.path).card.images == gemma4.reference.config.text_config.hidden_size
    assert tiny_backend(gemma4.path, language_model_only=True).card.images is None
    with pytest.raises(ModelError, match="reads more of a token than its embedding"):
        tiny_backend(gemma4.path, prompt_embeds=True)


def check_logits(model: ImageModel, chat: ImageChat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind a chat are the library's."""
    recorded = record_logits(monkeypatch)
    driver = Driver(tiny_backend(model.path, ops="native", dtype="float32"))
    recorded.clear()  # what it tried when it was started
    sequence = chat.add_to(driver, model, OUTPUT)
    driver.run()
    expected = chat.logits(model, sequence.output)
    assert (torch.cat(recorded[:OUTPUT]) - expected).abs().max() < 1e-3
    assert expected.std() > 0.3, "a reference this flat would agree with anything"


@pytest.mark.features("prompt embeds", "images", "chunked prefill", "preemption", "prefix cache", "speculative")
@pytest.mark.parametrize(
    ("kind", "ops"),
    [
        ("mistral3", "native"),
        ("llava", "torch"),
        ("idefics3", "torch"),
        ("smolvlm", "native"),
        ("internvl", "native"),
    ],
)
def test_text_among_the_rows_of_an_image_is_read_as_in_the_library(
    tmp_path: Path, kind: PixtralKind | TileKind, ops: OpsName
) -> None:
    """Lines of rows with the end of each written behind it, or tiles with the place of each before it; several images,
    cut within a line and behind one, beside texts, preempted, with drafts, and behind a prefix that ends within one."""
    check_written_images(make_written_model(tmp_path, kind), ops)


def check_written_images(model: ImageModel, ops: OpsName, shared: int = 48, budget: int = 11) -> None:
    """Greedy text of one image and of several is the library's, in each situation. `shared`: tokens of the second chat
    that are computed when it comes again; `budget`: of a step."""
    try:
        backend = tiny_backend(model.path, ops=ops, speculation=NGRAM)
    except OpsUnavailable as reason:
        pytest.skip(str(reason))
    chats = [
        ImageChat(picture(0, (150, 40)), "What is it?"),
        ImageChat("Compare ", picture(1, (40, 160)), " with ", picture(2, (90, 90)), picture(0, (150, 40))),
        ImageChat("No image at all, only a question."),
    ]
    count = 20
    driver = Driver(backend, budget=budget, speculate=2)
    sequences = [chat.add_to(driver, model, count) for chat in chats]
    for steps in (3, 8):
        for _ in range(steps):
            driver.step()
        driver.preempt(sequences[1])
    while sequences[1].computed < 50:
        driver.step()
    again = chats[1].add_to(driver, model, count)
    assert driver.share_prefix(again, sequences[1]) >= shared
    driver.run()
    expected = expected_of(chats, model, count, sequences)
    assert [each.output for each in (*sequences, again)] == [*expected, expected[1]]
    assert driver.drafted > 0


@pytest.mark.features("images", "quantization")
@pytest.mark.parametrize(
    ("kind", "ops"), [("qwen2", "torch"), ("qwen2", "native"), ("glm4v", "torch"), ("glm4v-moe", "native")]
)
def test_images_before_rounded_weights(tmp_path: Path, kind: str, ops: OpsName) -> None:
    """The language model's are rounded, the tower's are not."""
    model = make_turned_model(tmp_path, kind)
    chat, count = ImageChat("Compare ", picture(1, (40, 160)), " with ", picture(2, (90, 90))), 20
    try:
        driver = Driver(tiny_backend(model.path, ops=ops, dtype="float32", quantization="int8"), budget=11)
    except OpsUnavailable as reason:
        pytest.skip(str(reason))
    sequence = chat.add_to(driver, model, count)
    exact, tower = chat.expected(model, count), copy.deepcopy(model.reference.model.visual)
    rounded(model.reference, "int8")
    model.reference.model.visual = tower
    driver.run()
    assert sequence.output == chat.expected(model, count) != exact


@pytest.mark.features("images", "quantization")
@pytest.mark.parametrize(("kind", "method"), [("glm4v", "gptq"), ("glm4v-moe", "fp8 of outputs")])
def test_images_before_codes_of_a_checkpoint(tmp_path: Path, kind: str, method: str) -> None:
    """Whose rows are put in another order as codes, and whose gates and ups are one matrix."""
    model = make_turned_model(tmp_path, kind)
    chat, count = OF_ANY_SIZE[1], 12
    exact, tower = chat.expected(model, count), model.reference.model.visual
    model.reference.model.visual = None  # of numbers, as published files have it
    quantise(TinyModel(kind, model.path, model.reference), method)
    model.reference.model.visual = tower
    driver = Driver(tiny_backend(model.path, dtype="float32"), budget=11)
    sequence = chat.add_to(driver, model, count)
    driver.run()
    assert sequence.output == chat.expected(model, count) != exact


@pytest.mark.features("images", "LoRA")
@pytest.mark.parametrize(
    ("kind", "modules"), [("qwen2", ALL_LINEAR), ("glm4v", (*ATTENTION, "gate_up_proj")), ("glm4v-moe", ATTENTION)]
)
def test_images_before_an_adapter_and_without_it(tmp_path: Path, kind: str, modules: tuple[str, ...]) -> None:
    """In one batch, of the same image: an adapter as PEFT names it beside a vision tower."""
    model = make_turned_model(tmp_path / "model", kind)
    plain_model = TinyModel(kind, model.path, model.reference)
    adapted = write_adapter(plain_model, tmp_path / "poet", modules=modules).reference
    loras = LoraSettings(((ModelName("poet"), tmp_path / "poet"),), 1, 8)
    backend = tiny_backend(model.path, dtype="float32", loras=loras)
    chat, count = ImageChat("Compare ", picture(1, (40, 160)), " with ", picture(2, (90, 90))), 12
    driver = Driver(backend, budget=11)
    ids, embeds = chat.prompt(model)
    (card,) = backend.card.loras
    sequences = [driver.add(ids, count, prompt_embeds=embeds, lora=lora) for lora in (None, card.id)]
    driver.run()
    plain, poet = chat.expected(model, count), chat.expected(model._replace(reference=adapted), count)
    assert [each.output for each in sequences] == [plain, poet]
    assert plain != poet


def test_a_plan_that_cuts_an_image_is_broken(tmp_path: Path) -> None:
    model = make_gemma_model(tmp_path)
    driver = Driver(tiny_backend(model.path), budget=25)
    sequence = ImageChat(picture(0), "What is it?").add_to(driver, model, OUTPUT)
    assert sequence.prompt_embeds is not None
    ((first, count),) = sequence.prompt_embeds.runs
    plan = StepPlan(
        epoch=Incarnation(1),
        step=0,
        released=(),
        new=(driver._new(sequence),),
        work=(driver._work(sequence, first + 3),),
    )
    with pytest.raises(
        BrokenPlan, match=f"a step ends at {first + 3}, within an image from {first} to {first + count}"
    ):
        run_step(driver.backend, plan)


def test_a_model_whose_images_are_not_served_is_refused_by_name(tmp_path: Path) -> None:
    library_model("Step3p7", tmp_path)
    with pytest.raises(ModelError, match="images of Step3p7ForConditionalGeneration are not served; --language-model-"):
        tiny_backend(tmp_path)
    assert tiny_backend(tmp_path, language_model_only=True).card.images is None


def test_what_a_text_model_says_of_a_tower_that_it_has_not_is_passed_over(tmp_path: Path) -> None:
    """Its file may be another model's, in part."""
    make_model("qwen2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vision_config": {"image_size": {"height": 0}}}))
    assert tiny_backend(tmp_path, model_impl="transformers").card.images is None


@pytest.mark.parametrize(("name", "value"), [("patch_size", 0), ("image_size", [16, -1]), ("hidden_size", "64")])
def test_sizes_that_no_tower_has_are_refused_by_name(name: str, value: object, tmp_path: Path) -> None:
    path = make_image_model(tmp_path, "llama", "clip").path
    config = json.loads((path / "config.json").read_text())
    config["vision_config"][name] = value
    (path / "config.json").write_text(json.dumps(config))
    said = re.escape(f"config.json: vision_config.{name} {value!r} is not allowed")
    with pytest.raises(ModelError, match=f"{said}.*--language-model-only serves it for texts"):
        tiny_backend(path)
    with pytest.raises(TowerUnusable, match=said):
        ImageTower(path)


@pytest.mark.parametrize("kind", LANGUAGE_MODEL_DEFAULTS)
def test_sizes_that_a_configuration_leaves_out_are_the_librarys(kind: str, tmp_path: Path) -> None:
    """As LLaVA 1.5's does."""
    theirs = transformers.AutoConfig.for_model(kind)
    for key, value in LANGUAGE_MODEL_DEFAULTS[kind].items():
        assert getattr(theirs, key) == value
    wholes = {"gemma3_text": GEMMA, "deepseek_ocr2_text": DEEPSEEK_OCR2, "mllama_text_model": MLLAMA}
    whole = wholes.get(kind, "LlavaForConditionalGeneration")
    said = {"architectures": [whole], "torch_dtype": "float16"}
    chosen = {} if theirs.to_dict().get("n_routed_experts") is None else {"num_experts_per_tok": 6}  # has no default
    (tmp_path / "config.json").write_text(json.dumps({**said, "text_config": {"model_type": kind, **chosen}}))
    config = read_model_config(tmp_path)
    of_images = getattr(theirs, "cross_attention_layers", ())  # which texts do not pass
    assert (config.num_layers, config.hidden_size, config.dtype) == (
        theirs.num_hidden_layers - len(of_images),
        theirs.hidden_size,
        "float16",
    )


def test_other_language_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"text_config.model_type 'opt' is not supported; supported: llama, mistral"):
        language_model(b'{"text_config": {"model_type": "opt"}}', "LlavaForConditionalGeneration")
    with pytest.raises(ValueError, match=r"text_config.model_type 'llama' is not supported; supported: gemma3_text"):
        language_model(b'{"text_config": {"model_type": "llama"}}', "Gemma3ForConditionalGeneration")
    with pytest.raises(ValueError, match=r"text_config.model_type \['qwen2'\] is not supported; supported: qwen2"):
        language_model(b'{"text_config": {"model_type": ["qwen2"]}}', "LlavaOnevisionForConditionalGeneration")
    (tmp_path / "config.json").write_text('{"architectures": ["LlavaForConditionalGeneration"]}')
    with pytest.raises(ModelError, match="text_config"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("whole", "alone"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("vision_tower.embeddings.class_embedding", "vision_tower.embeddings.class_embedding"),
    ],
)
def test_tensors_of_older_and_newer_releases_are_found(whole: str, alone: str) -> None:
    assert language_model_name(whole) == alone


def test_dummy_weights_have_no_tower(tmp_path: Path) -> None:
    model = make_image_model(tmp_path)
    card: Any = tiny_backend(model.path, load_format="dummy").card
    assert card.images is None
