"""What a gateway's settings say of its part in a federation."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from services.gateway.core.remote_clusters import OwnCluster
from shared.bus.nats_connection import NatsOptions
from shared.ids import MAX_ID, ClusterName, GatewayId, Incarnation, relay_id


class FederationSettings(NamedTuple):
    """As they were given: `check` says whether they go together."""

    instance: str
    namespace: str
    cluster: str | None
    url: str | None
    """None: it has no part in any."""
    address: str
    model: str
    """Fingerprint, in hexadecimal."""
    block_size: int

    def check(self) -> None:
        """Raises ValueError."""
        if self.cluster is not None:
            try:
                msgspec.convert(self.cluster, ClusterName)
            except msgspec.ValidationError:
                raise ValueError(f"cluster {self.cluster!r}: 1 to 24 of A-Z a-z 0-9 - are allowed") from None
            if len(relay_id(ClusterName(self.cluster), GatewayId(self.instance))) > MAX_ID:
                raise ValueError(f"instance {self.instance}: with the cluster's name more than {MAX_ID} characters")
        if self.url is not None:
            if self.cluster is None or not self.address:
                raise ValueError("federation_url: cluster and federation_address are needed, too")
            url = urlsplit(self.url)
            if url.scheme not in ("nats", "tls") or not url.hostname:
                raise ValueError("federation_url: nats://USER:PASSWORD@HOST:PORT is expected")

    def own_cluster(self, incarnation: Incarnation) -> OwnCluster | None:
        """Returns what the gateway says of its cluster; None where it is in no federation."""
        if self.url is None or self.cluster is None:
            return None
        fingerprint = bytes.fromhex(self.model)
        name, gateway = ClusterName(self.cluster), GatewayId(self.instance)
        return OwnCluster(name, self.address, gateway, incarnation, fingerprint, self.block_size)

    def nats_options(self) -> NatsOptions:
        """Returns how the federation's NATS server is reached, where there is one."""
        url = urlsplit(self.url or "")
        address = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
        return NatsOptions(
            servers=(address,),
            namespace=self.namespace,
            name=self.instance,
            user=url.username,
            password=url.password,
        )
