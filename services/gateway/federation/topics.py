"""Every subject between clusters, typed. They are on NATS servers of their own: whatever is said
on a stack's own bus cannot cross, and no process but a gateway has the password."""

from __future__ import annotations

from shared.ids import ClusterName, GatewayId
from shared.messages import federation, gateway, scheduler
from shared.messages.lifecycle import Service
from shared.permissions import Permissions
from shared.topics import Topic, inbox_prefix

FEDERATION = "federation"
USER: Service = "gateway"
"""The one user of a federation's NATS server."""


def cluster_statuses() -> Topic[federation.ClusterStatus]:
    """gateway → every gateway of every cluster: what its cluster can take. Once a second."""
    return Topic(f"{FEDERATION}.status", federation.ClusterStatus)


def cluster_requests(cluster: ClusterName) -> Topic[federation.ClusterRequest]:
    """gateway → one gateway of that cluster."""
    return Topic(f"{FEDERATION}.{cluster}.requests", federation.ClusterRequest, queue="gateways")


def cluster_switches(cluster: ClusterName) -> Topic[federation.SwitchCluster]:
    """gateway → every gateway of that cluster: drain, undrain."""
    return Topic(f"{FEDERATION}.{cluster}.switch", federation.SwitchCluster)


def relayed_output(cluster: ClusterName, instance: GatewayId) -> Topic[gateway.RequestMessage]:
    """gateway → the gateway of that cluster whose requests it serves: the output of these."""
    return Topic(f"{FEDERATION}.{cluster}.{instance}.deltas", gateway.RequestMessage)


def relay_control(cluster: ClusterName, instance: GatewayId) -> Topic[scheduler.Cancel]:
    """gateway → the gateway of that cluster that serves its request: nobody wants it any more."""
    return Topic(f"{FEDERATION}.{cluster}.{instance}.control", scheduler.Cancel)


def relay_probes(cluster: ClusterName, instance: GatewayId) -> Topic[scheduler.Probe]:
    """gateway → the gateway of that cluster that serves its request, answered with a `ProbeReply`."""
    return Topic(f"{FEDERATION}.{cluster}.{instance}.probe", scheduler.Probe)


def federation_permissions(cluster: ClusterName, namespace: str) -> Permissions:
    """What the gateways of a cluster may say and hear on its federation server: everything is said to a cluster by its
    name, and each hears only its own."""
    prefix = f"{namespace}.{FEDERATION}"
    return Permissions(
        publish=(
            f"{prefix}.status",
            *(f"{prefix}.*.{last}" for last in ("requests", "switch", "*.deltas", "*.control", "*.probe")),
        ),
        subscribe=(f"{prefix}.status", f"{prefix}.{cluster}.>", f"{inbox_prefix(USER)}.>"),
    )
