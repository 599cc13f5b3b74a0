"""An encoder on the bus: images in, rows out; nothing that strangers send ends it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPImageProcessorPil

from services.encoder import actor as actor_module
from services.encoder.actor import EncoderActor
from services.encoder.audio_tower import AudioTower, SampleReader
from services.encoder.image_decoder import ImageDecoder, ImageRefused
from services.encoder.image_process import DecodedImage
from services.encoder.rows_keeper import RowsKeeper
from services.encoder.tower import ImageTower, TowerUnusable
from shared import topics
from shared.actor import ActorRuntime
from shared.bus.memory_bus import MemoryBus
from shared.ids import InstanceId, ModelName
from shared.media.rows_reader import read_rows
from shared.messages.encoder import EncodeInput, EncoderRefusal, EncoderReply, EncoderRows
from shared.messages.generation import PromptEmbeds
from shared.models.audio_models import read_audio_model
from tests.fuzz.image_files import spoilt, valid_files
from tests.support.gateway.fake_services import eventually
from tests.support.models.sounds import sweep
from tests.support.models.tiny_gemma import TOKENS, make_gemma_model
from tests.support.models.tiny_glm_vl import make_glm_model
from tests.support.models.tiny_images import IMAGE_TOKENS, ImageModel, make_image_model, picture, png_of_size
from tests.support.models.tiny_models import make_model
from tests.support.models.tiny_onevision import make_onevision_model
from tests.support.models.tiny_pixtral import PixtralKind, make_pixtral_model
from tests.support.models.tiny_qwen_vl import SIDE, make_qwen_model
from tests.support.models.tiny_tiles import TileKind, make_written_model
from tests.support.models.tiny_whisper import make_whisper

ONEVISION_SIZES = ((30, 9), (150, 40), (40, 160), (300, 300))
MODEL, INSTANCE = ModelName("tiny"), InstanceId("encoder-1")


async def read(bus: MemoryBus, rows: PromptEmbeds) -> torch.Tensor:
    """As who shares no memory with the encoder reads them."""
    (kept,) = rows.kept
    assert kept.owner == INSTANCE
    found = await read_rows(bus, topics.kept_rows(kept.owner), kept.name, kept.count * rows.row_bytes)
    return torch.frombuffer(found, dtype=torch.float32).view(-1, rows.size)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    return make_image_model(tmp_path_factory.mktemp("llava"))


class Encoder:
    """An encoder that runs, and who asks it."""

    def __init__(self, bus: MemoryBus, model: ImageModel, decode_s: float = 30.0) -> None:
        self.bus = bus
        rows = RowsKeeper(INSTANCE, None, 2**30, 2**20)
        self.actor = EncoderActor(bus, INSTANCE, MODEL, lambda: ImageTower(model.path), rows, ImageDecoder(decode_s))
        self.runtime = ActorRuntime(self.actor, drain_timeout=10)

    async def ask(
        self, image: bytes, salt: str | None = None, max_side: int | None = None, several: bool = False
    ) -> EncoderReply:
        asked, topic = EncodeInput(image, salt, max_side=max_side, several=several), topics.image_requests(MODEL)
        reply: EncoderReply = await self.bus.request(topic, asked, EncoderReply, 60.0)
        return reply

    async def rows(self, image: bytes, several: bool = False) -> torch.Tensor:
        reply = await self.ask(image, several=several)
        assert isinstance(reply, EncoderRows)
        return await read(self.bus, reply.rows)

    async def why(self, image: bytes) -> str:
        reply = await self.ask(image)
        assert isinstance(reply, EncoderRefusal)
        return reply.message


@asynccontextmanager
async def running(bus: MemoryBus, model: ImageModel) -> AsyncIterator[Encoder]:
    encoder = Encoder(bus, model)
    task = asyncio.create_task(encoder.runtime.run())
    while encoder.runtime.phase != "ready":
        assert not task.done(), task
        await asyncio.sleep(0.01)
    yield encoder
    encoder.runtime.stop()
    await task


async def test_a_large_image_of_which_little_is_wanted_is_that_image_made_smaller(
    memory_bus: MemoryBus, model: ImageModel
) -> None:
    large, small = picture(0, (900, 450)), picture(1, (30, 60))
    scaled, file = Image.open(io.BytesIO(large)), io.BytesIO()
    scaled.thumbnail((512, 512), Image.Resampling.LANCZOS)
    assert scaled.size == (512, 256)
    scaled.save(file, "PNG")
    async with running(memory_bus, model) as encoder:
        whole, low, as_scaled = await encoder.ask(large), await encoder.ask(large, max_side=512), file.getvalue()
        assert low == await encoder.ask(as_scaled) != whole
        assert await encoder.ask(small, max_side=512) == await encoder.ask(small)


async def test_an_image_becomes_the_rows_that_the_library_makes_of_it(memory_bus: MemoryBus, model: ImageModel) -> None:
    """Of every format, with transparency, grey, turned by its metadata; asked again, it is not encoded again."""
    turned = Image.Exif()
    turned[0x0112] = 6
    images = [
        picture(0),
        picture(1, (9, 200), "JPEG"),
        picture(2, (300, 7), "WEBP"),
        picture(3, (64, 64), "GIF", "P"),
        picture(4, mode="RGBA"),
        picture(5, mode="L"),
        picture(6, (50, 20), "JPEG", exif=turned.tobytes()),
    ]
    async with running(memory_bus, model) as encoder:
        for image in images:
            rows = await encoder.rows(image)
            assert rows.shape == (IMAGE_TOKENS, 64)
            assert torch.equal(rows, model.rows(image))
        again = await asyncio.gather(*(encoder.rows(image) for image in images))
        assert all(map(torch.equal, again, map(model.rows, images)))
        report = encoder.actor.encoder_report()
        assert (report.encoded, report.hits) == (len(images), len(images))


async def test_an_image_has_rows_by_its_size_alone(memory_bus: MemoryBus, tmp_path: Path) -> None:
    """LLaVA-NeXT's, for which nothing else is written."""
    model = make_image_model(tmp_path, "mistral", "tiles")
    counts = []
    async with running(memory_bus, model) as encoder:
        for image in (picture(0, (150, 40)), picture(1, (10, 640)), picture(2, (300, 300))):
            assert torch.equal(await encoder.rows(image), model.rows(image))
            ids = model.ids_and_rows([{"role": "user", "content": [{"type": "image"}]}], [image])["input_ids"][0]
            counts.append(ids.tolist().count(model.reference.config.image_token_index))
            assert len(await encoder.rows(image)) == counts[-1]
    assert len(set(counts)) == 3


async def test_an_image_alone_has_other_rows_than_one_of_several(
    memory_bus: MemoryBus, model: ImageModel, tmp_path: Path
) -> None:
    """LLaVA-OneVision's: tiles with a row behind each line of them, scaled down beyond a number of them; or one square.
    Of other models both are the same image."""
    onevision = make_onevision_model(tmp_path)
    token, images = onevision.reference.config.image_token_id, [picture(0, size) for size in ONEVISION_SIZES]
    async with running(memory_bus, onevision) as encoder:
        for image in images:
            for several in (False, True):
                shown = [image, image] if several else [image]
                rows = await encoder.rows(image, several)
                torch.testing.assert_close(rows, onevision.rows(image, several))
                chat = [{"role": "user", "content": len(shown) * [{"type": "image"}]}]
                ids = onevision.ids_and_rows(chat, shown)["input_ids"][0].tolist()
                assert len(rows) == ids.count(token) / len(shown)
        counts = [len(await encoder.rows(image)) for image in images]
        assert (counts, encoder.actor.encoder_report().hits) == ([34, 68, 76, 88], len(images))
    async with running(memory_bus, model) as encoder:
        assert await encoder.ask(images[0]) == await encoder.ask(images[0], several=True)
        assert encoder.actor.encoder_report().encoded == 1


@pytest.mark.parametrize("make", [make_qwen_model, make_glm_model, partial(make_glm_model, kind="glm46v")])
async def test_images_are_as_large_as_their_rows_say(
    memory_bus: MemoryBus, tmp_path: Path, make: Callable[[Path], ImageModel]
) -> None:
    """Of a model that takes images as large as they are: within its own bounds, and within a smaller one."""
    model = make(tmp_path)
    small, flat, large = picture(0, (9, 9)), picture(1, (150, 40)), picture(2, (900, 700))
    async with running(memory_bus, model) as encoder:
        for image in (small, flat, large):
            reply = await encoder.ask(image)
            assert isinstance(reply, EncoderRows)
            # PyTorch splits a large product by how many threads it gets at the moment, so the last bits may differ.
            torch.testing.assert_close(await read(memory_bus, reply.rows), model.rows(image))
            assert reply.rows.grids == (model.grid(image),)
            assert reply.rows.fits(reply.rows.count)
    pixels = np.random.default_rng(0).integers(0, 256, (700, 900, 3), dtype=np.uint8)
    decoded = DecodedImage(900, 700, pixels.tobytes())
    assert ImageTower(model.path, max_pixels=4 * SIDE**2).encode(decoded).grids == ((1, 1, 2),)
    with pytest.raises(TowerUnusable, match=r"max_pixels 700 is not allowed; at least 784, a row"):
        ImageTower(model.path, max_pixels=700)


@pytest.mark.parametrize("kind", ["mistral3", "llava", "idefics3", "smolvlm", "internvl"])
async def test_an_image_has_the_text_among_its_rows_that_the_library_writes(
    memory_bus: MemoryBus, tmp_path: Path, kind: PixtralKind | TileKind
) -> None:
    """Lines of squares, or tiles."""
    model = make_written_model(tmp_path, kind)
    async with running(memory_bus, model) as encoder:
        for image in (picture(0, (30, 9)), picture(1, (150, 40)), picture(2, (700, 900))):
            reply = await encoder.ask(image)
            assert isinstance(reply, EncoderRows)
            torch.testing.assert_close(await read(memory_bus, reply.rows), model.rows(image))
            token, tokenizer = model.reference.config.image_token_id, model.processor.tokenizer
            loaded = Image.open(io.BytesIO(image)).convert("RGB")
            made = model.processor(
                text=[tokenizer.decode([token])], images=[loaded], add_special_tokens=False, return_tensors="pt"
            )
            ids = made["input_ids"][0].tolist()
            found = len(ids) * [token]
            for first, written in reply.rows.texts:
                found[first : first + len(written)] = written
            first, count = ids.index(token), len(ids) - ids.index(token) - ids[::-1].index(token)
            assert (found, reply.rows.runs) == (ids, ((first, count),))
            assert reply.rows.fits(len(ids))


async def test_an_image_as_large_as_it_is_may_be_bounded(memory_bus: MemoryBus, tmp_path: Path) -> None:
    """Of Pixtral's tower. One of a single square is refused, which the library's tower takes apart; so is another
    model's processor."""
    model = make_pixtral_model(tmp_path)
    side = model.settings["patch_size"]["height"]
    async with running(memory_bus, model) as encoder:
        assert isinstance(await encoder.ask(picture(3, (side, side))), EncoderRefusal)
    pixels = np.random.default_rng(0).integers(0, 256, (700, 900, 3), dtype=np.uint8)
    decoded = DecodedImage(900, 700, pixels.tobytes())
    assert ImageTower(model.path, max_pixels=12 * side**2).encode(decoded).count == 12
    CLIPImageProcessorPil().save_pretrained(model.path)
    (model.path / "processor_config.json").unlink()
    with pytest.raises(TowerUnusable, match=r"the processor of images is one of another kind"):
        ImageTower(model.path)


async def test_rows_say_which_tokens_see_each_other(memory_bus: MemoryBus, tmp_path: Path) -> None:
    model = make_gemma_model(tmp_path)
    async with running(memory_bus, model) as encoder:
        reply = await encoder.ask(picture(0))
        assert isinstance(reply, EncoderRows)
        assert torch.equal(await read(memory_bus, reply.rows), model.rows(picture(0)))
    assert (reply.rows.runs, reply.rows.mutual) == (((0, TOKENS),), (True,))


async def test_an_image_that_many_ask_for_at_once_is_encoded_once(memory_bus: MemoryBus, model: ImageModel) -> None:
    async with running(memory_bus, model) as encoder:
        first, *others = await asyncio.gather(*(encoder.rows(picture(8)) for _ in range(5)))
        assert all(torch.equal(first, each) for each in others)
        report = encoder.actor.encoder_report()
        assert (report.encoded, report.hits) == (1, 4)


async def test_rows_are_shared_within_a_salt_only(memory_bus: MemoryBus, model: ImageModel) -> None:
    async with running(memory_bus, model) as encoder:
        for salt, encoded in (("alice", 1), ("alice", 1), ("bob", 2), (None, 3), (None, 3)):
            await encoder.ask(picture(0), salt)
            assert encoder.actor.encoder_report().encoded == encoded


async def test_what_cannot_be_an_image_is_refused(
    memory_bus: MemoryBus, model: ImageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(memory_bus, model) as encoder:
        assert await encoder.why(b"") == "not an image; PNG, JPEG, WEBP, GIF are allowed"
        assert "not an image" in await encoder.why(picture(0, kind="BMP"))
        assert "not an image" in await encoder.why(picture(0, kind="TIFF"))
        assert await encoder.why(png_of_size(60_000, 60_000)) == "more than 16777216 pixels are not allowed"
        assert await encoder.why(png_of_size(5000, 4000)) == (
            "5000 times 4000 pixels are not allowed; 16777216 in all are"
        )
        assert "one side may be 64 times the other" in await encoder.why(png_of_size(6500, 100))
        assert (await encoder.why(picture(0)[:200])).startswith("the image is broken: ")
        monkeypatch.setattr(actor_module, "MAX_PENDING", 0)
        full = await encoder.ask(picture(0))
        assert isinstance(full, EncoderRefusal)
        assert full.kind == "overloaded"
        monkeypatch.undo()
        assert len(await encoder.rows(picture(0))) == IMAGE_TOKENS


async def test_an_image_over_which_the_tower_fails_is_refused_and_the_next_one_encoded(
    memory_bus: MemoryBus, model: ImageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [ValueError("no such shape\nof a tile"), RuntimeError("not enough memory"), KeyError("rows")]

    def fail(**_: object) -> None:
        raise errors.pop(0)

    async with running(memory_bus, model) as encoder:
        with monkeypatch.context() as broken:
            broken.setattr(encoder.actor._tower._model, "get_image_features", fail)
            for why in ("no such shape", "not enough memory", "'rows'"):
                assert await encoder.why(picture(0)) == f"the model's tower does not take it: {why}"
        assert torch.equal(await encoder.rows(picture(0)), model.rows(picture(0)))


async def test_a_decoder_that_is_killed_is_replaced(model: ImageModel) -> None:
    decoder = ImageDecoder(60.0)
    try:
        await decoder.decode(EncodeInput(picture(0)))
        first = decoder.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        waiting = asyncio.create_task(decoder.decode(EncodeInput(picture(0))))
        await asyncio.sleep(0.05)
        os.kill(first, signal.SIGKILL)
        assert (await waiting).width == 40
        assert decoder.pid not in (None, first)
    finally:
        await decoder.close()


async def test_a_decoder_that_takes_too_long_is_ended(model: ImageModel) -> None:
    decoder = ImageDecoder(60.0)
    try:
        await decoder.decode(EncodeInput(picture(0)))
        slow = decoder.pid
        assert slow is not None
        os.kill(slow, signal.SIGSTOP)
        decoder._timeout = 0.2
        with pytest.raises(ImageRefused, match=r"decoding the image takes more than 0.2 s"):
            await decoder.decode(EncodeInput(picture(0)))
        assert decoder.pid is None
        decoder._timeout = 60.0
        assert (await decoder.decode(EncodeInput(picture(0)))).height == 30
    finally:
        await decoder.close()


async def test_an_image_that_kills_its_decoder_every_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.encoder.image_decoder.MODULE", "this.module.is.missing")
    decoder = ImageDecoder(60.0)
    with pytest.raises(ImageRefused, match="the process that did died of it"):
        await decoder.decode(EncodeInput(picture(0)))
    await decoder.close()


async def test_files_that_are_spoilt_leave_the_process_that_decodes_alive() -> None:
    """What becomes of each: tests/fuzz/test_image_files.py."""
    random, decoder, files = Random(7), ImageDecoder(60.0), valid_files()
    refused, count = 0, 100
    try:
        await decoder.decode(EncodeInput(files[0]))
        pid = decoder.pid
        for _ in range(count):
            try:
                await decoder.decode(EncodeInput(spoilt(files, random)))
            except ImageRefused:
                refused += 1
        assert decoder.pid == pid
        assert 0 < refused < count
    finally:
        await decoder.close()


async def test_a_crowd_of_one_client_leaves_room_for_another(memory_bus: MemoryBus, model: ImageModel) -> None:
    """What bounds a burst of images: of one client so many wait, and no more; who asks then has its turn next."""
    async with running(memory_bus, model) as encoder:
        ask = partial(memory_bus.request, topics.image_requests(MODEL))
        crowd = [
            asyncio.create_task(ask(EncodeInput(picture(seed), turn="crowd"), EncoderReply, 60.0)) for seed in range(90)
        ]
        await eventually(lambda: encoder.actor.load() >= actor_module.MAX_OF_A_CLIENT)
        other = await ask(EncodeInput(picture(99), turn="other"), EncoderReply, 60.0)
        waiting = sum(not each.done() for each in crowd)
        replies = await asyncio.gather(*crowd)
    assert isinstance(other, EncoderRows)
    refused = [each for each in replies if isinstance(each, EncoderRefusal)]
    assert {each.kind for each in refused} == {"overloaded"}
    assert len(refused) > 90 / 3
    assert waiting > 0, "the other client had its turn before the crowd was through"


@pytest.mark.features("images", "quantization")
def test_a_quantised_checkpoint_needs_no_quantizer_where_its_tower_is_of_numbers(tmp_path: Path) -> None:
    """Nothing of what the library asks for to read GPTQ's codes is installed."""
    model = make_qwen_model(tmp_path, "qwen3.5")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = ImageTower(tmp_path).encode(DecodedImage(40, 30, decoded(picture(0))))
    found = torch.frombuffer(bytearray(rows.rows), dtype=torch.float32).view(-1, rows.size)
    torch.testing.assert_close(found, model.rows(picture(0)))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.visual.blocks.0.attn.qkv.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(TowerUnusable, match=r"qkv.weight_scale_inv: quantised weights of a tower are not read"):
        ImageTower(tmp_path)


def decoded(image: bytes) -> bytes:
    """An image's pixels, three bytes each."""
    from PIL import Image

    return Image.open(io.BytesIO(image)).convert("RGB").tobytes()


def test_a_model_without_images_or_with_a_torn_tower_is_refused(model: ImageModel, tmp_path: Path) -> None:
    plain = make_model("llama", tmp_path / "plain")
    with pytest.raises(TowerUnusable, match="the model takes no images"):
        ImageTower(plain.path)
    shutil.copytree(model.path, torn := tmp_path / "torn")
    tensors = load_file(torn / "model.safetensors")
    del tensors["multi_modal_projector.linear_2.weight"]
    save_file(tensors, torn / "model.safetensors", {"format": "pt"})
    with pytest.raises(TowerUnusable, match=r"the checkpoint has no multi_modal_projector.linear_2.weight"):
        ImageTower(torn)
    (torn / "model.safetensors").unlink()
    torch.save(tensors, torn / "pytorch_model.bin")
    with pytest.raises(TowerUnusable, match=r"no file named model\.safetensors"):
        ImageTower(torn)


@pytest.mark.parametrize(
    ("different", "said"),
    [
        ({"vision_config": "clip"}, "'vision_config' with value 'clip'"),
        ({"dtype": "float3"}, "no attribute 'float3'"),
        ({"model_type": ["llava"]}, "unhashable type: 'list'"),
    ],
)
def test_a_configuration_that_describes_no_tower_is_refused(
    model: ImageModel, tmp_path: Path, different: dict[str, object], said: str
) -> None:
    path = shutil.copytree(model.path, folder := tmp_path / "model") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **different}))
    with pytest.raises(TowerUnusable, match=f"{folder}: .*{said}"):
        ImageTower(folder)


async def test_a_sounds_rows_are_the_librarys(memory_bus: MemoryBus, tmp_path: Path) -> None:
    """Of samples that a gateway has decoded; what is no window of them is refused."""
    whisper = make_whisper(tmp_path)
    audio = read_audio_model(whisper.path)
    assert audio is not None
    rows = RowsKeeper(INSTANCE, None, 2**24, 2**24)
    actor = EncoderActor(memory_bus, INSTANCE, MODEL, lambda: AudioTower(whisper.path), rows, SampleReader(audio))
    runtime = ActorRuntime(actor, drain_timeout=10)
    task = asyncio.create_task(runtime.run())
    try:
        await eventually(lambda: runtime.phase == "ready")

        async def ask(samples: bytes) -> EncoderReply:
            topic = topics.image_requests(MODEL)
            reply: EncoderReply = await memory_bus.request(topic, EncodeInput(samples), EncoderReply, 60.0)
            return reply

        sound = sweep(0)
        reply = await ask(sound.tobytes())
        assert isinstance(reply, EncoderRows)
        assert reply.rows.encoded
        expected = whisper.rows(sound)
        wanted = torch.frombuffer(bytearray(expected.rows), dtype=torch.float32).view(-1, expected.size)
        assert torch.equal(await read(memory_bus, reply.rows), wanted)
        for samples in (b"", b"abc", bytes(4 * (2 * 16_000 + 1))):
            refused = await ask(samples)
            assert isinstance(refused, EncoderRefusal)
            assert "bytes of samples are not allowed; 32000 of 4 are" in refused.message
        noise = await ask(struct.pack("<f", float("nan")) * 1600)
        assert isinstance(noise, EncoderRefusal)
        assert "are none" in noise.message
    finally:
        runtime.stop()
        await task
