"""What a newer release says of a model in words that this one has not costs the model that one feature."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from shared import topics
from shared.bus.codec import Undecodable, decode_received, encode
from shared.ids import EngineId, Incarnation, InstanceId, ModelName
from shared.messages.lifecycle import EngineReport, Lifecycle, SleepReport, WorkerReport
from shared.messages.model_card import ModelCard, PoolingCard, VideoModel

CARD = ModelCard(
    name=ModelName("tiny"),
    max_model_len=64,
    vocab_size=9,
    eos_token_ids=(2,),
    dtype="float32",
    created=1,
    images=64,
    pooling=PoolingCard(pooling="last", normalize=True, size=4),
    videos=VideoModel(),
    newer_videos=VideoModel(sampling="middles"),
)
ENGINE = EngineReport(
    model=CARD,
    waiting=1,
    running=2,
    max_waiting=3,
    max_running=4,
    blocks_total=5,
    blocks_free=6,
    steps=7,
    tokens=8,
)
WORKER = WorkerReport(
    engine=EngineId("engine-1"), rank=0, world_size=1, model=CARD, num_blocks=5, device="cpu", epoch=Incarnation(1)
)
LIFE = Lifecycle(
    service="scheduler",
    instance=InstanceId("engine-1"),
    incarnation=Incarnation(1),
    phase="ready",
    pid=1,
    host="here",
    started=0.0,
    engine=ENGINE,
    worker=WORKER,
    sleep=SleepReport(1, CARD),
)
FIELDS = list(ModelCard.__struct_fields__)


def written(change: dict[str, Any], life: Lifecycle = LIFE) -> bytes:
    """A lifecycle in whose cards something else is said."""
    plain = msgspec.msgpack.decode(encode(life))
    for report in ("engine", "worker", "sleep"):
        own = plain[Lifecycle.__struct_fields__.index(report)]
        card = own[type(getattr(life, report)).__struct_fields__.index("model")]
        for name, value in change.items():
            card[FIELDS.index(name)] = value
    return encode(plain)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("newer_videos", [2.0, 4, 64, "glances"]),
        ("videos", [2.0, 4, "many"]),
        ("pooling", ["median", True, 4]),
        ("images", [64, 32]),
        ("audio", [64]),
    ],
)
def test_the_feature_alone_is_absent_and_logged_once(
    name: str, value: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.bus.newer_cards._logged", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = decode_received(written({name: value}), topics.lifecycles())
    card = replace(CARD, **{name: None})
    assert found == replace(
        LIFE,
        engine=replace(ENGINE, model=card),
        worker=replace(WORKER, model=card),
        sleep=SleepReport(1, card),
    )
    assert [(each.message, vars(each)["feature"]) for each in caplog.records] == [
        ("a model's feature is not known to this release", name)
    ]


@pytest.mark.parametrize(("name", "value"), [("max_model_len", "long"), ("loras", 3), ("name", None)])
def test_what_is_no_feature_is_refused_as_ever(name: str, value: Any) -> None:
    for also in ({}, {"newer_videos": "glances"}):
        with pytest.raises(Undecodable):
            decode_received(written({name: value, **also}), topics.lifecycles())


def test_a_shorter_card_of_an_older_release_is_read(caplog: pytest.LogCaptureFixture) -> None:
    plain = msgspec.msgpack.decode(encode(LIFE))
    report = plain[Lifecycle.__struct_fields__.index("engine")]
    report[0] = [*report[0][: FIELDS.index("images")], "unknown"]
    found = decode_received(encode(plain), topics.lifecycles())
    assert found.engine.model == replace(CARD, images=None, videos=None, newer_videos=None)
