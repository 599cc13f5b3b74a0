"""deploy/kubernetes as `kubectl` renders it, and the schemas that an API server would hold it against."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from referencing import Registry, Resource

from tests.support.paths import REPOSITORY

Manifest = dict[str, Any]
FOLDER = REPOSITORY / "deploy" / "kubernetes"
KUBECTL = Path(sys.executable).with_name("kubectl")
RENDER_DEADLINE = 60.0
OVERLAYS = tuple(sorted(path.name for path in (FOLDER / "overlays").iterdir()))

KUBERNETES = "1.37.0"
"""The release whose schemas are used; they allow no field that it does not know."""
_SCHEMAS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{KUBERNETES}-local-strict"
_CUSTOM_SCHEMAS = Path(__file__).parent / "schemas"
"""Of KEDA 2.16.1 and Prometheus Operator 0.80.1, from the packages cloudcoil-models-keda and
cloudcoil-models-prometheus-operator on PyPI (`model_json_schema`); unknown fields are not allowed in them either. The
one of LeaderWorkerSet is written after its API's types (`leaderworkerset.x-k8s.io/v1`), with Kubernetes' own schema for
the pods in it."""
CUSTOM = {"keda.sh/v1alpha1", "leaderworkerset.x-k8s.io/v1", "monitoring.coreos.com/v1"}


@functools.cache
def rendered(overlay: str) -> tuple[Manifest, ...]:
    """All objects of an overlay, as `kubectl apply -k` would send them."""
    return rendered_folder(FOLDER / "overlays" / overlay)


def composed(folder: Path, kustomization: Mapping[str, Any]) -> tuple[Manifest, ...]:
    """All objects of a kustomization that is written into `folder`. Resources and components are named as in FOLDER."""
    there = os.path.relpath(FOLDER, folder)
    named_here = {key: [f"{there}/{each}" for each in kustomization[key]] for key in ("resources", "components")}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump({**kustomization, **named_here}))
    return rendered_folder(folder)


def rendered_folder(folder: Path) -> tuple[Manifest, ...]:
    """All objects of a kustomization. Fails where kustomize refuses it."""
    done = subprocess.run(
        [str(KUBECTL), "kustomize", str(folder)], capture_output=True, text=True, timeout=RENDER_DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def patches_of_the_manual(section: str) -> list[Manifest]:
    """Those that a section of docs/kubernetes.md shows."""
    page = (REPOSITORY / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    text = page.partition(f"### {section}\n")[2].partition("\n### ")[0]
    blocks = [yaml.safe_load(each) for each in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    return [patch for each in blocks for patch in (each["patches"] if isinstance(each, dict) else each)]


def of_kind(manifests: tuple[Manifest, ...], *kinds: str) -> Iterator[Manifest]:
    return (each for each in manifests if each["kind"] in kinds)


def named(manifests: tuple[Manifest, ...], kind: str, name: str) -> Manifest:
    (found,) = (each for each in of_kind(manifests, kind) if each["metadata"]["name"] == name)
    return found


def title(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


@functools.cache
def _registry() -> Registry[Any]:
    definitions = json.loads((_SCHEMAS / "_definitions.json").read_text())
    return Resource.from_contents(definitions) @ Registry()


@functools.cache
def _validator(kind: str, api: str) -> jsonschema.Draft202012Validator:
    if api in CUSTOM:
        schema = json.loads((_CUSTOM_SCHEMAS / f"{kind.lower()}.json").read_text())
        return jsonschema.Draft202012Validator(schema, registry=_registry())
    group, _, version = api.rpartition("/")
    file = "-".join(part for part in (kind.lower(), group.split(".")[0], version) if part)
    return jsonschema.Draft202012Validator(json.loads((_SCHEMAS / f"{file}.json").read_text()), registry=_registry())


def violations(manifest: Manifest) -> list[str]:
    """What its schema says against it. Raises FileNotFoundError where Kubernetes has no such kind."""
    errors = _validator(manifest["kind"], manifest["apiVersion"]).iter_errors(manifest)
    return [f"{title(manifest)}: {error.json_path}: {error.message}" for error in errors]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """A label selector with matchLabels and matchExpressions (In alone); an empty one selects all."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}, selector
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return True
