"""Every object of deploy/kubernetes is one that Kubernetes takes, and names what the services really have."""

from __future__ import annotations

import copy
import importlib
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from msgspec.structs import replace

from deploy.configuration import CONFIGS
from deploy.healthcheck import LEADER_SECONDS, UNTIL_LEADER_ENDS
from kvstore.config import KvStoreConfig
from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.config import ModelServiceConfig, ServiceConfig, load_config
from shared.settings import parse_bytes
from shared.telemetry.metrics import service_registry
from tests.support.kubernetes.manifests import (
    FOLDER,
    KUBERNETES,
    OVERLAYS,
    Manifest,
    composed,
    named,
    of_kind,
    patches_of_the_manual,
    rendered,
    selects,
    title,
    violations,
)
from tests.support.kubernetes.pods import Container, Workload, images, secrets_of, workloads
from tests.support.kubernetes.secrets import KEY, make_secrets
from tests.support.paths import REPOSITORY

EVERY_OVERLAY = pytest.mark.parametrize("overlay", OVERLAYS)
GROUPED = frozenset({"multi-node"})
"""Overlays whose engines are groups of pods, which have no KV store."""
POOLED = frozenset({"pools"})
"""Overlays whose engines compute prompts or decode."""
POD_ENGINES = pytest.mark.parametrize(
    ("overlay", "name"),
    [*((each, "engine") for each in OVERLAYS if each not in GROUPED), *((each, "prefill") for each in sorted(POOLED))],
)
PRE_STOP_MARGIN = 10.0
"""Seconds of a pod's grace period beyond what it may use: for sidecars, which are idle by then, and for goodbyes."""
LOADER: Manifest = yaml.safe_load((FOLDER / "model-loader.yaml").read_text())
SERVED_PATHS = re.findall(
    r'route\("GET", "([^"]+)"', (REPOSITORY / "services/gateway/http/routes.py").read_text(encoding="utf-8")
)


def all_containers(overlay: str) -> list[tuple[Workload, Container]]:
    return [(workload, each) for workload in workloads(rendered(overlay)) for each in workload.containers]


def own_containers(overlay: str) -> list[tuple[Workload, Container, str]]:
    """Those whose images are ours, with the service that runs there."""
    return [(workload, each, each.target) for workload, each in all_containers(overlay) if each.target is not None]


@EVERY_OVERLAY
def test_every_object_follows_its_schema(overlay: str) -> None:
    found = [problem for each in rendered(overlay) for problem in violations(each)]
    assert found == []
    assert len({title(each) for each in rendered(overlay)}) == len(rendered(overlay)) > 20


def test_the_loader_follows_its_schema() -> None:
    assert violations(LOADER) == []
    claims = [each["persistentVolumeClaim"]["claimName"] for each in LOADER["spec"]["volumes"]]
    assert claims == [each["metadata"]["name"] for each in of_kind(rendered("demo"), "PersistentVolumeClaim")]


GROUP_PODS = ("spec", "leaderWorkerTemplate")


@pytest.mark.parametrize(
    ("kind", "name", "path", "wrong"),
    [
        ("Deployment", "gateway", ("spec", "replica"), 2),
        ("StatefulSet", "engine", ("spec", "podManagementPolicy"), ["Parallel"]),
        ("ScaledObject", "engine", ("spec", "minReplicas"), 1),
        ("ServiceMonitor", "services", ("spec", "endpoint"), []),
        ("LeaderWorkerSet", "engine", ("spec", "startUpPolicy"), "LeaderCreated"),
        ("LeaderWorkerSet", "engine", (*GROUP_PODS, "restartPolicy"), "Always"),
        ("LeaderWorkerSet", "engine", (*GROUP_PODS, "workerTemplate", "spec", "graceSeconds"), 10),
        ("LeaderWorkerSet", "engine", (*GROUP_PODS, "leaderTemplate", "spec", "containers", 0, "ports"), 9090),
    ],
)
def test_a_field_that_does_not_exist_is_noticed(
    kind: str, name: str, path: tuple[str | int, ...], wrong: object
) -> None:
    spoilt = copy.deepcopy(named(rendered("multi-node" if kind == "LeaderWorkerSet" else "gpu"), kind, name))
    owner: Any = spoilt
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = wrong
    assert len(violations(spoilt)) > 0, KUBERNETES


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each Secret, as docs/kubernetes.md makes them."""
    folder = tmp_path_factory.mktemp("secrets")
    make_secrets(folder)
    return folder


def configuration(
    manifests: str | tuple[Manifest, ...], workload: Workload, container: Container, secrets: Path
) -> ServiceConfig:
    """What the container's service makes of its environment, in an overlay or these manifests. Raises ConfigError."""
    assert container.target is not None
    manifests = rendered(manifests) if isinstance(manifests, str) else manifests
    environment = container.environment(workload.pod_name, manifests)
    folders = [
        secrets / name.removeprefix("baton-")
        for volume in container.mounts
        for name in secrets_of(workload.volumes[volume])
    ]
    for name, value in environment.items():
        if value.startswith("/run/"):
            (environment[name],) = (
                str(path) for folder in folders for path in folder.iterdir() if path.name == Path(value).name
            )
    return load_config(container.target, CONFIGS[container.target], [], environment)


@EVERY_OVERLAY
def test_every_service_starts_with_its_environment_and_its_own_secret(overlay: str, secrets: Path) -> None:
    for workload, container, service in own_containers(overlay):
        config = configuration(overlay, workload, container, secrets)
        assert (config.nats_user, config.nats_password) == (
            service,
            (secrets / service / "nats-password").read_text(),
        )
        assert config.instance_id().startswith(workload.pod_name)
        mounted = {name for volume in container.mounts for name in secrets_of(workload.volumes[volume])}
        further = {"gateway": {"baton-api-keys"}, "kvstore": {"baton-kvstore-tls"} if overlay in POOLED else set()}
        assert mounted == {f"baton-{service}"} | further.get(service, set())
        if isinstance(config, GatewayConfig):
            assert config.api_keys == (KEY,)


@EVERY_OVERLAY
def test_no_secret_stands_in_an_object(overlay: str) -> None:
    assert list(of_kind(rendered(overlay), "Secret")) == []
    for _, container in all_containers(overlay):
        variables = [each["name"] for each in container.spec.get("env", ())]
        assert [name for name in variables if re.search("PASSWORD|KEYS|REDIS_URL", name) and name[-5:] != "_FILE"] == []


@EVERY_OVERLAY
def test_containers_run_what_their_images_run(overlay: str) -> None:
    for _, container, service in own_containers(overlay):
        assert images()[service].entrypoint[:2] == ("python", "-m")
        assert {"command", "args"} & container.spec.keys() == set(), container.name
    without = {"encoder", *({"kvstore"} if overlay in GROUPED else set())}  # a component has these
    assert {service for *_, service in own_containers(overlay)} == set(CONFIGS) - without


@EVERY_OVERLAY
def test_probes_and_ports_are_those_of_the_service(overlay: str, secrets: Path) -> None:
    for workload, container, service in own_containers(overlay):
        config = configuration(overlay, workload, container, secrets)
        metrics = next(port for name, port in container.ports.items() if name.startswith("metrics"))
        assert (config.metrics_host, config.metrics_port) == ("0.0.0.0", metrics)
        if isinstance(config, GatewayConfig):
            assert (config.host, config.port) == ("0.0.0.0", container.ports["http"])
        probes = {name: container.spec[name] for name in container.spec if name.endswith("Probe")}
        assert {"startupProbe", "livenessProbe"} <= probes.keys(), container.name
        assert ("readinessProbe" in probes) is not container.sidecar
        for name, probe in probes.items():
            if service == "gateway":
                assert probe["httpGet"]["path"] in SERVED_PATHS
                assert probe["httpGet"]["port"] in container.ports
            else:
                live = [] if name == "readinessProbe" else ["--live"]
                assert probe["exec"]["command"] == ["python", "healthcheck.py", str(metrics), *live]
    for workload in workloads(rendered(overlay)):
        ports = [port for container in workload.containers for port in container.ports.values()]
        assert len(set(ports)) == len(ports), workload.name


def _pre_stop_seconds(container: Container) -> float:
    """That a container's `preStop` may take at most."""
    match container.spec.get("lifecycle", {}).get("preStop"):
        case None:
            return 0
        case {"sleep": {"seconds": seconds}}:
            return float(seconds)
        case {"exec": {"command": ["sh", "-c", script]}} if UNTIL_LEADER_ENDS in script:
            return LEADER_SECONDS
        case other:
            raise AssertionError(other)


@EVERY_OVERLAY
def test_a_pod_has_time_to_drain(overlay: str, secrets: Path) -> None:
    for workload, container, _ in own_containers(overlay):
        before = _pre_stop_seconds(container)
        drain = configuration(overlay, workload, container, secrets).drain_timeout
        assert workload.pod["terminationGracePeriodSeconds"] >= before + drain + PRE_STOP_MARGIN, container.name


@EVERY_OVERLAY
def test_no_variable_that_kubernetes_makes_can_be_taken_for_a_setting(overlay: str) -> None:
    assert {workload.pod["enableServiceLinks"] for workload in workloads(rendered(overlay))} == {False}


@pytest.mark.parametrize("overlay", sorted(GROUPED))
def test_the_pods_of_a_group_are_the_ranks_of_one_engine(overlay: str, secrets: Path) -> None:
    manifest = named(rendered(overlay), "LeaderWorkerSet", "engine")
    leader, worker = Workload(manifest, "leader"), Workload(manifest, "worker")
    first, scheduler = (configuration(overlay, leader, each, secrets) for each in leader.containers)
    (second,) = (configuration(overlay, worker, each, secrets) for each in worker.containers)
    assert isinstance(scheduler, SchedulerConfig)
    assert isinstance(first, WorkerConfig)
    assert isinstance(second, WorkerConfig)
    size = manifest["spec"]["leaderWorkerTemplate"]["size"]
    assert first.world_size == second.world_size == scheduler.world_size == size > 1
    assert (first.rank, second.rank, first.place().publishes) == (0, 1, True)
    assert first.engine == second.engine == scheduler.instance == leader.pod_name
    assert (first.kvstore_dir, second.kvstore_dir, scheduler.node) == (None, None, None)
    assert first.instance_id() != second.instance_id()
    assert first.rendezvous_url() == second.rendezvous_url()
    address = urlsplit(first.rendezvous_url())
    (rank, _) = leader.containers
    assert address.port == rank.ports["rendezvous"]
    # What differs between the two is where they are; the model and its cache must be the same.
    assert replace(first, instance=None, rank=0) == replace(second, instance=None, rank=0)
    assert address.hostname == worker.injected["LWS_LEADER_ADDRESS"]
    pod, service, namespace = str(address.hostname).split(".")
    found = named(rendered(overlay), "Service", service)
    assert (pod, namespace) == (leader.pod_name, found["metadata"]["namespace"])
    assert found["spec"]["publishNotReadyAddresses"], "ranks meet before they are ready"
    assert manifest["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert manifest["spec"]["startupPolicy"] == "LeaderCreated", "ranks wait for each other"
    assert list(of_kind(rendered(overlay), "StatefulSet")) == [named(rendered(overlay), "StatefulSet", "nats")]


@pytest.mark.parametrize("overlay", sorted(GROUPED))
def test_a_groups_worker_waits_for_its_leaders_drain(overlay: str) -> None:
    manifest = named(rendered(overlay), "LeaderWorkerSet", "engine")
    leader, worker = Workload(manifest, "leader"), Workload(manifest, "worker")
    (stop,) = (each.spec["lifecycle"]["preStop"]["exec"]["command"] for each in worker.containers)
    port = leader.containers[0].ports["rendezvous"]
    assert stop == ["sh", "-c", f"python healthcheck.py {port} {UNTIL_LEADER_ENDS}$LWS_LEADER_ADDRESS"]
    assert leader.pod["terminationGracePeriodSeconds"] < LEADER_SECONDS


def test_the_patches_of_the_manual_do_what_it_says(tmp_path: Path, secrets: Path) -> None:
    """On engines of several pods, beside the other components and with images from a registry."""
    kustomization = {
        "namespace": "baton",
        "resources": ["base"],
        "components": [f"components/{name}" for name in ("nats", "leaderworkerset", "monitoring", "autoscaling")],
        "images": [{"name": "baton-worker", "newName": "registry.example.com/baton-worker", "newTag": "1"}],
        "patches": patches_of_the_manual("Engines of several pods"),
    }
    manifests = composed(tmp_path, kustomization)
    assert [problem for each in manifests for problem in violations(each)] == []
    groups = named(manifests, "LeaderWorkerSet", "engine")
    target = named(manifests, "ScaledObject", "engine")["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": groups["apiVersion"], "kind": "LeaderWorkerSet", "name": "engine"}
    assert "replicas" not in groups["spec"]
    for part in ("leader", "worker"):
        pod = Workload(groups, part)
        (rank,) = (each for each in pod.containers if each.name == "worker")
        assert rank.spec["image"] == "registry.example.com/baton-worker:1"
        config = configuration(manifests, pod, rank, secrets)
        assert isinstance(config, WorkerConfig)
        assert (config.world_size, config.pp) == (4, 2)


@POD_ENGINES
def test_an_engines_containers_name_each_other_and_share_the_arena(overlay: str, name: str, secrets: Path) -> None:
    engine = Workload(named(rendered(overlay), "StatefulSet", name))
    found = {each.name: configuration(overlay, engine, each, secrets) for each in engine.containers}
    scheduler, worker, store = (found[name] for name in ("scheduler", "worker", "kvstore"))
    assert isinstance(scheduler, SchedulerConfig)
    assert isinstance(worker, WorkerConfig)
    assert isinstance(store, KvStoreConfig)
    assert worker.engine == scheduler.instance == engine.pod_name
    assert scheduler.node == store.node
    assert worker.kvstore_dir == Path(store.directory)
    containers = {each.name: each for each in engine.containers}
    assert [each.sidecar for each in engine.containers] == [True, True, False]
    assert [each.name for each in engine.containers][-1] == "scheduler"
    limit = parse_bytes(engine.volumes["arena"]["emptyDir"]["sizeLimit"] + "B")
    assert engine.volumes["arena"]["emptyDir"]["medium"] == "Memory"
    assert store.kvstore_memory < limit
    for each in ("worker", "kvstore"):
        assert store.directory.startswith(f"{containers[each].mounts['arena']}/")
        assert parse_bytes(containers[each].spec["resources"]["limits"]["memory"] + "B") > limit, each


@EVERY_OVERLAY
def test_one_name_of_the_model_for_all(overlay: str, secrets: Path) -> None:
    found = [configuration(overlay, workload, each, secrets) for workload, each, _ in own_containers(overlay)]
    names = [each.model_name() for each in found if isinstance(each, ModelServiceConfig)]
    assert len(names) == (4 if overlay in GROUPED | POOLED else 3)
    assert len(set(names)) == 1


@EVERY_OVERLAY
def test_budgets_and_services_select_the_pods_of_one_workload(overlay: str) -> None:
    found = {workload.name: workload for workload in workloads(rendered(overlay))}
    for budget in of_kind(rendered(overlay), "PodDisruptionBudget"):
        selected = [each for each in found.values() if selects(budget["spec"]["selector"], each.labels)]
        assert {each.manifest["metadata"]["name"] for each in selected} == {budget["metadata"]["name"]}
    budgets = {each["metadata"]["name"] for each in of_kind(rendered(overlay), "PodDisruptionBudget")}
    assert budgets == {workload.manifest["metadata"]["name"] for workload, *_ in own_containers(overlay)}
    for service in of_kind(rendered(overlay), "Service"):
        selected_ones = [
            each for each in found.values() if selects({"matchLabels": service["spec"]["selector"]}, each.labels)
        ]
        assert selected_ones != []
        for port in service["spec"]["ports"]:
            for workload in selected_ones:
                declared = {key: value for each in workload.containers for key, value in each.ports.items()}
                assert port["targetPort"] in {*declared, *declared.values()}, title(service)
    for workload in found.values():
        if workload.part is None:
            assert selects(workload.manifest["spec"]["selector"], workload.labels)
        if workload.manifest["kind"] == "StatefulSet":
            assert named(rendered(overlay), "Service", workload.manifest["spec"]["serviceName"])


def test_monitors_find_every_metrics_port() -> None:
    manifests = rendered("gpu")
    scraped = set()
    for monitor in of_kind(manifests, "ServiceMonitor"):
        for service in of_kind(manifests, "Service"):
            if not selects(monitor["spec"]["selector"], service["metadata"].get("labels", {})):
                continue
            ports = {each["name"]: each["targetPort"] for each in service["spec"]["ports"]}
            wanted = [ports[each["port"]] for each in monitor["spec"]["endpoints"]]
            selector = {"matchLabels": service["spec"]["selector"]}
            scraped |= {(w.name, port) for w in workloads(manifests) if selects(selector, w.labels) for port in wanted}
    declared = {
        (workload.name, port)
        for workload, container, _ in own_containers("gpu")
        for name, port in container.ports.items()
        if name.startswith("metrics")
    }
    assert scraped == declared


def test_what_is_scaled_exists_and_has_no_number_of_its_own() -> None:
    scaled = {}
    for scaler in of_kind(rendered("gpu"), "HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        workload = named(rendered("gpu"), target["kind"], target["name"])
        assert "replicas" not in workload["spec"]
        assert workload["apiVersion"] == target["apiVersion"]
        scaled[target["name"]] = scaler["kind"]
    assert scaled == {
        "engine": "ScaledObject",
        "gateway": "HorizontalPodAutoscaler",
        "tokenizer": "HorizontalPodAutoscaler",
        "detokenizer": "HorizontalPodAutoscaler",
    }


def test_engines_are_scaled_by_metrics_that_schedulers_have() -> None:
    importlib.import_module("services.scheduler.metrics")
    known = {sample.name for family in service_registry("scheduler").collect() for sample in family.samples}
    (trigger,) = named(rendered("gpu"), "ScaledObject", "engine")["spec"]["triggers"]
    named_there = set(re.findall(r"baton_\w+", trigger["metadata"]["query"]))
    assert len(named_there) == 2
    assert named_there <= known


@EVERY_OVERLAY
def test_pods_keep_the_restricted_standard(overlay: str) -> None:
    pods = [(workload.name, workload.pod) for workload in workloads(rendered(overlay))]
    for name, pod in (*pods, ("model-loader", LOADER["spec"])):
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & pod.keys() == set()
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert {"memory"} <= container["resources"]["limits"].keys()
        kinds = {key for volume in pod["volumes"] for key in volume} - {"name"}
        assert kinds <= {"secret", "projected", "emptyDir", "persistentVolumeClaim"}
