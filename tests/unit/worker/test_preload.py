"""What is imported before workers are forked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from services.worker.config import WorkerConfig
from services.worker.preload import computed_by_the_library
from tests.support.paths import DEMO_MODEL


def test_transformers_is_imported_where_it_computes_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["WhisperForConditionalGeneration"]}))
    config = WorkerConfig(engine="engine-1", model=str(tmp_path))
    assert computed_by_the_library(config, tmp_path)
    assert not computed_by_the_library(config, DEMO_MODEL)
    assert computed_by_the_library(
        WorkerConfig(engine="engine-1", model=str(DEMO_MODEL), model_impl="transformers"), DEMO_MODEL
    )
    assert not computed_by_the_library(config, tmp_path / "nowhere"), "the worker says what is wrong"


def test_a_forked_worker_imports_nothing() -> None:
    """What it imported itself it would not share with others: a page for each name that is looked up (ADR 214)."""
    script = f"""
import sys
import deploy.supervisor.template.__main__
from services.worker.preload import preload
preload(["--engine=engine-1", "--model={DEMO_MODEL}"])
assert sys.modules['services.worker.__main__'].main
before = set(sys.modules)
import services.worker.kv.transfers, services.worker.kv.copy_thread
print(sorted(set(sys.modules) - before))
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert said.stdout.strip() == "[]"
