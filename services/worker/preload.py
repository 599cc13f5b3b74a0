"""Imports what a worker needs, for processes that are forked afterwards. Touches no device and leaves no thread."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from services.worker.__main__ import build  # noqa: F401 the program, which is not imported again
from services.worker.config import WorkerConfig
from services.worker.executor.backend_choice import make_backend  # noqa: F401
from services.worker.models.weight_files import read_ahead
from shared.config import load_config
from shared.machine.home import expanded
from shared.models.image_models import read_cross_images


def preload(flags: Sequence[str]) -> None:
    """Imports all that a worker with these flags will; beside it the kernel reads the weights. Raises ConfigError,
    ImportError."""
    config = load_config("worker", WorkerConfig, flags)
    folder = expanded(config.model)
    with read_ahead(folder) if config.reads_all_weights_here and folder.is_dir() else nullcontext():
        _import_all(config, folder)


def _import_all(config: WorkerConfig, folder: Path) -> None:
    with suppress(ImportError):
        import uvloop  # noqa: F401
    if config.device == "sim":
        from services.worker.sim.backend import create_sim_backend  # noqa: F401
    else:
        from services.worker.executor.torch_backend import create_backend  # noqa: F401
        from services.worker.kv.transfers import Transfers  # noqa: F401
        from services.worker.platforms.installed import open_platform  # noqa: F401

        if computed_by_the_library(config, folder):
            with suppress(ImportError):  # the worker says so
                from services.worker.models.fallback import library_decoder  # noqa: F401
                from services.worker.models.fallback.encoders import library_encoder  # noqa: F401


def computed_by_the_library(config: WorkerConfig, folder: Path) -> bool:
    """Whether transformers computes the model: importing that takes longer than all else."""
    from services.worker.models.config import ModelError
    from services.worker.models.hf_config import is_native

    sees = not config.language_model_only and read_cross_images(folder) is not None
    with suppress(ModelError):
        ours = is_native(folder) and not sees
        return config.model_impl == "transformers" or (config.model_impl == "auto" and not ours)
    return False
