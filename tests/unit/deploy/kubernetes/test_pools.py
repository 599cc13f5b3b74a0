"""Prefill and decode engines: what is theirs, alone and beside all other components."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.launchers.kubernetes_launcher import WORKLOADS
from deploy.supervisor.cluster.certificates import is_for
from kvstore.config import KvStoreConfig
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from tests.support.kubernetes.manifests import (
    FOLDER,
    Manifest,
    composed,
    named,
    of_kind,
    patches_of_the_manual,
    rendered,
    violations,
)
from tests.support.kubernetes.pods import Container, Workload
from tests.support.kubernetes.secrets import STORES
from tests.support.paths import REPOSITORY
from tests.unit.deploy.kubernetes.test_manifests import configuration, secrets

__all__ = ["secrets"]

ROLES = {"prefill": "prefill", "engine": "decode"}
"""By StatefulSet."""


def container(manifests: tuple[Manifest, ...], workload: str, name: str) -> tuple[Workload, Container]:
    found = Workload(named(manifests, "StatefulSet", workload))
    (own,) = (each for each in found.containers if each.name == name)
    return found, own


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, ...]:
    """The GPUs' overlay with pools, scaled each."""
    folder = tmp_path_factory.mktemp("overlay")
    shutil.copytree(FOLDER / "overlays" / "gpu", folder, dirs_exist_ok=True)
    gpu = yaml.safe_load((folder / "kustomization.yaml").read_text())
    others = [each.removeprefix("../../") for each in gpu["components"]]
    components = ["components/pools", *others, "components/pools/autoscaling"]
    patches = gpu["patches"] + patches_of_the_manual("Several GPUs in a pod")
    return composed(folder, {**gpu, "resources": ["base"], "components": components, "patches": patches})


@pytest.mark.parametrize("workload", ROLES)
def test_a_pools_engines_have_its_role_and_reach_the_other_pools_stores(workload: str, secrets: Path) -> None:
    manifests = rendered("pools")
    pod, own = container(manifests, workload, "scheduler")
    scheduler = configuration(manifests, pod, own, secrets)
    assert isinstance(scheduler, SchedulerConfig)
    assert scheduler.role == ROLES[workload]
    pod, own = container(manifests, workload, "kvstore")
    store = configuration(manifests, pod, own, secrets)
    assert isinstance(store, KvStoreConfig)
    assert (store.transfer_tcp_port, store.transfer_port) == (own.ports["transfer-tcp"], own.ports["transfer-grpc"])
    assert (store.transfer_host, store.insecure) == ("0.0.0.0", False)
    # The name is that of the pod by its governing Service, and the certificate's.
    service = named(manifests, "Service", pod.manifest["spec"]["serviceName"])
    assert store.transfer_advertise == f"{pod.pod_name}.{service['metadata']['name']}.baton.svc"
    assert service["spec"]["publishNotReadyAddresses"], "stores speak while their engines start"
    assert store.transfer_advertise.endswith(STORES.removeprefix("*"))
    tls = store.tls_files()
    assert tls is not None
    assert is_for(Path(tls[0]).read_bytes(), STORES)


def test_no_pods_are_of_both_pools() -> None:
    selectors = [named(rendered("pools"), "StatefulSet", each)["spec"]["selector"]["matchLabels"] for each in ROLES]
    assert [each["pool"] for each in selectors] == ["prefill", "decode"]


def test_without_pools_engines_do_both(secrets: Path) -> None:
    pod, own = container(rendered("demo"), "engine", "scheduler")
    config = configuration("demo", pod, own, secrets)
    assert isinstance(config, SchedulerConfig)
    assert config.role == "mixed"
    pod, own = container(rendered("demo"), "engine", "kvstore")
    store = configuration("demo", pod, own, secrets)
    assert isinstance(store, KvStoreConfig)
    assert store.transfer_port is None


def test_what_other_components_change_of_engines_they_change_of_both(everything: tuple[Manifest, ...]) -> None:
    assert [problem for each in everything for problem in violations(each)] == []

    def rest(workload: str) -> str:
        text = yaml.safe_dump(named(everything, "StatefulSet", workload))
        return re.sub(r"(?m)^( *)(name|pool|value): (prefill|decode|engine)$", r"\1\2: ROLE", text)

    assert "redis-url" in rest("engine")
    assert "nvidia.com/gpu: '2'" in rest("engine")
    assert rest("prefill") == rest("engine")
    assert "replicas" not in named(everything, "StatefulSet", "prefill")["spec"]


def test_a_pod_has_as_many_ranks_as_its_scheduler_plans_for(everything: tuple[Manifest, ...], secrets: Path) -> None:
    for workload in ROLES:
        pod, own = container(everything, workload, "worker")
        ranks = configuration(everything, pod, own, secrets)
        pod, own = container(everything, workload, "scheduler")
        scheduler = configuration(everything, pod, own, secrets)
        assert isinstance(ranks, WorkerConfig)
        assert isinstance(scheduler, SchedulerConfig)
        assert ranks.local_ranks == ranks.world_size == scheduler.world_size == 2
        assert ranks.engine == scheduler.instance == pod.pod_name


def test_each_pool_is_scaled_by_its_own_requests(everything: tuple[Manifest, ...]) -> None:
    for workload in ROLES:
        scaler = named(everything, "ScaledObject", workload)["spec"]
        assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": workload}
        (trigger,) = scaler["triggers"]
        assert re.findall(r'pod=~"([^"]+)"', trigger["metadata"]["query"]) == [f"{workload}-.*"] * 2
        assert trigger["metadata"]["query"].count("baton_scheduler_") == 2


def test_both_are_what_the_command_scales() -> None:
    pools = {role: WORKLOADS[role] for role in ROLES.values()}
    assert {role: [each.name for each in found] for role, found in pools.items()} == {
        "prefill": ["prefill"],
        "decode": ["engine"],
    }
    sets = {each["metadata"]["name"] for each in of_kind(rendered("pools"), "StatefulSet")}
    assert {each.name for found in pools.values() for each in found} < sets


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl is installed")
def test_the_manuals_commands_make_the_certificate(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"```bash\n(tls=.*?)\nkubectl", page, re.DOTALL)
    script = f"set -e\n{commands.replace('$(mktemp -d)', str(tmp_path))}"
    subprocess.run(["bash", "-c", script], check=True, capture_output=True, timeout=60)
    assert is_for((tmp_path / "tls.crt").read_bytes(), STORES)
    check = ["openssl", "verify", "-x509_strict", "-CAfile", str(tmp_path / "ca.crt")]
    hosts = ["-verify_hostname", "prefill-0.engine.baton.svc", str(tmp_path / "tls.crt")]
    subprocess.run([*check, *hosts], check=True, capture_output=True, timeout=60)
