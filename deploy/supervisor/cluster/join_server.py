"""The first host's door: lets hosts in that have a token, and says clearly why it does not let others in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Mapping
from typing import Protocol, assert_never

import msgspec

from deploy.supervisor.checkpoints.peers import PeerAddress
from deploy.supervisor.cluster.admission import (
    REACHED_IN,
    AdmissionRules,
    ClusterMember,
    join_refusal,
    shared_settings,
    token_refusal,
    unreachable,
)
from deploy.supervisor.cluster.certificates import BadSigningRequest
from deploy.supervisor.cluster.folder import ClusterFolder
from deploy.supervisor.cluster.messages import (
    EXCHANGE_SECONDS,
    MAX_LINE,
    AuthorityReply,
    AuthorityRequest,
    FederationMembership,
    JoinAnswer,
    JoinMessage,
    JoinRefusal,
    JoinRequest,
    StackFacts,
    StackMembership,
    StackQuery,
)
from deploy.supervisor.cluster.model_fingerprint import model_fingerprint
from deploy.supervisor.launch import EVERY_SERVICE, configured_block_size
from deploy.supervisor.spec import ClusterSpec, OutsideRedis, StackSpec
from shared.ids import NodeId
from shared.packing import NOT_DECODED

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
"""At a time; more are closed at once."""
LISTEN_AGAIN = 2.0
"""Seconds until the port is tried again where it cannot be had."""


class AliveHosts(Protocol):
    """The other hosts that are heard of just now."""

    def addresses(self) -> Mapping[NodeId, str]:
        """Where each is."""

    def model_servers(self) -> tuple[str, ...]:
        """HOST:PORT where they send their model."""


class JoinServer:
    """Owns who is let in. The stack serves the same with or without it."""

    def __init__(self, spec: StackSpec, cluster: ClusterSpec, alive: AliveHosts) -> None:
        self._spec, self._cluster, self._alive = spec, cluster, alive
        self._folder = ClusterFolder(spec.run_dir)
        self._dummy = spec.settings.get("worker", {}).get("load_format") == "dummy"
        self._rules: AdmissionRules
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._connections = 0
        self._admitting = asyncio.Lock()

    async def run(self) -> None:
        """Lets hosts in until cancelled. Where that is not possible, as the port is taken, it is tried again."""
        address, port = self._cluster.address, self._cluster.join_port
        while True:
            try:
                await self._prepare()
                async with await asyncio.start_server(self._serve, address, port, limit=MAX_LINE) as server:
                    await server.serve_forever()
            except OSError as error:
                log.error("no host can join", extra={"address": f"{address}:{port}", "error": str(error)})
                await asyncio.sleep(LISTEN_AGAIN)

    async def _prepare(self) -> None:
        model = await asyncio.to_thread(model_fingerprint, self._spec.model, weights=not self._dummy)
        self._rules = AdmissionRules(
            node=self._cluster.node,
            address=self._cluster.address,
            model=model,
            block_size=configured_block_size(self._spec),
        )
        files = self._folder.tls
        assert files.certificate is not None, "made when the bus was started"
        self._tls.load_cert_chain(files.certificate, files.key)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= MAX_CONNECTIONS:
                async with asyncio.timeout(EXCHANGE_SECONDS):
                    await writer.start_tls(self._tls)  # here, so that who never gets as far is counted, too
                    answer = await self._answer(await reader.readline())
                    writer.write(msgspec.json.encode(answer) + b"\n")
                    await writer.drain()
        except (OSError, TimeoutError, ValueError) as error:  # ValueError: a line that is too long
            log.warning("host that did not finish what it said", extra={"error": repr(error)})
        finally:
            self._connections -= 1
            writer.close()
            with contextlib.suppress(OSError, ssl.SSLError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await writer.wait_closed()

    async def _answer(self, line: bytes) -> JoinAnswer:
        try:
            message = msgspec.json.decode(line, type=JoinMessage)
        except NOT_DECODED as error:
            return JoinRefusal("release", str(error), "what a host says to join has another form here")
        match message:
            case AuthorityRequest():
                return AuthorityReply(self._folder.authority.decode())
            case StackQuery():
                return self._token_refusal(message) or self._facts()
            case JoinRequest():
                if (refused := self._token_refusal(message)) is not None:
                    return refused
                async with self._admitting:  # one at a time: two hosts may want one name
                    return await self._admitted(message)
            case _:
                assert_never(message)

    def _token_refusal(self, message: StackQuery | JoinRequest) -> JoinRefusal | None:
        state = self._folder.tokens.state_of(message.token.id, message.token.secret, time.time())
        return token_refusal(state, message.token.id, self._cluster.node)

    def _facts(self) -> StackFacts:
        named = self._spec.name, self._cluster.node, self._spec.served_model_name
        sends = self._cluster.model_port > 0
        return StackFacts(
            time.time(),
            *named,
            str(self._spec.model),
            dummy_weights=self._dummy,
            sends_model=sends,
            block_size=self._rules.block_size,
        )

    async def _admitted(self, request: JoinRequest) -> StackMembership | JoinRefusal:
        try:
            members = self._folder.members()
            refused = join_refusal(request, self._rules, members, self._alive.addresses())
            refused = refused or await self._unreachable_refusal(request)
            if refused is not None:
                log.warning("host refused", extra={"node": request.node[:64], "reason": str(refused)})
                return refused
            certificate = self._folder.signed(request.signing_request.encode(), request.node, request.address)
            node = NodeId(request.node)
            answer = self._membership(certificate, {name: each for name, each in members.items() if name != node})
            self._folder.add_member(node, ClusterMember(request.address, request.route_port))
        except BadSigningRequest as error:
            return JoinRefusal("signing request", f"of {request.node}", str(error))
        except OSError as error:
            return JoinRefusal("first host", self._cluster.node, f"it can let nobody in just now: {error}")
        log.info("host let in", extra={"node": node, "address": request.address})
        return answer if request.gateways else msgspec.structs.replace(answer, api_keys=())

    async def _unreachable_refusal(self, request: JoinRequest) -> JoinRefusal | None:
        """Whether the host can be reached where it says that it is."""
        try:
            async with asyncio.timeout(REACHED_IN):
                _, writer = await asyncio.open_connection(request.address, request.route_port)
        except TimeoutError:
            return unreachable(request, self._cluster.node, f"no answer within {REACHED_IN:g} s")
        except OSError as error:
            return unreachable(request, self._cluster.node, error.strerror or str(error))
        writer.close()
        return None

    def _membership(self, certificate: bytes, others: Mapping[NodeId, ClusterMember]) -> StackMembership:
        spec, outside = self._spec, self._spec.outside_bus
        own = ClusterMember(self._cluster.address, self._cluster.route_port)
        alive = [each.route for node, each in others.items() if node in self._alive.addresses()]
        redis = spec.store.redis
        return StackMembership(
            name=spec.name,
            first=f"{self._cluster.node} at {self._cluster.address}",
            namespace=spec.namespace,
            served_model_name=spec.served_model_name,
            model=str(spec.model),
            certificate=certificate.decode(),
            secret=self._folder.secret,
            routes=(own.route, *(each.route for each in others.values())),
            reachable=(own.route, *alive) if outside is None else (),
            settings=shared_settings(_with_block_size(spec.settings, self._rules.block_size)),
            counts=spec.counts,
            pp_layers=spec.pp_layers,
            outside_bus=outside.urls if outside is not None else (),
            redis_url=redis.url if isinstance(redis, OutsideRedis) else None,
            api_keys=spec.api_keys,
            keys_file="keys_file" in spec.settings.get("gateway", {}),
            tls="ssl_certfile" in spec.settings.get("gateway", {}),
            drain_timeout=spec.drain_timeout,
            orphan_timeout=spec.orphan_timeout,
            fingerprint=self._rules.model,
            model_servers=(*self._own_model_server(), *self._alive.model_servers()),
            federation=self._federation(),
        )

    def _federation(self) -> FederationMembership | None:
        spec = self._spec.federation
        if spec is None:
            return None
        return FederationMembership(
            cluster=spec.cluster,
            address=spec.cluster_address,
            port=spec.port,
            others=spec.others,
            secret=spec.secret,
            model=spec.model,
        )

    def _own_model_server(self) -> tuple[str, ...]:
        port = self._cluster.model_port
        return (str(PeerAddress(self._cluster.address, port)),) if port else ()


def _with_block_size(settings: Mapping[str, Mapping[str, str]], block_size: int) -> dict[str, Mapping[str, str]]:
    """It may stand in this host's file or environment, which the other host does not have."""
    return {**settings, EVERY_SERVICE: {**settings.get(EVERY_SERVICE, {}), "block_size": str(block_size)}}
