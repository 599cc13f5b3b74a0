"""Every architecture that docs/models.md says `transformers` computes, in every situation: as the library itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.worker.executor.host_runner import HostRunner
from tests.support.models.library_models import ARCHITECTURES, FOR_TEXTS_ALONE, LANGUAGE_MODELS, library_model
from tests.support.models.tiny_models import TinyModel
from tests.support.worker.library_situations import check_mixed_batch, check_resumed_sequences
from tests.support.worker.tiny_backend import tiny_backend


@pytest.fixture(scope="module", params=[*ARCHITECTURES, *LANGUAGE_MODELS])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyModel, HostRunner]:
    folder = tmp_path_factory.mktemp(request.param)
    settings = {"ops": "native", "model_impl": "transformers", "language_model_only": request.param in FOR_TEXTS_ALONE}
    return library_model(request.param, folder), tiny_backend(folder, **settings)


@pytest.fixture
def fresh(served: tuple[TinyModel, HostRunner]) -> Iterator[tuple[TinyModel, HostRunner]]:
    yield served
    served[1].reset()


def test_a_mixed_batch_generates_greedily_what_the_library_does(fresh: tuple[TinyModel, HostRunner]) -> None:
    check_mixed_batch(*fresh)


def test_chunks_prefix_hits_and_preemption_change_nothing(fresh: tuple[TinyModel, HostRunner]) -> None:
    check_resumed_sequences(*fresh)


@pytest.mark.parametrize(("marker", "known"), [("architectures", ARCHITECTURES), ("language models", LANGUAGE_MODELS)])
def test_the_documentation_names_them_all(marker: str, known: dict[str, object]) -> None:
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    listed = text.partition(f"<!-- {marker} -->")[2].partition("<!-- end -->")[0].replace("\n", " ")
    assert {name.strip(" `") for name in listed.split(",")} == set(known)
