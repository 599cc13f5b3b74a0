"""The folder `cluster` of a run directory: what makes a host a part of a stack of several. It outlives the stack."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from deploy.supervisor.cluster.admission import ClusterMember
from deploy.supervisor.cluster.messages import HostMembership
from deploy.supervisor.cluster.tokens import DEFAULT_LIFETIME, JoinToken, TokenFile
from deploy.supervisor.spec import TlsFiles
from shared.ids import NodeId
from shared.packing import NOT_DECODED
from shared.private_files import PRIVATE_FOLDER, replace_private

NAME = "cluster"
ROUTE_USER = "route"


class NotAMember(Exception):
    """The folder does not say of which stack this host is a part."""


class ClusterFolder:
    """Owns the folder. All files in it are the user's alone."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir.absolute() / NAME
        self.tokens = TokenFile(self.path / "tokens.json")
        self._authority, self._authority_key = self.path / "ca.pem", self.path / "ca.key"
        self._certificate, self._key = self.path / "host.pem", self.path / "host.key"
        self._secret, self._members = self.path / "secret", self.path / "members.json"
        self._membership = self.path / "membership.json"

    @property
    def tls(self) -> TlsFiles:
        """This host's certificate, its key, and what others' are checked with."""
        return TlsFiles(authority=str(self._authority), certificate=str(self._certificate), key=str(self._key))

    @property
    def authority(self) -> bytes:
        """The authority's certificate, as PEM. Raises OSError."""
        return self._authority.read_bytes()

    @property
    def secret(self) -> str:
        """What the passwords on the bus are derived from. Raises OSError."""
        return self._secret.read_text()

    @property
    def route_credentials(self) -> tuple[str, str]:
        """User and password by which nats-servers let each other in. Raises OSError."""
        return ROUTE_USER, hmac.digest(self.secret.encode(), b"route of a nats-server", "sha256").hex()

    # ---- the first host

    def prepare_first(self, node: NodeId, address: str) -> None:
        """Makes what is missing for a host that others join at `address`; what is there stays, so that they come back
        after it was away. Raises OSError."""
        from deploy.supervisor.cluster import certificates

        self.path.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
        if not self._secret.is_file():
            self._write(self._secret, secrets.token_urlsafe(32).encode())
        if not (self._authority.is_file() and self._authority_key.is_file()):
            key = certificates.new_key()
            self._write(self._authority_key, key)
            self._write(self._authority, certificates.new_authority(key))
            self._certificate.unlink(missing_ok=True)
        if not self._certificate.is_file() or not certificates.is_for(self._certificate.read_bytes(), address):
            key = certificates.new_key()
            certificate = self.signed(certificates.signing_request(key, node), node, address)
            self._write(self._key, key)
            self._write(self._certificate, certificate)

    def signed(self, request: bytes, node: str, address: str) -> bytes:
        """A host's certificate. Raises BadSigningRequest, OSError."""
        from deploy.supervisor.cluster import certificates

        return certificates.signed(request, node, address, self.authority, self._authority_key.read_bytes())

    def new_token(self, address: str, port: int, now: float, lifetime: float = DEFAULT_LIFETIME) -> JoinToken:
        """A token by which hosts join. Raises OSError, ValueError."""
        from deploy.supervisor.cluster import certificates

        identity, secret = self.tokens.issue(now, lifetime)
        return JoinToken(address, port, certificates.fingerprint(self.authority), identity, secret)

    def members(self) -> Mapping[NodeId, ClusterMember]:
        """Hosts that were let in, by name. Raises OSError."""
        try:
            return msgspec.json.decode(self._members.read_bytes(), type=dict[NodeId, ClusterMember])
        except FileNotFoundError:
            return {}
        except NOT_DECODED as error:
            raise OSError(f"{self._members}: {error}") from None

    def add_member(self, node: NodeId, member: ClusterMember) -> None:
        """Remembers a host that was let in. Raises OSError."""
        self._write(self._members, msgspec.json.encode({**self.members(), node: member}))

    # ---- a host that joined

    def keep_membership(self, membership: HostMembership, authority: bytes, key: bytes) -> None:
        """Writes down what the first host answered. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
        self._write(self._authority, authority)
        self._write(self._key, key)
        self._write(self._certificate, membership.stack.certificate.encode())
        self._write(self._secret, membership.stack.secret.encode())
        self._write(self._membership, msgspec.json.format(msgspec.json.encode(membership)))

    def membership(self) -> HostMembership:
        """What this host is a part of. Raises NotAMember."""
        try:
            return msgspec.json.decode(self._membership.read_bytes(), type=HostMembership)
        except FileNotFoundError:
            raise NotAMember(f"{self.path} names no stack") from None
        except (*NOT_DECODED, OSError) as error:
            raise NotAMember(f"{self._membership}: {error}") from None

    def _write(self, path: Path, content: bytes) -> None:
        """Readers see the old file or the new one."""
        replace_private(path, content)
