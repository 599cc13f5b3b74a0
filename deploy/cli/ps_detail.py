"""What `baton ps` says of engines, ranks and KV stores beyond what it says of everybody."""

from __future__ import annotations

from typing import Any

from shared.messages.lifecycle import Lifecycle, StoreReport


def detail(life: Lifecycle | None) -> dict[str, Any] | None:
    """For scripts; None where there is nothing special."""
    if life is not None and life.engine is not None:
        engine = life.engine
        return {
            "role": engine.role,
            "node": engine.node,
            "waiting": engine.waiting,
            "running": engine.running,
            "blocks_free": engine.blocks_free,
            "blocks_total": engine.blocks_total,
            "steps": engine.steps,
            "tokens": engine.tokens,
        }
    if life is not None and life.worker is not None:
        worker = life.worker
        return {"rank": worker.rank, "world_size": worker.world_size, "device": worker.device}
    return None if life is None or life.store is None else _store_detail(life.store)


def _store_detail(store: StoreReport) -> dict[str, Any]:
    asked = store.hits + store.misses
    return {
        "node": store.node,
        "blocks": store.committed,
        "slots": store.slots,
        "reserved": store.reserved,
        "pinned": store.pinned,
        "bytes_used": store.bytes_used,
        "bytes_total": store.bytes_total,
        "hits": store.hits,
        "misses": store.misses,
        "hit_rate": round(store.hits / asked, 4) if asked else None,
        "lower_hits": store.lower_hits,
    }


def sentence(detail: dict[str, Any] | None) -> str:
    """The same for people."""
    if detail is None:
        return ""
    if "running" in detail:
        return _engine_sentence(detail)
    if "slots" in detail:
        return _store_sentence(detail)
    return f"rank {detail['rank']} of {detail['world_size']} on {detail['device']}"


def _engine_sentence(detail: dict[str, Any]) -> str:
    where = f" at {detail['node']}" if detail["node"] else ""
    return (
        f"{detail['role']}{where}: {detail['running']} running, {detail['waiting']} waiting, "
        f"{detail['blocks_free']}/{detail['blocks_total']} blocks free"
    )


def _store_sentence(detail: dict[str, Any]) -> str:
    rate = "nothing asked yet" if detail["hit_rate"] is None else f"{detail['hit_rate']:.0%} hits"
    lower = f", {detail['lower_hits']} from below" if detail["lower_hits"] else ""
    pinned = f", {detail['pinned']} pinned" if detail["pinned"] else ""
    used, total = detail["bytes_used"] / 2**20, detail["bytes_total"] / 2**20
    return f"{detail['node']}: {used:.0f}/{total:.0f} MiB, {detail['blocks']} blocks{pinned}, {rate}{lower}"
