"""Where a host that joins has its model from: its own disk, the hosts of the stack, or the Hugging Face hub."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Literal

from deploy.errors import CommandError
from deploy.model_choice import DEMO_NAME
from deploy.supervisor.checkpoints.download import DownloadFailed
from deploy.supervisor.checkpoints.fetch import FetchedModel
from deploy.supervisor.cluster.admission import model_difference
from deploy.supervisor.cluster.folder import ClusterFolder
from deploy.supervisor.cluster.messages import HostMembership, StackFacts, StackMembership
from deploy.supervisor.cluster.model_fingerprint import model_fingerprint
from shared.models.model_files import ModelNotFound, resolve_model

ModelSource = Literal["auto", "peers", "local"]
_HUB_SNAPSHOT = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]+)/?$")


def comes_from_peers(source: ModelSource, typed: str | None, facts: StackFacts) -> bool:
    """Whether a host is to get its model from those of the stack. `typed` is --model. Raises CommandError."""
    if source == "peers":
        if typed is not None:
            raise CommandError(f"--model {typed}: with --model-source peers the model is the stack's", status=2)
        if not facts.sends_model:
            raise CommandError(f"--model-source peers: {facts.node} sends its model to nobody (--model-port)", status=2)
        return True
    has_it = typed is not None or (Path(facts.model) / "config.json").is_file() or facts.served_model_name == DEMO_NAME
    return source == "auto" and facts.sends_model and not facts.dummy_weights and not has_it


def fetched_model(host: HostMembership, run_dir: Path) -> Path | None:
    """The folder with the model that hosts of the stack have sent, now or before; None where this host is not one that
    gets it so. Where nobody sends it, the hub's, if the first host has it from there. Raises CommandError."""
    fetched, stack = FetchedModel(run_dir), host.stack
    if not fetched.is_wanted:
        return None
    try:
        began = time.monotonic()
        done = fetched.fetch(stack.model_servers, ClusterFolder(run_dir).tls, _show)
        folder = fetched.folder
        if done is not None:
            _show(f"{done.fetched / 2**20:.0f} MiB in {time.monotonic() - began:.1f} s, {done.found >> 20} were here")
    except DownloadFailed as error:
        folder = _from_hub(stack, error)
    except OSError as error:
        raise CommandError(f"{error.filename or fetched.folder}: {error.strerror or error}") from None
    _check_same(folder, stack)
    return folder


def _show(words: str) -> None:
    print(f"model: {words}", flush=True)


def _from_hub(stack: StackMembership, why: DownloadFailed) -> Path:
    found = _HUB_SNAPSHOT.search(stack.model)
    if found is None:
        raise CommandError(f"--model: {why}; baton join, without a token, goes on with what is here") from None
    repository = f"{found[1]}/{found[2]}@{found[3]}"
    _show(f"{why}; {repository} from the Hugging Face hub instead")
    try:
        return resolve_model(repository, weights=True)
    except ModelNotFound as error:
        raise CommandError(f"--model: {why}; {error}") from None


def _check_same(folder: Path, stack: StackMembership) -> None:
    """Whoever sent it: it is what the first host serves. Raises CommandError."""
    if stack.fingerprint is None:
        return
    try:
        weights = stack.settings.get("worker", {}).get("load_format") != "dummy"
        refused = model_difference(model_fingerprint(folder, weights=weights), stack.fingerprint, stack.first)
    except OSError as error:
        raise CommandError(f"--model {folder}: {error}") from None
    if refused is not None:
        raise CommandError(f"{refused} ({folder})")
