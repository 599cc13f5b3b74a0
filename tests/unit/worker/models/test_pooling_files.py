"""What a checkpoint's sentence-transformers files come to, and what they may not ask for."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.models.config import ModelError
from services.worker.models.pooling.sentence_transformers import read_pooling, read_projections
from shared.messages.model_card import PoolingCard

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
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, "mean_sqrt_len"),
        ({"pooling_mode": "weightedmean"}, "weighted_mean"),
    ],
)
def test_the_files_say_how(tmp_path: Path, pooling: dict[str, Any], kind: str) -> None:
    folder = write(tmp_path, [TRANSFORMER, POOLING, NORMALIZE], pooling, matryoshka_dimensions=[4, 8])
    card = read_pooling(folder, "auto", 8)
    assert card == PoolingCard(pooling=kind, normalize=True, size=8, matryoshka=(4, 8))  # type: ignore[arg-type]
    assert read_pooling(folder, "none", 8) is None


def test_prompts_of_kinds_of_texts_are_the_checkpoints(tmp_path: Path) -> None:
    folder = write(tmp_path, [TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": True})
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "find: ", "document": null}}')
    card = read_pooling(folder, "auto", 8)
    assert card is not None
    assert card.prompts == (("query", "find: "), ("document", ""))


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
        ([TRANSFORMER, DENSE, POOLING], {"pooling_mode_mean_tokens": True}, {}, "models.Dense in '2_Dense' is not"),
        ([TRANSFORMER, POOLING, NORMALIZE, DENSE], {"pooling_mode_mean_tokens": True}, {}, "'2_Dense' is not"),
        ([TRANSFORMER, POOLING, DENSE], {"pooling_mode_mean_tokens": True}, {}, "2_Dense/config.json does not exist"),
        ([TRANSFORMER], {}, {}, "it names no Pooling"),
        ([TRANSFORMER | {"path": "0_Transformer"}, POOLING], {"pooling_mode_mean_tokens": True}, {}, "0_Transformer"),
        ([TRANSFORMER, POOLING], {"pooling_mode": "mode"}, {}, "mode is not supported"),
        ([TRANSFORMER, POOLING], {}, {}, "no pooling_mode is not supported"),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            {},
            "pooling_mode_cls_token and pooling_mode_mean_tokens is not supported",
        ),
        ([TRANSFORMER, POOLING | {"path": "gone"}], {}, {}, "does not exist"),
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": 7}, {}, "pooling_mode_cls_token"),
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True}, {"matryoshka_dimensions": [9]}, "9 is not 1 to 8"),
    ],
)
def test_what_we_do_not_compute_is_refused(
    tmp_path: Path, modules: list[Any], pooling: dict[str, Any], config: dict[str, Any], why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        read_pooling(write(tmp_path, modules, pooling, **config), "auto", 8)


def write_dense(folder: Path, sizes: tuple[int, int], activation: Any, *, bias: bool = True) -> Any:
    """The module of sentence-transformers that was written."""
    modules: Any = import_module("sentence_transformers.sentence_transformer.modules")
    module = modules.Dense(*sizes, bias=bias, activation_function=activation)
    folder.mkdir()
    module.save(str(folder))
    return module


@torch.inference_mode()
def test_projections_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    more = DENSE | {"path": "3_Dense"}
    write(tmp_path, [TRANSFORMER, POOLING, DENSE, more, NORMALIZE], {"pooling_mode": "mean"}, matryoshka_dimensions=[5])
    dense = [
        write_dense(tmp_path / "2_Dense", (8, 20), torch.nn.Tanh()),
        write_dense(tmp_path / "3_Dense", (20, 6), None, bias=False),
    ]
    card = read_pooling(tmp_path, "auto", 8)
    assert card == PoolingCard(pooling="mean", normalize=True, size=6, matryoshka=(5,))
    head = read_projections(tmp_path, 8, torch.device("cpu"))
    assert head is not None
    state = torch.randn(8)
    wanted = {"sentence_embedding": state}
    for module in dense:
        wanted = module(wanted)
    torch.testing.assert_close(head(state), wanted["sentence_embedding"])
    with pytest.raises(ModelError, match="in_features 8, but what it projects has 9"):
        read_pooling(tmp_path, "auto", 9)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"activation_function": "os.system"}, "activation_function os.system is not supported; GELU, Identity"),
        ({"use_residual": True}, "use_residual"),
        ({"module_input_name": "token_embeddings"}, "module_input_name"),
        ({"out_features": 7}, r"size mismatch"),
    ],
)
def test_other_projections_are_refused(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    write(tmp_path, [TRANSFORMER, POOLING, DENSE], {"pooling_mode_mean_tokens": True})
    write_dense(tmp_path / "2_Dense", (8, 6), None)
    path = tmp_path / "2_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(ModelError, match=why):
        read_projections(tmp_path, 8, torch.device("cpu"))


def test_projections_are_not_unpickled(tmp_path: Path) -> None:
    write(tmp_path, [TRANSFORMER, POOLING, DENSE], {"pooling_mode_mean_tokens": True})
    write_dense(tmp_path / "2_Dense", (8, 6), None)
    (tmp_path / "2_Dense" / "model.safetensors").rename(tmp_path / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(ModelError, match="read from safetensors only"):
        read_projections(tmp_path, 8, torch.device("cpu"))
