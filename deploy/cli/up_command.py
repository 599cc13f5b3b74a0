"""How `baton up` is typed. Its body is in `up.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from deploy.cli.interrupts import end_at_once, raise_interrupt
from deploy.cli.options import DEFAULT, Name, RunDir

MODEL, CAPACITY, SIZE, STORE, HOSTS = "Model", "Capacity", "How many", "KV store", "Several hosts"
ROUTING, BUS, PLACE = "Routing", "Bus", "Run"


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
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"] | None,
        typer.Option(
            help="dummy: random weights, of a folder without any or a shape: llama-3.1-8b, qwen3-0.6b, qwen3-30b-a3b.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    sim_step_ms: Annotated[
        float | None, typer.Option(help="Milliseconds per step of --device sim.", rich_help_panel=MODEL)
    ] = None,
    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3_json", "mistral", "qwen3_xml", "pythonic"] | None,
        typer.Option(help="How the model writes tool calls; auto: as its chat template shows.", rich_help_panel=MODEL),
    ] = None,
    reasoning_parser: Annotated[
        Literal["auto", "none", "deepseek_r1", "qwen3", "mistral"] | None,
        typer.Option(help="How the model writes its thoughts; auto: the same.", rich_help_panel=MODEL),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest sequence in tokens.", rich_help_panel=CAPACITY)
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory for keys and values per rank, e.g. 2GiB.", rich_help_panel=CAPACITY)
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            help="Share of a GPU's memory that a rank may take for everything; 0.9.", rich_help_panel=CAPACITY
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"] | None,
        typer.Option(help="How a GPU keeps keys and values; fp8: half the memory.", rich_help_panel=CAPACITY),
    ] = None,
    enforce_eager: Annotated[
        bool,
        typer.Option("--enforce-eager", help="Launch a GPU's kernels one by one: no graphs.", rich_help_panel=CAPACITY),
    ] = False,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences running at once per engine.", rich_help_panel=CAPACITY)
    ] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Tokens per step.", rich_help_panel=CAPACITY)] = None,
    bind: Annotated[
        str | None,
        typer.Option(help="Processors of each worker: auto (beside its GPU), none.", rich_help_panel=CAPACITY),
    ] = None,
    speculative: Annotated[
        str | None,
        typer.Option(
            help='Draft tokens, e.g. {"method": "ngram", "num_speculative_tokens": 4}; see docs/speculative.md.',
            rich_help_panel=MODEL,
        ),
    ] = None,
    engines: Annotated[
        int | None, typer.Option(min=0, help="Copies of the model; 1, or 0 beside pools.", rich_help_panel=SIZE)
    ] = None,
    tp: Annotated[
        int, typer.Option(min=1, help="Worker ranks that share each layer, per engine.", rich_help_panel=SIZE)
    ] = 1,
    pp: Annotated[
        int, typer.Option(min=1, max=32, help="Pipeline stages per engine, of --tp ranks each.", rich_help_panel=SIZE)
    ] = 1,
    pp_layers: Annotated[
        str | None, typer.Option(help="Layers of each stage, e.g. 17,15; as even as can be.", rich_help_panel=SIZE)
    ] = None,
    prefill: Annotated[
        int, typer.Option(min=0, help="Engines that compute prompts and hand over.", rich_help_panel=SIZE)
    ] = 0,
    decode: Annotated[int, typer.Option(min=0, help="Engines that take over from those.", rich_help_panel=SIZE)] = 0,
    tp_prefill: Annotated[
        int | None, typer.Option(min=1, help="Worker ranks per prefill engine; --tp.", rich_help_panel=SIZE)
    ] = None,
    tp_decode: Annotated[
        int | None, typer.Option(min=1, help="Worker ranks per decode engine; --tp.", rich_help_panel=SIZE)
    ] = None,
    pp_prefill: Annotated[
        int | None, typer.Option(min=1, max=32, help="Stages per prefill engine; --pp.", rich_help_panel=SIZE)
    ] = None,
    pp_decode: Annotated[
        int | None, typer.Option(min=1, max=32, help="Stages per decode engine; --pp.", rich_help_panel=SIZE)
    ] = None,
    gateways: Annotated[int, typer.Option(min=1, rich_help_panel=SIZE)] = 1,
    tokenizers: Annotated[int, typer.Option(min=1, rich_help_panel=SIZE)] = 1,
    detokenizers: Annotated[int, typer.Option(min=1, rich_help_panel=SIZE)] = 1,
    coordinators: Annotated[int, typer.Option(min=1, rich_help_panel=SIZE)] = 1,
    nodes: Annotated[
        int, typer.Option(min=1, help="Hosts that the ranks of each engine are spread over.", rich_help_panel=HOSTS)
    ] = 1,
    node_rank: Annotated[
        int, typer.Option(min=0, help="Which of them this is; 0 runs everything else, too.", rich_help_panel=HOSTS)
    ] = 0,
    master: Annotated[
        str | None, typer.Option(help="HOST:PORT of the first one's NATS server.", rich_help_panel=HOSTS)
    ] = None,
    cluster_token: Annotated[
        str | None,
        typer.Option(
            help="A secret of all hosts. Better by environment.", envvar="BATON_CLUSTER_TOKEN", rich_help_panel=HOSTS
        ),
    ] = None,
    kvstore_memory: Annotated[
        str | None,
        typer.Option(
            help="Shared memory for KV blocks, e.g. 4GiB; 0: none.",
            rich_help_panel=STORE,
        ),
    ] = None,
    node: Annotated[
        str | None, typer.Option(help="What the stores call this machine; its host name.", rich_help_panel=STORE)
    ] = None,
    redis: Annotated[
        bool, typer.Option("--redis", help="Start a redis-server for evicted blocks.", rich_help_panel=STORE)
    ] = False,
    redis_memory: Annotated[str, typer.Option(help="What that server may take.", rich_help_panel=STORE)] = "1GiB",
    redis_url: Annotated[
        str | None,
        typer.Option(
            help="A Redis of your own. Better by environment.", envvar="BATON_REDIS_URL", rich_help_panel=STORE
        ),
    ] = None,
    router_policy: Annotated[
        Literal["kv", "least-loaded", "round-robin", "random"] | None,
        typer.Option(help="Where requests go; kv: where their prefix is.", rich_help_panel=ROUTING),
    ] = None,
    disaggregate_tokens: Annotated[
        int | None,
        typer.Option(
            min=0, help="Prompts with fewer uncached tokens are computed where they decode.", rich_help_panel=ROUTING
        ),
    ] = None,
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
    """Start everything on this machine: bus, gateway, tokenizer, coordinator, engines, KV store, detokenizer."""
    end_at_once()
    from deploy.cli.drafting import drafting
    from deploy.cli.hosts_choice import hosts_choice
    from deploy.cli.made_up_model import model_folder
    from deploy.cli.stack_lookup import run_dir_of
    from deploy.cli.stack_spec import (
        check_journal,
        checked_namespace,
        chosen,
        cpu_share,
        engines_asked,
        layer_split,
        merged,
        parsed_settings,
        served_name,
    )
    from deploy.cli.store_choice import store_choice

    where = run_dir_of(name, run_dir)
    own = parsed_settings(settings or [])
    if detach:
        from deploy.cli.detach import start_in_background

        raise_interrupt()
        own_name = "" if name == DEFAULT else f" --name {name}"
        down = f"baton down{own_name}" if run_dir is None else f"baton down --run-dir {run_dir}"
        start_in_background(where, [each for each in sys.argv[1:] if each not in ("--detach", "-d")])
        print(f"\nIt runs in the background; stop it with: {down}")
        return
    from deploy.cli.up import run_stack
    from deploy.supervisor.arenas import clear_leftovers
    from deploy.supervisor.core.plan import Counts
    from deploy.supervisor.spec import OutsideBus, StackSpec, StoreSpec

    hosts = hosts_choice(
        nodes=nodes,
        node_rank=node_rank,
        master=master,
        token=cluster_token,
        outside_bus=bool(nats_url),
        ranks=tp * pp,
        pools=prefill + decode,
        kvstore_memory=kvstore_memory,
    )
    clear_leftovers(where)  # first, as it takes the memory that the store is to have
    memory = "0" if hosts else kvstore_memory
    store = store_choice(memory=memory, node=node, redis=redis, redis_memory=redis_memory, redis_url=redis_url)
    counts = Counts(
        gateway=gateways,
        tokenizer=tokenizers,
        detokenizer=detokenizers,
        coordinator=coordinators,
        engines=engines_asked(engines, prefill, decode),
        ranks=tp * pp,
        stages=pp,
        prefill=prefill,
        prefill_ranks=(tp_prefill or tp) * (pp_prefill or pp),
        prefill_stages=pp_prefill or pp,
        decode=decode,
        decode_ranks=(tp_decode or tp) * (pp_decode or pp),
        decode_stages=pp_decode or pp,
        kvstore=int(store is not None),
        hosts=nodes,
        host=node_rank,
    )
    check_journal(own, counts.all_engines)
    raise_interrupt()
    run_stack(
        StackSpec(
            name=name,
            run_dir=where,
            model=model_folder(model, load_format, where),
            served_model_name=served_name(model, served_model_name),
            host=host,
            port=port if counts.leads else 0,
            counts=counts,
            pp_layers=layer_split(pp_layers, counts),
            store=store or StoreSpec(),
            settings=merged(
                {
                    "*": {"log_level": log_level},
                    "scheduler": chosen(max_running=max_num_seqs, max_batch_tokens=max_batch_tokens),
                    "gateway": chosen(tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser),
                    "coordinator": chosen(router_policy=router_policy, disaggregate_tokens=disaggregate_tokens),
                    "worker": chosen(
                        device=device,
                        dtype=dtype,
                        load_format=load_format,
                        sim_step_ms=sim_step_ms,
                        kv_memory=kv_memory,
                        gpu_memory_utilization=gpu_memory_utilization,
                        kv_cache_dtype=kv_cache_dtype,
                        enforce_eager=enforce_eager or None,
                        max_model_len=max_model_len,
                        max_num_seqs=max_num_seqs,
                        max_batch_tokens=max_batch_tokens,
                        threads=cpu_share(counts),
                        bind=bind,
                        speculative=drafting(
                            speculative, device=device, stages=max(pp, pp_prefill or pp, pp_decode or pp)
                        ),
                    ),
                },
                own,
            ),
            api_keys=tuple(api_key or ()),
            outside_bus=OutsideBus(urls=tuple(nats_url)) if nats_url else None,
            hosts=hosts,
            namespace=checked_namespace(namespace),
            config=config.absolute() if config else None,
            log_level=log_level,
            drain_timeout=drain_timeout,
            start_timeout=start_timeout,
        ),
        ready_fd,
    )
