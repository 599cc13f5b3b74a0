"""How `baton batch` is typed. Its body is in `batch.py`."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.running_stack import DEFAULT, Name, RunDir
from deploy.cli.up.options import given, offers, set_option, with_options

if TYPE_CHECKING:
    from deploy.cli.batch.http_server import AnswerRequest

ENGINE = "An engine of this command's own"
ENGINE_OPTIONS = ("device", "dtype", "max_model_len", "kv_memory", "max_num_seqs", "max_batch_tokens")
"""Options of `baton up` that also apply to the engine which this command starts; every other setting is given by
--set."""
AT_A_SERVER = 128
"""Requests that are sent to a server at the same time, by default."""


def batch(
    requests: Annotated[
        Path, typer.Argument(help="Input: JSON lines with custom_id, method, url and body.", dir_okay=False)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Output: JSON lines. Lines that it already has are kept.")
    ],
    base_url: Annotated[str | None, typer.Option(help="URL of any OpenAI-compatible server.")] = None,
    api_key: Annotated[str | None, typer.Option(help="API key for the server.", envvar="BATON_API_KEY")] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, max=4096, help="Concurrent requests. Default: 128; for an engine of its own as many as it holds."
        ),
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds that the server may be away or busy before the command gives up.")
    ] = 300.0,
    model: Annotated[
        str | None,
        typer.Option(
            help="Start an engine with this directory or Hugging Face id, even if a stack runs.", rich_help_panel=ENGINE
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Model name in the requests.", rich_help_panel=ENGINE)
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Worker ranks that share each layer.", rich_help_panel=ENGINE)] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages; each has --tp ranks.", rich_help_panel=ENGINE)] = 1,
    settings: Annotated[
        list[str] | None,
        set_option("SERVICE.KEY=VALUE, any setting of a service.", ENGINE),
    ] = None,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
    **typed: Any,
) -> None:
    """Answer a file of requests in OpenAI's batch format; a second run continues where the first stopped.

    Asks --base-url, else the running stack, else an engine of its own (always with --model).
    """
    from deploy.cli.batch.http_server import http_server
    from deploy.cli.batch.run import answer_batch
    from deploy.cli.running_stack import run_dir_of
    from deploy.errors import CommandError
    from deploy.supervisor.state_file import read_state

    if base_url is not None and model is not None:
        raise CommandError("--model and --base-url: one of them says who answers", status=2)
    state = None if base_url is not None or model is not None else read_state(run_dir_of(name, run_dir))
    server: AbstractAsyncContextManager[AnswerRequest]
    under_way = concurrency or AT_A_SERVER
    if base_url is not None:
        server = http_server(base_url, api_key, under_way, patience)
    elif state is not None:
        server = http_server(state.url, api_key or state.api_key, under_way, patience)
    else:
        engine = given(typed)
        running = engine.get("max_num_seqs", offers()["max_num_seqs"].setting.default)
        under_way = concurrency or min(2 * running, 4096)
        server = _own_engine(
            model,
            served_model_name,
            settings or [],
            **engine,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
        )
    answer_batch(requests, output, server, under_way)


def _own_engine(
    model: str | None, served_model_name: str | None, assignments: list[str], **engine: object
) -> AbstractAsyncContextManager[AnswerRequest]:
    from deploy.cli.batch.own_engine import offline_engine
    from deploy.cli.up.assignments import parsed_settings
    from deploy.errors import CommandError
    from deploy.model_choice import model_directory, served_name
    from deploy.supervisor.launch import EVERY_SERVICE

    more = parsed_settings(assignments)
    if EVERY_SERVICE in more:
        raise CommandError("--set: SERVICE.KEY=VALUE is expected", status=2)
    chosen = {
        **engine,
        "served_model_name": served_name(model, served_model_name),
        "settings": {f"{service}.{key}": value for service, values in more.items() for key, value in values.items()},
    }
    return offline_engine(str(model_directory(model)), chosen)


with_options(batch, (offers()[option] for option in ENGINE_OPTIONS), ENGINE)
