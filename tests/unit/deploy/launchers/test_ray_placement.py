"""What an engine asks of a Ray cluster, and which of its processes go together."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from deploy.launchers.ray.placement import Bundle, bundle_of, device_of, engine_placement
from deploy.supervisor.core.plan import Counts, process_specs
from deploy.supervisor.launch import LaunchContext, service_command
from deploy.supervisor.processes import TransferSite
from deploy.supervisor.spec import RaySpec, StackSpec
from kvstore.config import KvStoreConfig
from shared.config import load_config
from shared.ids import ModelName, NodeId


def spec(**counts: object) -> StackSpec:
    return StackSpec(
        name="t",
        run_dir=Path("/r"),
        model=Path("/m"),
        served_model_name=ModelName("m"),
        host="127.0.0.1",
        port=0,
        namespace="baton",
        log_level="info",
        drain_timeout=30.0,
        start_timeout=600.0,
        counts=Counts(**counts),
    )


@pytest.mark.parametrize(
    ("counts", "bundles", "strategy"),
    [
        ({}, [Bundle(2.5, 1)], "STRICT_PACK"),
        ({"engine_stores": True}, [Bundle(3.0, 1)], "STRICT_PACK"),
        ({"ranks": 4}, [Bundle(8.5, 4)], "STRICT_PACK"),
        ({"ranks": 4, "stages": 2}, [Bundle(4.5, 2), Bundle(4.0, 2)], "PACK"),
        ({"ranks": 4, "stages": 2, "engine_stores": True}, [Bundle(5.0, 2), Bundle(4.0, 2)], "STRICT_PACK"),
    ],
)
def test_a_stage_is_a_bundle_and_a_store_keeps_all_on_one_node(
    counts: dict[str, object], bundles: list[Bundle], strategy: str
) -> None:
    found = engine_placement(spec(**counts), RaySpec(cpus_per_rank=2), "engines", gpus_per_rank=1)
    assert (list(found.bundles), found.strategy) == (bundles, strategy)


def test_processes_of_an_engine_are_where_their_stage_is() -> None:
    stack = spec(ranks=4, stages=2, engine_stores=True)
    placed = {
        each.instance: (bundle_of(stack, each), device_of(stack, each))
        for each in process_specs("engines", 1, stack.counts)
    }
    assert placed == {
        "engine-1": (0, None),
        "engine-1-rank0": (0, 0),
        "engine-1-rank1": (0, 1),
        "engine-1-rank2": (1, 0),
        "engine-1-rank3": (1, 1),
        "engine-1-kvstore": (0, None),
    }


def test_what_runs_elsewhere_has_its_engines_store_and_does_not_look_for_the_supervisor() -> None:
    stack = spec(engine_stores=True)
    where = LaunchContext(port=1, rendezvous=None, arenas=Path("/dev/shm/a"), remote=True, node=NodeId("engine-1"))
    for process in process_specs("engines", 1, stack.counts):
        argv = service_command(stack, process, where)
        assert not [each for each in argv if each.startswith(("--supervisor-lock", "--orphan-timeout"))]
        assert process.service == "worker" or "--node=engine-1" in argv


def test_a_store_elsewhere_sends_blocks_from_there_and_has_a_folder_of_its_own() -> None:
    stack = msgspec.structs.replace(spec(engine_stores=True), settings={"kvstore": {"kv_ssd": "/ssd"}})
    site = TransferSite("10.0.0.2", Path("/f/store.pem"), Path("/f/store.key"), Path("/f/ca.pem"))
    where = LaunchContext(
        port=1, rendezvous=None, arenas=Path("/f/arenas"), remote=True, node=NodeId("engine-1"), transfer=site
    )
    (store,) = (each for each in process_specs("engines", 1, stack.counts) if each.service == "kvstore")
    config = load_config("kvstore", KvStoreConfig, service_command(stack, store, where)[3:], {})
    assert (config.transfer_host, config.transfer_port, config.node) == ("10.0.0.2", 0, "engine-1")
    assert config.transfer_tls_cert == "/f/store.pem"
    assert config.kv_ssd == "/ssd/engine-1"


def test_resources_are_named_as_ray_names_them() -> None:
    assert Bundle(0.5).resources() == {"CPU": 0.5}
    assert Bundle(4.5, 2).resources() == {"CPU": 4.5, "GPU": 2.0}
    assert str(Bundle(4.5, 2)) == "4.5 CPUs and 2 GPUs"
