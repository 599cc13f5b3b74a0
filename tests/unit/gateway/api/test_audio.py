"""Forms of `/v1/audio`, and what their answers look like."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.gateway.api.audio.answer import Transcript, answer_body, done_event
from services.gateway.api.audio.request import AudioRequest, Fields, Task, read_audio_request
from services.gateway.api.audio.segments import SpokenSegment, WindowTimes, segments_of
from services.gateway.api.audio.words import SpokenWord
from services.gateway.api.errors import RequestError
from shared.ids import ModelName
from shared.messages.gateway import LogprobText, PositionLogprobs
from shared.messages.model_card import AudioModel, ModelCard

AUDIO = AudioModel(
    row_size=8,
    rows=100,
    sample_rate=16_000,
    window_s=2,
    begin=101,
    end=100,
    no_timestamps=110,
    languages=(("en", 102), ("de", 103)),
    tasks=(("transcribe", 104), ("translate", 105)),
    previous=106,
)
CARD = ModelCard(
    name=ModelName("scribe"),
    max_model_len=80,
    vocab_size=300,
    eos_token_ids=(100,),
    dtype="float32",
    created=0,
    audio=AUDIO,
)


def read(task: Task = "transcribe", card: ModelCard = CARD, **fields: str | list[str]) -> AudioRequest:
    given: Fields = {
        name.replace("granularities", "granularities[]").replace("include", "include[]"): [each]
        if isinstance(each, str)
        else each
        for name, each in fields.items()
    }
    return read_audio_request(given, task, card)


def test_fields_have_their_effect() -> None:
    asked = read(language="DE", prompt=" Hello ", response_format="verbose_json", temperature="0.5", seed="7")
    assert (asked.language, asked.prompt, asked.timed, asked.temperature, asked.seed) == ("de", "Hello", True, 0.5, 7)
    assert (read().language, read().format, read().temperature, read().stream) == (None, "json", 0.0, False)
    assert read(stream="true", chunking_strategy="auto").stream
    assert read(response_format="verbose_json", timestamp_granularities=["segment"]).timed


@pytest.mark.parametrize(
    ("task", "fields", "why"),
    [
        ("transcribe", {"language": "xx"}, "language: 'xx' is not allowed; de, en are"),
        ("transcribe", {"response_format": "xml"}, "response_format: 'xml' is not allowed"),
        ("transcribe", {"response_format": "srt", "stream": "1"}, "with stream json and text are"),
        ("transcribe", {"stream": "perhaps"}, "stream: 'perhaps' is not allowed"),
        ("transcribe", {"temperature": "nan"}, "temperature: 'nan' is not allowed; 0 to 1"),
        ("transcribe", {"seed": "9" * 30}, "seed: '9999"),
        ("transcribe", {"timestamp_granularities": "line"}, "'line' is not allowed; word and segment are"),
        ("transcribe", {"timestamp_granularities": "segment"}, "with timestamp_granularities verbose_json is"),
        ("transcribe", {"chunking_strategy": "vad"}, "chunking_strategy: 'vad' is not allowed"),
        ("transcribe", {"prompt": "a<|endoftext|>"}, "prompt: <| is not allowed"),
        ("transcribe", {"model": ["a", "b"]}, "model: this field is there twice"),
        ("transcribe", {"include": "logprobs"}, "include[]: log-probabilities"),
        ("translate", {"language": "de"}, "language: this field is not known"),
        ("translate", {"stream": "true"}, "stream: this field is not known"),
    ],
)
def test_what_is_not_allowed_is_said(task: Task, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError) as error:
        read(task, **fields)
    assert error.value.status == 400
    assert why in error.value.message


def test_models_that_do_not_hear_translate_or_remember_say_so() -> None:
    deaf = msgspec.structs.replace(CARD, audio=None)
    plain = msgspec.structs.replace(CARD, audio=msgspec.structs.replace(AUDIO, languages=(), tasks=(), previous=None))
    for card, task, fields, why in (
        (deaf, "transcribe", {}, "does not hear"),
        (plain, "translate", {}, "translating by scribe"),
        (plain, "transcribe", {"prompt": "x"}, "prompt: what was said before"),
        (plain, "transcribe", {"language": "de"}, "language: 'de' is not allowed; en are"),
    ):
        with pytest.raises(RequestError, match=why):
            read(task, card, **fields)  # type: ignore[arg-type]
    assert read(card=plain, language="en").language == "en"


def drawn(*tokens: int) -> list[PositionLogprobs]:
    return [PositionLogprobs(LogprobText("", b" %c" % (token % 64 + 64), -0.5, token), ()) for token in tokens]


def test_segments_are_what_stands_between_times() -> None:
    """Times are a fiftieth of a second apart; none is behind the window's end, which closes what is open."""
    found = list(segments_of(drawn(111, 1, 2, 161, 161, 3, 100, 400, 4), AUDIO, WindowTimes(10.0, 1.5), 0.25, 0.0))
    assert [(each.start, each.end, each.text, each.tokens) for each in found] == [
        (10.0, 11.0, " A B", (1, 2)),
        (11.0, 11.5, " C", (3,)),
        (11.5, 11.5, " D", (4,)),
    ]
    assert {(each.avg_logprob, each.no_speech_prob) for each in found} == {(-0.5, 0.25)}
    assert [each.text for each in segments_of(drawn(1, 2), AUDIO, WindowTimes(0, 2), 0, 0)] == [" A B"]


def test_answers_have_their_shapes() -> None:
    said = (
        SpokenSegment(0.0, 1.5, " One --> two\n", (1, 2), -0.5, 0.0, 0.0),
        SpokenSegment(3661.04, 3662.0, " three", (3,), -0.25, 0.5, 0.0),
    )
    heard = Transcript(3662.4, "de", "One --> two three", said)
    bodies = {
        form: answer_body(read(response_format=form), heard)[0].decode() for form in ("json", "text", "srt", "vtt")
    }
    assert msgspec.json.decode(bodies["json"]) == {"text": heard.text, "usage": {"type": "duration", "seconds": 3663}}
    assert bodies["text"] == "One --> two three\n"
    assert bodies["srt"] == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne -> two\n\n2\n01:01:01,040 --> 01:01:02,000\nthree\n\n"
    )
    assert bodies["vtt"].startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne -> two\n\n01:01:01.040 --> ")
    verbose = msgspec.json.decode(answer_body(read(response_format="verbose_json"), heard)[0])
    assert (verbose["task"], verbose["language"], verbose["duration"]) == ("transcribe", "de", 3662.4)
    assert verbose["segments"][1] | {"compression_ratio": 0} == {
        "id": 1,
        "seek": 366104,
        "start": 3661.04,
        "end": 3662.0,
        "text": " three",
        "tokens": [3],
        "temperature": 0.0,
        "avg_logprob": -0.25,
        "compression_ratio": 0,
        "no_speech_prob": 0.5,
    }
    assert done_event(heard)["usage"]["seconds"] == 3663
    words = heard._replace(words=(SpokenWord(" One", 0.0, 1.504),))
    for granularities, names in ((["word"], {"words"}), (["word", "segment"], {"words", "segments"})):
        timed = read(response_format="verbose_json", timestamp_granularities=granularities)
        body = msgspec.json.decode(answer_body(timed, words)[0])
        assert body.keys() & {"words", "segments"} == names
        assert body["words"] == [{"word": "One", "start": 0.0, "end": 1.5}]
