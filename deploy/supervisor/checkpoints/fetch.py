"""A host without the model gets it from the hosts of its stack, into a folder of its run directory."""

from __future__ import annotations

import shutil
import ssl
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.supervisor.checkpoints.download import BUSY_SECONDS, RETRY_SECONDS, CheckpointDownload, DownloadFailed
from deploy.supervisor.checkpoints.manifest import (
    BadManifest,
    CheckpointManifest,
    Progress,
    keep_manifest,
    read_manifest,
    replace_file,
)
from deploy.supervisor.checkpoints.peers import OtherModel, PeerAddress, PeerBusy, PeerConnection, PeerFailed
from deploy.supervisor.spec import TlsFiles

SPARE_BYTES = 64 << 20
"""Of the disk, that stay free."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class FetchedModel:
    """Owns the folder `fetched` of a run directory: the model's files, what they are to be, and whether they all are
    there. It outlives the stack."""

    def __init__(self, run_dir: Path) -> None:
        self._root = run_dir.absolute() / "fetched"
        self.folder = self._root / "model"
        self._wanted = self._root / "manifest"
        self.stamps = run_dir.absolute() / "model-stamps"
        """What `manifest_of` keeps, so that this host can send the model on without reading it again."""
        self._complete = self._root / "complete"

    @property
    def is_complete(self) -> bool:
        """Whether all files were fetched and checked since the machine was started. What the disk had not got when it
        lost power is found by checking them again, so that nobody waits for the disk now."""
        wanted = self._known()
        if wanted is None or not self._complete.is_file() or self._complete.read_text() != _mark(wanted):
            return False
        paths = [(self.folder / each.name, each.size) for each in wanted.files]
        return all(path.is_file() and path.stat().st_size == size for path, size in paths)

    @property
    def is_wanted(self) -> bool:
        """Whether this host is one that gets the model from others."""
        return self._root.is_dir()

    def want(self) -> None:
        """This host is to get the model from others, and asks them what it is. What is here stays, and counts where it
        is the same. Raises OSError."""
        self._root.mkdir(parents=True, exist_ok=True)
        self._wanted.unlink(missing_ok=True)

    def discard(self) -> None:
        """This host has the model elsewhere. Raises OSError."""
        if self._root.is_dir():
            shutil.rmtree(self._root)

    def _known(self) -> CheckpointManifest | None:
        try:
            return read_manifest(self._wanted.read_bytes())
        except (OSError, BadManifest):
            return None

    def fetch(self, peers: Sequence[str], tls: TlsFiles, report: Progress) -> CheckpointDownload | None:
        """Fetches what is missing from hosts at HOST:PORT, the first of which says what the model is, if nothing was
        fetched before. None: nothing was missing. Raises DownloadFailed, OSError."""
        if self.is_complete:
            return None
        addresses = [PeerAddress.read(each) for each in peers]
        context = _tls(tls)
        wanted = self._known()
        if wanted is None:
            wanted = _manifest(addresses, context, report)
            replace_file(self._wanted, wanted.encoded())
        self.folder.mkdir(parents=True, exist_ok=True)
        self._tidy(wanted)
        here = sum(path.stat().st_blocks * 512 for path in self.folder.iterdir())
        free = shutil.disk_usage(self.folder).free
        if wanted.size - here + SPARE_BYTES > free:
            raise DownloadFailed(f"{self.folder}: {free >> 20} MiB are free, {wanted.size >> 20} MiB are needed")
        download = CheckpointDownload(self.folder, wanted, addresses, context)
        download.run(report)
        keep_manifest(self.folder, wanted, self.stamps)
        replace_file(self._complete, _mark(wanted).encode())
        return download

    def _tidy(self, wanted: CheckpointManifest) -> None:
        """Files of another model, or of an earlier version, go."""
        names = {each.name for each in wanted.files}
        for path in self.folder.iterdir():
            if path.name not in names:
                path.unlink()


def _mark(wanted: CheckpointManifest) -> str:
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{wanted.identity} {boot}"


def _tls(files: TlsFiles) -> ssl.SSLContext:
    """Shows this host's certificate, and checks the other's."""
    context = ssl.create_default_context(cafile=files.authority)
    assert files.certificate is not None, "a host that was let in has one"
    context.load_cert_chain(files.certificate, files.key)
    return context


def _manifest(addresses: Sequence[PeerAddress], tls: ssl.SSLContext, report: Progress) -> CheckpointManifest:
    """What the first host that answers says. Raises DownloadFailed."""
    problems = []
    for address in addresses:
        connection = PeerConnection(address, tls)
        deadline = time.monotonic() + BUSY_SECONDS
        try:
            while True:
                try:
                    return connection.manifest()
                except PeerBusy as error:
                    if time.monotonic() > deadline:
                        raise
                    report(f"{address}: {error}")
                    time.sleep(RETRY_SECONDS)
        except (PeerFailed, OtherModel, BadManifest) as error:
            problems.append(f"{address}: {error}")
        finally:
            connection.close()
    raise DownloadFailed(f"no host says what its model is ({'; '.join(problems) or 'none sends it'})")
