"""What a checkpoint's sentence-transformers files come to, and what they may not ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.worker.models.config import ModelError
from services.worker.models.pooling.sentence_transformers import read_pooling
from shared.messages.lifecycle import PoolingCard

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def write(folder: Path, modules: list[dict[str, Any]] | None, pooling: dict[str, Any], **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
    return folder


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_the_files_say_how(tmp_path: Path, pooling: dict[str, Any], kind: str) -> None:
    folder = write(tmp_path, [TRANSFORMER, POOLING, NORMALIZE], pooling, matryoshka_dimensions=[4, 8])
    card = read_pooling(folder, "auto", 8)
    assert card == PoolingCard(pooling=kind, normalize=True, size=8, matryoshka=(4, 8))  # type: ignore[arg-type]
    assert read_pooling(folder, "none", 8) is None


def test_vectors_are_not_normalized_where_the_files_do_not_say_so(tmp_path: Path) -> None:
    folder = write(tmp_path, [TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": True})
    assert read_pooling(folder, "auto", 8) == PoolingCard(pooling="mean", normalize=False, size=8)
    assert read_pooling(folder, "last", 8) == PoolingCard(pooling="last", normalize=False, size=8)


def test_a_model_without_files_is_pooled_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = write(tmp_path, None, {})
    assert read_pooling(folder, "auto", 8) is None
    assert read_pooling(folder, "cls", 8) == PoolingCard(pooling="cls", normalize=True, size=8)


@pytest.mark.parametrize(
    ("modules", "pooling", "config", "why"),
    [
        ([TRANSFORMER, POOLING, DENSE], {"pooling_mode_mean_tokens": True}, {}, "models.Dense in '2_Dense' is not"),
        ([TRANSFORMER], {}, {}, "it names no Pooling"),
        ([TRANSFORMER | {"path": "0_Transformer"}, POOLING], {"pooling_mode_mean_tokens": True}, {}, "0_Transformer"),
        ([TRANSFORMER, POOLING], {"pooling_mode_max_tokens": True}, {}, "pooling_mode_max_tokens is not supported"),
        ([TRANSFORMER, POOLING], {}, {}, "no pooling_mode is not supported"),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            {},
            "pooling_mode_cls_token and pooling_mode_mean_tokens is not supported",
        ),
        ([TRANSFORMER, POOLING | {"path": "gone"}], {}, {}, "does not exist"),
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": 7}, {}, "Expected `bool`"),
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True}, {"matryoshka_dimensions": [9]}, "9 is not 1 to 8"),
    ],
)
def test_what_we_do_not_compute_is_refused(
    tmp_path: Path, modules: list[Any], pooling: dict[str, Any], config: dict[str, Any], why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        read_pooling(write(tmp_path, modules, pooling, **config), "auto", 8)
