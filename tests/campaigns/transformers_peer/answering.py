"""Has transformers' continuous batching answer requests as they come, with its own weights or dummy ones.

It is measured at its best: nothing is streamed, detokenized or sent over HTTP, and a token's time is when transformers
itself took it from the device.
"""

from __future__ import annotations

import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import torch

from services.worker.models.config import ModelConfig, ModelError
from services.worker.models.dummy_weights import DummyTensors
from services.worker.models.hf_config import read_model_config
from services.worker.models.loaded_model import dtype_of
from tests.campaigns.transformers_peer.wire import (
    PeerAnswer,
    PeerMessage,
    PeerReady,
    PeerRefused,
    PeerRequest,
    PeerSettings,
)

_SHOWN = ("max_batch_tokens", "num_blocks", "max_requests_per_batch", "use_cuda_graph", "use_async_batching")
_PAGE = 256
"""Tokens of a block, transformers' default."""
_BATCH_ON_CPU = 512
"""Tokens of a step."""
_LOOK_SECONDS = 0.2
"""After which it is asked whether transformers' thread lives."""
_AT_ONCE = 256
"""Answers sent together."""


class PeerFailed(Exception):
    """transformers cannot serve the model, or failed; the text says why."""


class SendMessages(Protocol):
    """Writes messages to the process that started this one. Called from two threads, not at the same time."""

    def __call__(self, *messages: PeerMessage) -> None:
        """Returns once all of them are written."""


def answer_all(request: PeerSettings, requests: BinaryIO, send: SendMessages) -> None:
    """Answers requests until `requests` ends. Raises PeerFailed where there is no transformers, or it fails."""
    manager, ready = _prepare(request)
    manager.start()
    send(ready)
    answering = threading.Thread(target=_answer, args=(manager, send), daemon=True)
    answering.start()
    for line in requests:
        wanted = msgspec.json.decode(line, type=PeerRequest)
        name = manager.add_request(
            wanted.tokens, request_id=str(wanted.number), max_new_tokens=wanted.max_tokens, record_timestamps=True
        )
        if name is None:
            raise PeerFailed("transformers takes no more requests: its thread has ended")


def _prepare(request: PeerSettings) -> tuple[Any, PeerReady]:
    try:
        transformers = transformers_module()
    except ImportError:
        raise PeerFailed("transformers is not installed: pip install 'transformers>=5,<6'") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = _device(request.device)
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    begun = time.perf_counter()
    try:
        model = load(request, device)
        loaded = time.perf_counter()
        manager = _manager(model, request, device)
        manager.warmup()
    except (ModelError, ImportError, ValueError, TypeError, AttributeError, torch.OutOfMemoryError) as error:
        raise PeerFailed(f"transformers {transformers.__version__}: {error}") from error
    settings = manager.continuous_batching_config
    return manager, PeerReady(
        transformers=transformers.__version__,
        device="CPU" if device.type == "cpu" else torch.cuda.get_device_name(device),
        dtype=str(model.dtype).removeprefix("torch."),
        attention=model.config._attn_implementation.removeprefix("paged|"),
        load_seconds=loaded - begun,
        warm_up_seconds=time.perf_counter() - loaded,
        settings={name: getattr(settings, name) for name in _SHOWN if hasattr(settings, name)},
    )


def _device(wanted: str) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise PeerFailed("--device cuda: PyTorch sees no CUDA device here")
    return torch.device("cuda", 0)


def _manager(model: Any, request: PeerSettings, device: torch.device) -> Any:
    """Sized for what will be asked, as its own `generate_batch` does."""
    hints = transformers_module("transformers.generation.continuous_batching.utils").WorkloadHints
    known = _on_cpu(request) if device.type == "cpu" else {}
    return model.init_continuous_batching(
        generation_config=transformers_module().GenerationConfig(
            do_sample=False, eos_token_id=-1, max_new_tokens=request.output_tokens
        ),
        continuous_batching_config=transformers_module().ContinuousBatchingConfig(**(known | request.settings)),
        workload_hints=hints(
            max_prompt_length=request.prompt_tokens,
            max_generated_length=request.output_tokens,
            num_requests=request.requests,
        ),
    )


def _on_cpu(request: PeerSettings) -> dict[str, int]:
    """Memory for what will be asked: of itself it takes most of the machine's."""
    blocks_each = -(-(request.prompt_tokens + request.output_tokens) // _PAGE) + 1
    return {
        "num_blocks": blocks_each * (request.requests + 1),
        "max_batch_tokens": max(_BATCH_ON_CPU, request.requests),
    }


def _answer(manager: Any, send: SendMessages) -> None:
    while True:
        found = _results(manager)
        if found:
            send(*(_answer_of(each) for each in found))
        elif not manager.is_running():
            send(*_end_messages(manager))
            return


def _results(manager: Any) -> list[Any]:
    """All that are there, the first of which is waited for."""
    first = manager.get_result(timeout=_LOOK_SECONDS)
    found = [] if first is None else [first]
    waiting = manager.output_router.output_queue
    while found and len(found) < _AT_ONCE and not waiting.empty():
        found.append(waiting.get_nowait())
    return found


def _answer_of(output: Any) -> PeerAnswer:
    return PeerAnswer(int(output.request_id), output.generated_tokens, output.timestamps or [], output.error)


def _end_messages(manager: Any) -> list[PeerMessage]:
    return [PeerRefused(f"transformers' thread ended: {manager.background_thread_status.fatal_error}")]


# The model, with the weights of its folder or the dummy weights that our workers use.


def transformers_module(module: str = "transformers") -> Any:
    """transformers, whose types are not those that it has at run time. Raises ImportError."""
    return import_module(module)


def load(request: PeerSettings, device: torch.device) -> Any:
    """The model in the dtype that our worker would choose. Raises ModelError, and what transformers raises."""
    folder = Path(request.folder)
    config = read_model_config(folder)
    dtype = getattr(torch, dtype_of(request.dtype, config))
    how = (
        {"dtype": dtype} if request.attention == "auto" else {"dtype": dtype, "attn_implementation": request.attention}
    )
    if request.load_format == "dummy":
        return _dummy_model(folder, config, device, how)
    return transformers_module().AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **how).to(device)


def _dummy_model(folder: Path, config: ModelConfig, device: torch.device, how: dict[str, Any]) -> Any:
    shape = transformers_module().AutoConfig.from_pretrained(folder, local_files_only=True)
    with device:
        model = transformers_module().AutoModelForCausalLM.from_config(shape, **how)
    tensors = DummyTensors(how["dtype"], device, norm_offset=config.norm_offset)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors.read(_name(name), tuple(parameter.shape)))
    return model


def _name(name: str) -> str:
    """By which our loader asks for it: dummy weights depend on the name, and experts are found under Mixtral's."""
    for part in ("gate.", "experts."):
        name = name.replace(f".mlp.{part}", f".block_sparse_moe.{part}")
    return name
