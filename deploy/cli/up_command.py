"""How `baton up` is typed. Its body is in `up.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from deploy.cli.options import DEFAULT, Name, RunDir

MODEL, CAPACITY, SIZE, BUS, PLACE = "Model", "Capacity", "How many", "Bus", "Run"


def up(
    model: Annotated[
        str | None,
        typer.Option(help="Directory or Hugging Face id; without it the demo model.", rich_help_panel=MODEL),
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call it.", rich_help_panel=MODEL)] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda", "sim"], typer.Option(help="sim: a timing model.", rich_help_panel=MODEL)
    ] = "auto",
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.", rich_help_panel=MODEL)] = None,
    sim_step_ms: Annotated[
        float | None, typer.Option(help="Milliseconds per step of --device sim.", rich_help_panel=MODEL)
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest sequence in tokens.", rich_help_panel=CAPACITY)
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory for keys and values per rank, e.g. 2GiB.", rich_help_panel=CAPACITY)
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences running at once per engine.", rich_help_panel=CAPACITY)
    ] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Tokens per step.", rich_help_panel=CAPACITY)] = None,
    engines: Annotated[int, typer.Option(min=1, help="Copies of the model.", rich_help_panel=SIZE)] = 1,
    tp: Annotated[int, typer.Option(min=1, help="Worker ranks per engine.", rich_help_panel=SIZE)] = 1,
    gateways: Annotated[int, typer.Option(min=1, rich_help_panel=SIZE)] = 1,
    tokenizers: Annotated[int, typer.Option(min=1, rich_help_panel=SIZE)] = 1,
    detokenizers: Annotated[int, typer.Option(min=1, rich_help_panel=SIZE)] = 1,
    coordinators: Annotated[int, typer.Option(min=1, rich_help_panel=SIZE)] = 1,
    host: Annotated[str, typer.Option(help="Address of the HTTP port.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0 picks a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Clients must show it; may be repeated. Better by environment.", envvar="BATON_API_KEY"),
    ] = None,
    nats_url: Annotated[
        list[str] | None,
        typer.Option(
            help="Servers of your own instead of the embedded one.", envvar="BATON_NATS_URL", rich_help_panel=BUS
        ),
    ] = None,
    namespace: Annotated[str, typer.Option(help="First token of every subject.", rich_help_panel=BUS)] = "baton",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="SERVICE.KEY=VALUE, any flag of a service; KEY=VALUE for all.", metavar="SETTING"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file that every service reads.", exists=True, dir_okay=False)
    ] = None,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(rich_help_panel=PLACE)] = "info",
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that requests get to finish at the end.", rich_help_panel=PLACE)
    ] = 30.0,
    start_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds until everything must be ready.", rich_help_panel=PLACE)
    ] = 600.0,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when ready; the stack goes on.", rich_help_panel=PLACE)
    ] = False,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Start everything on this machine: bus, gateway, tokenizer, coordinator, engines, detokenizer."""
    from deploy.cli.stack_lookup import run_dir_of
    from deploy.cli.stack_spec import chosen, cpu_share, merged, model_directory, parsed_settings, served_name

    where = run_dir_of(name, run_dir)
    own = parsed_settings(settings or [])
    if detach:
        from deploy.cli.detach import start_in_background

        start_in_background(where, [each for each in sys.argv[1:] if each not in ("--detach", "-d")])
        return
    from deploy.cli.up import run_stack
    from deploy.supervisor.core.plan import Counts
    from deploy.supervisor.spec import OutsideBus, StackSpec

    run_stack(
        StackSpec(
            name=name,
            run_dir=where,
            model=model_directory(model),
            served_model_name=served_name(model, served_model_name),
            host=host,
            port=port,
            counts=Counts(
                gateway=gateways,
                tokenizer=tokenizers,
                detokenizer=detokenizers,
                coordinator=coordinators,
                engines=engines,
                ranks=tp,
            ),
            settings=merged(
                {
                    "*": {"log_level": log_level},
                    "scheduler": chosen(max_running=max_num_seqs, max_batch_tokens=max_batch_tokens),
                    "worker": chosen(
                        device=device,
                        dtype=dtype,
                        sim_step_ms=sim_step_ms,
                        kv_memory=kv_memory,
                        max_model_len=max_model_len,
                        max_num_seqs=max_num_seqs,
                        max_batch_tokens=max_batch_tokens,
                        threads=cpu_share(engines, tp),
                    ),
                },
                own,
            ),
            api_keys=tuple(api_key or ()),
            outside_bus=OutsideBus(urls=tuple(nats_url)) if nats_url else None,
            namespace=namespace,
            config=config.absolute() if config else None,
            log_level=log_level,
            drain_timeout=drain_timeout,
            start_timeout=start_timeout,
        ),
        ready_fd,
    )
