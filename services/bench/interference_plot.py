"""The plot of `bench interference`: inter-token latency over time, beside that of earlier runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from services.bench.api import ApiError
from services.bench.plotting import INCHES, blank_figure, save

NEEDED = ("timeline", "quiet_seconds", "disturbed")


def read_results(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Results that earlier runs wrote. Raises ApiError where one is none."""
    results = []
    for path in paths:
        try:
            result = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise ApiError(f"--beside {path}: {error}") from None
        if not isinstance(result, dict) or not all(key in result for key in NEEDED):
            raise ApiError(f"--beside {path}: no result of bench interference")
        results.append({**result, "label": result.get("label") or path.stem})
    return results


def plot_interference(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """One panel each, on the same scale. Raises ApiError."""
    figure = blank_figure(len(results), panel_width=1.5 * INCHES)
    panels = figure.subplots(1, len(results), sharex=True, sharey=True, squeeze=False)[0]
    for panel, result in zip(panels, results, strict=True):
        seconds = [each["second"] for each in result["timeline"]]
        for key, said in (("max_itl_ms", "longest"), ("median_itl_ms", "median")):
            panel.plot(seconds, [each[key] for each in result["timeline"]], ".", markersize=4, label=said)
        panel.axvline(result["quiet_seconds"], linestyle="--", color="gray", linewidth=1)
        panel.axhline(result["disturbed"]["p99_itl_ms"], linestyle=":", color="black", linewidth=1)
        panel.set(xlabel="s (dashed: long prompts begin; dotted: their ITL p99)", title=result.get("label") or "")
        panel.set_yscale("log")
    panels[0].set_ylabel("inter-token latency in ms")
    panels[0].legend()
    save(figure, path)
