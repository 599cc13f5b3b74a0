"""Pods as the manifests describe them, with what the image of each container brings along."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from tests.support.kubernetes.manifests import Manifest, named, of_kind
from tests.support.paths import REPOSITORY

NAMESPACE = "baton"
"""That of the overlays."""


class Image(NamedTuple):
    """What an image of deploy/Dockerfile runs, and with which variables."""

    entrypoint: tuple[str, ...]
    environment: Mapping[str, str]


@functools.cache
def images() -> Mapping[str, Image]:
    """By target of deploy/Dockerfile: those that run something."""
    text = (REPOSITORY / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
    found: dict[str, Image] = {}
    target = ""
    for line in text.splitlines():
        if start := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            target = start[2]
            found[target] = found.get(start[1], Image((), {}))
        elif line.startswith("ENV "):
            own = dict(each.split("=", 1) for each in shlex.split(line.removeprefix("ENV ")))
            found[target] = found[target]._replace(environment={**found[target].environment, **own})
        elif line.startswith("ENTRYPOINT "):
            found[target] = found[target]._replace(entrypoint=tuple(json.loads(line.removeprefix("ENTRYPOINT "))))
    return {name: image for name, image in found.items() if image.entrypoint}


class Container(NamedTuple):
    """One container of a pod. A sidecar starts before, and ends after, those that are none."""

    spec: Manifest
    sidecar: bool
    injected: Mapping[str, str] = {}
    """Variables that a controller writes into it, before its own."""

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    @property
    def target(self) -> str | None:
        """The target of deploy/Dockerfile that its image was built from; None for images of others."""
        name = str(self.spec["image"]).rpartition("/")[2].partition(":")[0]
        return name.removeprefix("baton-") if name.startswith("baton-") else None

    @property
    def ports(self) -> Mapping[str, int]:
        return {each["name"]: each["containerPort"] for each in self.spec.get("ports", ())}

    @property
    def mounts(self) -> Mapping[str, str]:
        """Volume → path."""
        return {each["name"]: each["mountPath"] for each in self.spec.get("volumeMounts", ())}

    def environment(self, pod: str, manifests: tuple[Manifest, ...]) -> dict[str, str]:
        """What it finds in a pod of this name: the image's variables, a controller's, then its own."""
        target = self.target
        found = dict(images()[target].environment) if target is not None else {}
        found |= self.injected
        for each in self.spec.get("env", ()):
            found[each["name"]] = _value(each, found, pod, manifests)
        return found


def _value(entry: Manifest, before: Mapping[str, str], pod: str, manifests: tuple[Manifest, ...]) -> str:
    match entry.get("valueFrom"):
        case None:
            return re.sub(r"\$\((\w+)\)", lambda name: before[name[1]], entry["value"])
        case {"fieldRef": {"fieldPath": "metadata.name"}}:
            return pod
        case {"fieldRef": {"fieldPath": "metadata.namespace"}}:
            return NAMESPACE
        case {"fieldRef": {"fieldPath": "metadata.annotations['leaderworkerset.sigs.k8s.io/leader-name']"}}:
            return pod.rpartition("-")[0]
        case {"configMapKeyRef": {"name": name, "key": key}}:
            return str(named(manifests, "ConfigMap", name)["data"][key])
        case other:
            raise AssertionError(f"{entry['name']}: {other}")


class Workload(NamedTuple):
    """A Deployment, a StatefulSet, or one of the two kinds of pods of a LeaderWorkerSet."""

    manifest: Manifest
    part: Literal["leader", "worker"] | None = None
    """Of a LeaderWorkerSet."""

    @property
    def name(self) -> str:
        """The object's; a worker's with `-worker` behind it."""
        return str(self.manifest["metadata"]["name"]) + "-worker" * (self.part == "worker")

    @property
    def template(self) -> Manifest:
        spec = self.manifest["spec"]
        template: Manifest = (
            spec["template"] if self.part is None else spec["leaderWorkerTemplate"][f"{self.part}Template"]
        )
        return template

    @property
    def labels(self) -> Mapping[str, str]:
        labels: Mapping[str, str] = self.template["metadata"]["labels"]
        return labels

    @property
    def pod(self) -> Manifest:
        spec: Manifest = self.template["spec"]
        return spec

    @property
    def pod_name(self) -> str:
        """One such as Kubernetes gives its pods: of the first group, the first worker."""
        match self.manifest["kind"], self.part:
            case "LeaderWorkerSet", "worker":
                return f"{self.manifest['metadata']['name']}-0-1"
            case "StatefulSet" | "LeaderWorkerSet", _:
                return f"{self.name}-0"
            case _:
                return f"{self.name}-6b7f9c6d5-x2x4z"

    @property
    def injected(self) -> Mapping[str, str]:
        """What the LeaderWorkerSet controller writes into every container of this pod."""
        if self.part is None:
            return {}
        name, namespace = self.manifest["metadata"]["name"], self.manifest["metadata"]["namespace"]
        return {
            "LWS_LEADER_ADDRESS": f"{name}-0.{name}.{namespace}",
            "LWS_GROUP_SIZE": str(self.manifest["spec"]["leaderWorkerTemplate"]["size"]),
            "LWS_WORKER_INDEX": "0" if self.part == "leader" else "1",
        }

    @property
    def containers(self) -> tuple[Container, ...]:
        """In the order in which they start."""
        first, main = self.pod.get("initContainers", ()), self.pod["containers"]
        assert all(each["restartPolicy"] == "Always" for each in first)
        return (
            *(Container(each, True, self.injected) for each in first),
            *(Container(each, False, self.injected) for each in main),
        )

    @property
    def volumes(self) -> Mapping[str, Mapping[str, Any]]:
        return {each["name"]: each for each in self.pod.get("volumes", ())}


def workloads(manifests: tuple[Manifest, ...]) -> Iterator[Workload]:
    yield from map(Workload, of_kind(manifests, "Deployment", "StatefulSet"))
    for each in of_kind(manifests, "LeaderWorkerSet"):
        yield Workload(each, "leader")
        yield Workload(each, "worker")


def secrets_of(volume: Mapping[str, Any]) -> list[str]:
    """The names of the Secrets in a volume."""
    sources = volume["projected"]["sources"] if "projected" in volume else [volume]
    each = [source["secret"] for source in sources if "secret" in source]
    return [secret.get("name") or secret["secretName"] for secret in each]
