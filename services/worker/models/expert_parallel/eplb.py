"""Which replicas of experts go where, given how often each is chosen: DeepSeek's Expert Parallelism Load Balancer.

The algorithm is that of https://github.com/deepseek-ai/EPLB (hierarchical load balancing): groups of experts are packed
to nodes, experts are replicated within each node, and the replicas are packed to the node's GPUs. Where groups do not
divide over nodes, all experts are one group on one node (global load balancing). No torch.
"""

from __future__ import annotations

from collections.abc import Sequence


def rebalance_experts(load: Sequence[float], replicas: int, groups: int, nodes: int, gpus: int) -> list[int]:
    """`load`: how often each expert of a layer is chosen → the expert of each of `replicas` places; the places are
    those of the first GPU, then of the second, as many on each. Every expert has one place at the least.

    `groups`: the experts are so many groups of neighbours. `gpus` divide over `nodes`, and `replicas`, of which there
    are no fewer than experts, over `gpus`. Raises ValueError where they do not."""
    experts = len(load)
    if replicas < experts or replicas % gpus or gpus % nodes or experts % groups:
        raise ValueError(f"{replicas} replicas of {experts} experts in {groups} groups, {nodes} nodes, {gpus} GPUs")
    if groups % nodes:
        groups = nodes = 1
    size = experts // groups
    group_loads = [sum(load[first : first + size]) for first in range(0, experts, size)]
    places = []
    for node in pack_evenly(group_loads, nodes):
        numbers = [group * size + index for group in node for index in range(size)]
        copies = replicate([load[number] for number in numbers], replicas // nodes)
        shares = [load[numbers[copy]] / copies.count(copy) for copy in copies]
        for gpu in pack_evenly(shares, gpus // nodes):
            places += [numbers[copies[item]] for item in gpu]
    return places


def pack_evenly(weights: Sequence[float], packs: int) -> list[list[int]]:
    """The items of each of `packs` packs, as many in each: from the heaviest on, each item goes to the lightest pack
    that has room. Where a pack holds one item, the first has the first."""
    each = len(weights) // packs
    if each == 1:
        return [[item] for item in range(packs)]
    packed: list[list[int]] = [[] for _ in range(packs)]
    heavy = [0.0] * packs
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        lightest = min((pack for pack in range(packs) if len(packed[pack]) < each), key=heavy.__getitem__)
        packed[lightest].append(item)
        heavy[lightest] += weights[item]
    return packed


def replicate(load: Sequence[float], places: int) -> list[int]:
    """The item of each of so many places: every item has one, and each further place is for the item whose replicas
    have the most to do."""
    items = list(range(len(load)))
    counts = [1] * len(load)
    for _ in range(places - len(load)):
        busiest = max(range(len(load)), key=lambda item: load[item] / counts[item])
        items.append(busiest)
        counts[busiest] += 1
    return items
