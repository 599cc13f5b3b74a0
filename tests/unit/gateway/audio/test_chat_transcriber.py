"""The chats by which models write down what is said, and what is shown of their answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.encoder.audio_tower import Samples
from services.encoder.sound_tower import SoundTower
from services.gateway.audio.chat_transcriber import ChatTranscriber, SpokenText
from services.tokenizer.__main__ import load
from services.tokenizer.config import TokenizerConfig
from shared.messages.tokenizer import Encode, EncodeReply
from shared.models.audio_models import read_sound_model
from shared.packing import unpack
from tests.support.models.sounds import sweep
from tests.support.models.tiny_hearing import HEARING, make_hearing_model

TOLD: dict[str, list[dict[str, str]]] = {
    "voxtral": [{}, {"language": "de"}],
    "qwen3-asr": [{}, {"language": "de"}, {"prompt": "Names: Ada."}, {"language": "fr", "prompt": "Names: Ada."}],
}


@pytest.mark.parametrize("kind", HEARING)
def test_prompts_are_those_of_the_librarys_processors(kind: str, tmp_path: Path) -> None:
    model, sound = make_hearing_model(tmp_path, kind), sweep(0, 0.7)
    rows = SoundTower(tmp_path).encode(Samples(sound.astype("<f4").tobytes()))
    if kind == "voxtral":  # as those that mistral-common writes, which lack the mark, and call parts as clients do
        template = tmp_path / "chat_template.jinja"
        ours, theirs = "{% else %}[BEGIN_AUDIO][AUDIO]", "{% elif part['type'] == 'input_audio' %}[AUDIO]"
        assert ours in template.read_text()
        template.write_text(template.read_text().replace(ours, theirs))
    encoder = load(TokenizerConfig(model=str(tmp_path)), tmp_path)
    sounds = read_sound_model(tmp_path)
    assert sounds is not None
    assert sounds.transcription is not None
    for told in TOLD.get(kind, [{}, {"prompt": "Write it down."}]):
        request: Any = SimpleNamespace(language=told.get("language"), prompt=told.get("prompt", ""))
        nothing: Any = None
        asked = ChatTranscriber(sounds, sounds.transcription, nothing, nothing, request, nothing, nothing)
        reply = encoder.answer(Encode(asked.prompt(rows)))
        assert isinstance(reply, EncodeReply), reply
        assert unpack(reply.tokens) == model.prompt(model.asked(**told), [model.rows_of(sound)]), told


@pytest.mark.parametrize(
    ("mark", "pieces", "behind", "shown"),
    [
        ("", [" One", " two"], False, ["One", " two", ""]),
        ("", [" ", "One", " two"], True, ["", " One", " two", ""]),
        ("", ["一", "二"], True, ["一", "二", ""]),
        (
            "<asr_text>",
            ["language Ger", "man<asr", "_text>", " Eins", " zwei"],
            False,
            ["", "", "", "Eins", " zwei", ""],
        ),
        ("<asr_text>", ["language German<asr_text>Eins"], True, [" Eins", ""]),
        ("<asr_text>", ["no ", "mark"], False, ["", "", "no mark"]),
        ("<asr_text>", [], True, [""]),
    ],
)
def test_what_stands_before_a_mark_is_held_and_windows_are_joined(
    mark: str, pieces: list[str], behind: bool, shown: list[str]
) -> None:
    text = SpokenText(mark, behind=behind)
    assert [*map(text.feed, pieces), text.end()] == shown
