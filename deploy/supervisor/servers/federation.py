"""The NATS server on which a stack's gateways meet those of other clusters: joined with theirs by NATS gateways, over
TLS. The stack's own bus is another server (ADR 42)."""

from __future__ import annotations

import hmac
import json
import time
from pathlib import Path

from deploy.supervisor.log_files import LogFolder
from deploy.supervisor.processes import ChildProcesses
from deploy.supervisor.servers.nats import NatsServerUnavailable, find_binary
from deploy.supervisor.servers.nats_config import MAX_PAYLOAD, user_block
from deploy.supervisor.servers.server_process import HOST, ServerNotStarted, ServerProcess, free_port
from deploy.supervisor.spec import FEDERATION_FOLDER, FederationSpec, StackSpec, TlsFiles
from deploy.supervisor.state_file import StackState
from services.gateway.federation.topics import USER, federation_permissions
from shared.private_files import PRIVATE_FOLDER, write_private

NAME = "federation-server"
PEER_USER = "cluster"
PING_SECONDS = 2
"""A link over which nothing comes back for three times as long is closed, and made anew for ever."""


class FederationFolder:
    """Owns the folder `federation` of a run directory: this cluster's certificate, and the authority's.

    The authority's key is derived from the secret that all clusters share, so each signs its own certificate, and all
    accept it: nobody has to be asked, and none has to be there first.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir.absolute() / FEDERATION_FOLDER

    @property
    def tls(self) -> TlsFiles:
        """This cluster's certificate, its key, and what others' are checked with."""
        names = (str(self.path / name) for name in ("ca.pem", "cluster.pem", "cluster.key"))
        authority, certificate, key = names
        return TlsFiles(authority=authority, certificate=certificate, key=key)

    def prepare(self, spec: FederationSpec) -> TlsFiles:
        """Makes the files for `spec`. Raises OSError."""
        from deploy.supervisor.cluster import certificates  # 5 MB that stacks without a federation do without

        self.path.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
        authority_key = certificates.derived_key(spec.secret.encode(), b"authority of a federation")
        authority = certificates.new_authority(authority_key, "baton clusters")
        key = certificates.new_key()
        request = certificates.signing_request(key, spec.cluster)
        signed = certificates.signed(request, spec.cluster, spec.host, authority, authority_key)
        files = self.tls
        for path, content in ((files.authority, authority), (files.certificate, signed), (files.key, key)):
            assert path is not None
            write_private(Path(path), content)
        return files


def federation_config(spec: FederationSpec, namespace: str, port: int, tls: TlsFiles, password: str) -> str:
    """A nats-server's configuration: gateways of this cluster on loopback, other clusters at the advertised address.

    Its name among the others is that address, which no other has; the clusters' own names are in what they say.
    """
    peers = hmac.digest(spec.secret.encode(), b"gateway of a nats-server", "sha256").hex()
    others = "".join(
        f"    {{ name: {json.dumps(each)}, urls: [{json.dumps(f'nats://{PEER_USER}:{peers}@{each}')}] }}\n"
        for each in spec.others
    )
    return (
        f'host: "{HOST}"\n'
        f"port: {port}\n"
        f"max_payload: {MAX_PAYLOAD}\n"
        'write_deadline: "5s"\n'
        f'ping_interval: "{PING_SECONDS}s"\n'
        f"server_name: {json.dumps(spec.address)}\n"
        "gateway {\n"
        f"  name: {json.dumps(spec.address)}\n"
        f"  host: {json.dumps(spec.host)}\n"
        f"  port: {spec.port}\n"
        f"  advertise: {json.dumps(spec.address)}\n"
        f"  authorization {{ user: {PEER_USER}, password: {json.dumps(peers)}, timeout: 5 }}\n"
        f"  tls {{ cert_file: {json.dumps(tls.certificate)}, key_file: {json.dumps(tls.key)}, "
        f"ca_file: {json.dumps(tls.authority)}, verify: true, timeout: 5 }}\n"
        f"  gateways: [\n{others}  ]\n"
        "}\n"
        f"authorization {{\n  users: [\n"
        f"{user_block(USER, json.dumps(password), federation_permissions(spec.cluster, namespace))}\n  ]\n}}\n"
    )


class FederationServer:
    """Owns the server's address, credentials and configuration; nothing in a stack that is in no federation."""

    def __init__(self, spec: StackSpec) -> None:
        self._spec = spec
        self.process: ServerProcess | None = None
        self.port: int | None = None

    @property
    def url(self) -> str | None:
        """Where this stack's gateways reach it, their password included; None where there is none."""
        if self.port is None:
            return None
        return f"nats://{USER}:{self._password}@{HOST}:{self.port}"

    @property
    def _password(self) -> str:
        """Derived, so that the gateways of a stack that is taken over keep theirs."""
        assert self._spec.federation is not None
        return hmac.digest(self._spec.federation.secret.encode(), b"a gateway process", "sha256").hex()

    async def start(self, children: ChildProcesses, logs: LogFolder, former: StackState | None) -> None:
        """Returns once it listens. Raises NatsServerUnavailable, OSError."""
        federation = self._spec.federation
        if federation is None:
            return
        self.port = (former.federation_port if former else None) or free_port()
        config = self._spec.run_dir / FEDERATION_FOLDER / "nats.conf"
        self.process = ServerProcess(NAME, [str(find_binary()), "-c", str(config)], (HOST, self.port), children, logs)
        if not self.process.is_adopted:
            tls = FederationFolder(self._spec.run_dir).prepare(federation)
            text = federation_config(federation, self._spec.namespace, self.port, tls, self._password)
            write_private(config, text.encode())
        try:
            await self.process.start(time.monotonic())
        except ServerNotStarted as error:
            raise NatsServerUnavailable(str(error)) from None

    async def end(self) -> None:
        """Ends the server, where there is one."""
        if self.process is not None:
            await self.process.end()
