"""`--launcher ray`: what is asked of the cluster, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cli.up.choices import ray_choice, stack_spec
from deploy.errors import CommandError
from deploy.launchers.ray.cluster import ray_cluster
from deploy.supervisor.core.plan import all_process_specs
from deploy.supervisor.settings import StackSettings
from deploy.supervisor.spec import RaySpec, StackSpec


def made(tmp_path: Path, assigned: dict[str, dict[str, str]] | None = None, **typed: object) -> StackSpec:
    chosen = {"launcher": "ray", "kvstore_memory": "16MiB", **typed}
    return stack_spec(chosen, assigned or {}, name="t", run_dir=tmp_path / "run", config=None)


def test_each_engine_has_a_store_and_ranks_their_threads(tmp_path: Path) -> None:
    spec = made(tmp_path, {"worker": {"threads": "3"}}, device="cuda", engines=2)
    assert spec.ray == RaySpec(cpus_per_rank=3, gpus_per_rank=1)
    assert (spec.counts.kvstore, spec.counts.engine_stores) == (0, True)
    plain = made(tmp_path, kvstore_memory="0", device="cpu", ray_address="10.0.0.1:6379")
    assert plain.ray == RaySpec(address="10.0.0.1:6379", cpus_per_rank=1, gpus_per_rank=0)
    assert not plain.counts.engine_stores
    assert plain.settings["worker"]["threads"] == "1"


def test_without_the_launcher_there_is_no_ray() -> None:
    assert ray_choice(StackSettings(), {}, {}, runs_here=False) is None


def test_each_engine_of_a_pool_has_a_store(tmp_path: Path) -> None:
    spec = made(tmp_path, prefill=1, decode=2, kv_ssd="/ssd", device="cpu")
    stores = [each.instance for each in all_process_specs(spec.counts) if each.service == "kvstore"]
    assert sorted(stores) == ["decode-1-kvstore", "decode-2-kvstore", "prefill-1-kvstore"]
    assert spec.settings["kvstore"]["kv_ssd"] == "/ssd"


def test_hosts_are_not_chosen_twice(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="Ray chooses hosts itself"):
        made(tmp_path, advertise_address="127.0.0.1", nodes=1)


@pytest.mark.parametrize("address", ["x", "ray://127.0.0.1:10001", "127.0.0.1:port", "127.0.0.1:1"])
def test_an_address_without_a_cluster_is_refused_at_once(tmp_path: Path, address: str) -> None:
    spec = made(tmp_path, ray_address=address)
    assert spec.ray is not None
    with pytest.raises(CommandError, match="--ray-address"), ray_cluster(spec, spec.ray):
        pass
