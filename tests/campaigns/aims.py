"""Measurements beside their targets, read from the results of all stages. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tests.campaigns.stages import BIG

Results = Mapping[str, Any]
"""By the name of a run, what it wrote."""


class Row(NamedTuple):
    what: str
    measured: str
    aim: str = ""
    met: bool | None = None
    """None: no target."""


_DECODES = {1: ("share_of_copy", 0.85), 16: ("share_of_copy", 0.85), 256: ("share", 0.75)}
"""By batch, at a context of 1k: which share, and how much of it."""
_AIMED_CONTEXT, _AIMED_PROMPT = 1024, 8192
_PREFILL = 0.65
_ATTENTION, _ATTENTION_BATCH, _ATTENTION_CONTEXT = 0.85, 16, 4096
_IDLE = 0.03


def rows(results: Results) -> list[Row]:
    """In the order of the stages."""
    return [
        *_of_tests(results),
        *(row for name, found in results.items() if name.startswith("roofline") for row in _of_steps(found)),
        *(row for name, found in results.items() if name.startswith("kernels") for row in _of_kernels(found)),
        *(row for name in ("serve", "peers") if name in results for row in _of_loads(results[name])),
        *(row for name, found in results.items() if name.startswith("idle") for row in _of_idle(found)),
        *_of_graphs(results),
    ]


def _of_tests(results: Results) -> Iterator[Row]:
    if "tests" in results:
        counts = results["tests"]
        wrong = counts["failures"] + counts["errors"]
        passed = counts["tests"] - wrong - counts["skipped"]
        said = f"{passed} passed, {wrong} failed, {counts['skipped']} skipped"
        yield Row("tests", said, "all pass", passed > 0 and wrong == 0)


def _of_steps(found: Mapping[str, Any]) -> Iterator[Row]:
    name = found["run"]["model"]
    for step in found["steps"]:
        what = f"{name}: {step['kind']} {step['batch']} × {step['context']:,}, {step['seconds'] * 1e3:,.2f} ms"
        yield _of_step(what, name, step, found["ceilings"])


def _of_step(what: str, name: str, step: Mapping[str, Any], ceilings: Mapping[str, Any]) -> Row:
    aimed = name == BIG
    if step["kind"] == "prefill":
        share = step["flops_per_second"] / max(ceilings["matrix_rates"].values())
        return _share(what, share, "matrix rate", _PREFILL if aimed and step["context"] == _AIMED_PROMPT else None)
    known = _DECODES.get(step["batch"]) if aimed and step["context"] == _AIMED_CONTEXT else None
    which, least = known or ("share", None)
    return _share(what, step[which], "copy bandwidth" if which == "share_of_copy" else step["bound"], least)


def _of_kernels(found: Mapping[str, Any]) -> Iterator[Row]:
    name = found["run"]["model"]
    for kernel in found["kernels"]:
        rival = kernel["torch_seconds"]
        beside = "" if rival is None else f", {rival / kernel['seconds']:.2f} × {kernel['torch']}"
        what = f"{name}: {kernel['family']} {kernel['case']}, {kernel['seconds'] * 1e6:,.1f} µs{beside}"
        yield _share(what, kernel["share"], kernel["bound"], _ATTENTION if _is_aimed(name, kernel) else None)


def _is_aimed(name: str, kernel: Mapping[str, Any]) -> bool:
    if name != BIG or kernel["family"] != "decode-attention":
        return False
    sizes = re.match(r"(\d+) × (\d+)", kernel["case"].replace(",", ""))
    return sizes is not None and int(sizes[1]) >= _ATTENTION_BATCH and int(sizes[2]) >= _ATTENTION_CONTEXT


def _of_loads(found: Mapping[str, Any]) -> Iterator[Row]:
    for load in found["loads"]:
        at_once = f"{load['max_concurrency']} at a time" if load["max_concurrency"] else "all at once"
        what = f"{found['model']}: {load['num_prompts']} prompts, {at_once}"
        ours, theirs = load["baton"], load["transformers"]
        for title, key, unit in _LOAD_FIGURES:
            beside = "" if theirs is None else f"; transformers {theirs[key]:,.1f}, {load['ratios'][key] or 0:.2f} ×"
            yield Row(f"{what}, {title}", f"{ours[key]:,.1f} {unit}{beside}")
        failed = ours["failed"] + (0 if theirs is None else theirs["failed"])
        yield Row(f"{what}, failed", str(failed), "0", failed == 0)
        if ours["worker"].get("idle") is not None:
            aimed = found["model"] == BIG
            yield _idle(f"{what}, worker", ours["worker"]["idle"], ours["worker"]["prepare"], aimed=aimed)
    if found["greedy"] is not None:
        greedy = found["greedy"]
        said = f"{greedy['equal']} of {greedy['prompts']} answers, {greedy['tokens_before_the_first_other']} of "
        yield Row(f"{found['model']}: greedy tokens as transformers'", f"{said}{greedy['tokens']} tokens")


_LOAD_FIGURES = (
    ("output", "output_throughput", "tokens/s"),
    ("TTFT p50", "median_ttft_ms", "ms"),
    ("TTFT p99", "p99_ttft_ms", "ms"),
    ("ITL p50", "median_itl_ms", "ms"),
    ("ITL p99", "p99_itl_ms", "ms"),
)


def _of_idle(found: Mapping[str, Any]) -> Iterator[Row]:
    for each in found["idle"]:
        what = f"{found['model']} on {each['device']}: {each['sequences']} sequences, run-ahead {each['run_ahead']}"
        aimed = each["run_ahead"] == 2 and found["model"] == BIG
        yield _idle(what, each["idle"], each["prepare"], aimed=aimed)


def _idle(what: str, idle: float, prepare: float, *, aimed: bool) -> Row:
    """A GPU idles in both: without a plan, and with one that is being prepared."""
    measured = f"{idle:.1%} idle + {prepare:.1%} preparing"
    if not aimed:
        return Row(what, measured)
    return Row(what, measured, f"under {_IDLE:.0%}", idle + prepare < _IDLE)


def _of_graphs(results: Results) -> Iterator[Row]:
    if "graphs-on" not in results or "graphs-off" not in results:
        return
    on, off = (
        {(step["batch"], step["context"]): step for step in results[f"graphs-{which}"]["steps"]}
        for which in ("on", "off")
    )
    for case in sorted(on.keys() & off.keys()):
        ours, other = on[case]["seconds"], off[case]["seconds"]
        yield Row(
            f"graphs: decode {case[0]} × {case[1]:,}",
            f"{ours * 1e3:,.2f} ms replayed, {other * 1e3:,.2f} ms launched: {other / ours:.2f} ×",
        )


def _share(what: str, share: float, of: str, least: float | None) -> Row:
    measured = f"{share:.0%} of {of}"
    return Row(measured=measured, what=what) if least is None else Row(what, measured, f"{least:.0%}", share >= least)
