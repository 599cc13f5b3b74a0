"""Has transformers' continuous batching answer requests as they come.

It is measured at its best: nothing is streamed, detokenized or sent over HTTP, and a token's time is when transformers
itself took it from the device.
"""

from __future__ import annotations

import threading
import time
from typing import Any, BinaryIO, Protocol

import msgspec
import torch

from services.worker.model.config import ModelError
from services.worker.peer.loading import library, load
from services.worker.peer.wire import Answered, Ask, PeerAsked, PeerReady, PeerRefused, Told

_SHOWN = ("max_batch_tokens", "num_blocks", "max_requests_per_batch", "use_cuda_graph", "use_async_batching")
_PAGE = 256
"""Tokens of a block, as transformers has it where it is not told."""
_BATCH_ON_CPU = 512
"""Tokens of a step."""
_LOOK_SECONDS = 0.2
"""After which it is asked whether transformers' thread lives."""
_AT_ONCE = 256
"""Answers told together."""


class PeerFailed(Exception):
    """The text says why."""


class Tell(Protocol):
    def __call__(self, *told: Told) -> None: ...


def answer_all(asked: PeerAsked, requests: BinaryIO, tell: Tell) -> None:
    """Until `requests` ends. Raises PeerFailed where there is no transformers, or it fails."""
    manager, ready = _prepared(asked)
    manager.start()
    tell(ready)
    answering = threading.Thread(target=_answer, args=(manager, tell), daemon=True)
    answering.start()
    for line in requests:
        ask = msgspec.json.decode(line, type=Ask)
        name = manager.add_request(
            ask.tokens, request_id=str(ask.number), max_new_tokens=ask.max_tokens, record_timestamps=True
        )
        if name is None:
            raise PeerFailed("transformers takes no more requests: its thread has ended")


def _prepared(asked: PeerAsked) -> tuple[Any, PeerReady]:
    try:
        transformers = library()
    except ImportError:
        raise PeerFailed("transformers is not installed: pip install 'transformers>=5,<6'") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = _device(asked.device)
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    begun = time.perf_counter()
    try:
        model = load(asked, device)
        loaded = time.perf_counter()
        manager = _manager(model, asked, device)
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


def _manager(model: Any, asked: PeerAsked, device: torch.device) -> Any:
    """Sized for what will be asked, as its own `generate_batch` does."""
    hints = library("transformers.generation.continuous_batching.utils").WorkloadHints
    known = _on_cpu(asked) if device.type == "cpu" else {}
    return model.init_continuous_batching(
        generation_config=library().GenerationConfig(
            do_sample=False, eos_token_id=-1, max_new_tokens=asked.output_tokens
        ),
        continuous_batching_config=library().ContinuousBatchingConfig(**(known | asked.settings)),
        workload_hints=hints(
            max_prompt_length=asked.prompt_tokens, max_generated_length=asked.output_tokens, num_requests=asked.requests
        ),
    )


def _on_cpu(asked: PeerAsked) -> dict[str, int]:
    """Memory for what will be asked: of itself it takes most of the machine's."""
    blocks_each = -(-(asked.prompt_tokens + asked.output_tokens) // _PAGE) + 1
    return {"num_blocks": blocks_each * (asked.requests + 1), "max_batch_tokens": max(_BATCH_ON_CPU, asked.requests)}


def _answer(manager: Any, tell: Tell) -> None:
    while True:
        found = _results(manager)
        if found:
            tell(*(_answered(each) for each in found))
        elif not manager.is_running():
            tell(*_ended(manager))
            return


def _results(manager: Any) -> list[Any]:
    """All that are there, the first of which is waited for."""
    first = manager.get_result(timeout=_LOOK_SECONDS)
    found = [] if first is None else [first]
    waiting = manager.output_router.output_queue
    while found and len(found) < _AT_ONCE and not waiting.empty():
        found.append(waiting.get_nowait())
    return found


def _answered(output: Any) -> Answered:
    return Answered(int(output.request_id), output.generated_tokens, output.timestamps or [], output.error)


def _ended(manager: Any) -> list[Told]:
    return [PeerRefused(f"transformers' thread ended: {manager.background_thread_status.fatal_error}")]
