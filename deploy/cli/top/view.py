"""The figures of `baton top` as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shared.telemetry.stack_figures import EngineFigures, Figures, OtherFigures, RankFigures, StoreFigures

BAR = 16
_STYLES = {"ready": "green", "draining": "cyan", "failed": "red", "stopped": "dim"}


def view(title: str, found: Figures) -> RenderableType:
    """The figures as tables below a title; what a stack does not have is left out."""
    parts: list[RenderableType] = [_summary(title, found), Text(), _engines(found.engines)]
    ranks = [rank for engine in found.engines for rank in engine.ranks]
    if ranks:
        parts += [Text(), _ranks(ranks)]
    if found.stores:
        parts += [Text(), _stores(found.stores)]
    if found.others:
        parts += [Text(), _others(found.others)]
    return Group(*parts)


def _summary(title: str, found: Figures) -> Text:
    rate = "-" if found.tokens_per_second is None else f"{found.tokens_per_second:,.0f}"
    text = f"  {rate} tokens/s   {found.streams} streams   {found.running} running   {found.waiting} waiting"
    return Text.assemble((title, "bold"), text)


def _table(*columns: str, left: int = 1) -> Table:
    """The first `left` columns to the left, the others to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, no_wrap=True, justify="left" if i < left else "right")
    return table


def _engines(engines: Sequence[EngineFigures]) -> Table:
    table = _table("ENGINE", "ROLE", "", "KV BLOCKS", "RUN", "WAIT", "PREFILL", "TOKENS/S", "HITS", "DRAFTS", left=4)
    for each in engines:
        used = f"{_bar(each.kv_share)} {each.kv_blocks}/{each.kv_blocks_total}"
        counts = (str(each.running), str(each.waiting), f"{each.prefill_tokens:,}")
        rates = (_number(each.tokens_per_second), _percent(each.hit_rate), _percent(each.acceptance))
        table.add_row(each.instance, each.role or "-", _phase(each.phase), used, *counts, *rates)
    return table


def _ranks(ranks: Sequence[RankFigures]) -> Table:
    parts = ("IDLE", "WAIT", "PREPARE", "FORWARD", "SAMPLE", "ANSWER")
    table = _table("RANK", "DEVICE", "", "STEPS/S", "STEP ms", *parts, left=3)
    for each in ranks:
        times = (each.wait_ms, each.prepare_ms, each.forward_ms, each.sample_ms, each.answer_ms)
        table.add_row(
            each.instance,
            each.device,
            _phase(each.phase),
            _number(each.steps_per_second),
            _milliseconds(each.step_ms),
            _percent(each.idle_share),
            *map(_milliseconds, times),
        )
    return table


def _stores(stores: Sequence[StoreFigures]) -> Table:
    table = _table("STORE", "NODE", "", "MEMORY", "BLOCKS", "PINNED", "HITS", left=4)
    for each in stores:
        share = each.bytes_used / each.bytes_total if each.bytes_total else None
        memory = f"{_bar(share)} {each.bytes_used / 2**20:,.0f}/{each.bytes_total / 2**20:,.0f} MiB"
        counts = (f"{each.blocks:,}", str(each.pinned), _percent(each.hit_rate))
        table.add_row(each.instance, each.node, _phase(each.phase), memory, *counts)
    return table


def _others(others: Sequence[OtherFigures]) -> Text:
    """Name, requests in hand and messages a second; wrapped as the terminal is wide."""
    text = Text()
    for each in others:
        text.append(each.instance, _STYLES.get(each.phase, "yellow"))
        text.append(f" {each.load} in hand, {_number(each.messages_per_second)} messages/s    ")
    return text


def _phase(phase: str) -> Text:
    return Text(phase, _STYLES.get(phase, "yellow"))


def _bar(share: float | None) -> str:
    full = round(BAR * min(1.0, share or 0.0))
    return "█" * full + "░" * (BAR - full)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
