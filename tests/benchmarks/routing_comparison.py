"""What routing by cached prefixes gains: the same load on simulated engines under each of the router's policies.

    python -m tests.benchmarks.routing_comparison --engines 8 --share 0.7 --json routing.json

For each policy a stack of its own; a closed loop finds its capacity, then requests arrive at random times at a share
of the capacity of `--capacity-of` (the same rate for all). The simulated accelerators are slow on purpose, so that they
and not this machine's processors are what is short: the printed share of processor time must stay well below 100%.

No part of `baton bench`: it starts stacks, and what it compares is this router, not a server of the user's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from services.bench.statistics import mean
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.paths import REPOSITORY

POLICIES = ("round-robin", "least-loaded", "random", "kv")
PLACEMENTS = "baton_coordinator_placements_total"
DECISION = "baton_router_decision_seconds_bucket"


class Shape(NamedTuple):
    """Of one comparison. The accelerators: a prompt of 1,024 tokens takes each about half a second."""

    engines: int
    share: float
    prefixes: int
    prefix_len: int
    suffix_len: int
    output_len: int
    popularity: float
    requests: int
    concurrency: int
    tflops: float
    step_ms: float
    bandwidth: str
    kv_memory: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Shape(8, 0.7, 64, 1024, 64, 32, 0.8, 600, 96, 0.02, 10.0, "2GB", "48MiB")
    for name, default in defaults._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["round-robin", "least-loaded", "kv"])
    parser.add_argument("--capacity-of", choices=POLICIES, default="least-loaded")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    shape = Shape(**{name: getattr(given, name) for name in Shape._fields})
    order = sorted(given.policies, key=lambda policy: policy != given.capacity_of)
    if order[0] != given.capacity_of:
        parser.error("--capacity-of must be one of --policies")
    results = compared(shape, order)
    print(table(results, given.capacity_of))
    if given.json:
        given.json.write_text(json.dumps({"shape": shape._asdict(), "policies": results}, indent=2))


def compared(shape: Shape, policies: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By policy; the first one's capacity gives the rate for all."""
    results: dict[str, dict[str, Any]] = {}
    rate = 0.0
    for policy in policies:
        with tempfile.TemporaryDirectory() as folder, stack_of(shape, policy, Path(folder)) as stack:
            closed = served(stack, shape, ["--max-concurrency", str(shape.concurrency), "--seed", "1"])
            rate = rate or shape.share * closed["request_throughput"]
            before = placements(stack)
            opened = served(stack, shape, ["--request-rate", f"{rate:.4f}", "--seed", "2"])
            after = placements(stack)
        results[policy] = figures(closed, opened, before, after)
        print(f"{policy}: {json.dumps(results[policy])}", file=sys.stderr)
    return results


def stack_of(shape: Shape, policy: str, folder: Path) -> Any:
    sim = {"sim_tflops": shape.tflops, "sim_fixed_ms": shape.step_ms, "sim_bandwidth": shape.bandwidth}
    settings = [*(f"worker.{key}={value}" for key, value in sim.items()), "coordinator.metrics_port=0"]
    more = [f"--router-policy={policy}", f"--kv-memory={shape.kv_memory}", "--kvstore-memory=0"]
    return running_stack(folder, device="sim", engines=shape.engines, settings=settings, more=more)


def served(stack: RunningStack, shape: Shape, flags: Sequence[str]) -> dict[str, Any]:
    """The result of `bench serve` with the shared-prefix load. Raises CalledProcessError where a request failed."""
    load = {
        "num-prompts": shape.requests,
        "num-prefixes": shape.prefixes,
        "prefix-len": shape.prefix_len,
        "suffix-len": shape.suffix_len,
        "output-len": shape.output_len,
        "prefix-popularity": shape.popularity,
        "warmup": 0,
        "percentiles": "90",
    }
    command = [sys.executable, "-m", "services.bench", "serve", "--base-url", stack.url, "--ignore-eos", "--json"]
    command += ["--dataset", "shared-prefix", *(f"--{key}={value}" for key, value in load.items()), *flags]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def placements(stack: RunningStack) -> dict[str, float]:
    """The coordinator's counters: requests by engine, and decisions by how long they took at most."""
    (name,) = stack.instances("coordinator")
    port = asyncio.run(stack.ps())[name].metrics_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    lines = re.findall(rf'^({PLACEMENTS}|{DECISION}){{\w+="([^"]+)"}} (\S+)$', text, re.MULTILINE)
    return {f"{metric} {label}": float(value) for metric, label, value in lines}


def figures(
    closed: Mapping[str, Any], opened: Mapping[str, Any], before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, Any]:
    placed = [count - before.get(name, 0.0) for name, count in after.items() if name.startswith(PLACEMENTS)]
    spent = sum(share["cores"] for share in opened["server_cpu"]) + opened["client_cpu_s"] / opened["duration"]
    return {
        "capacity": closed["request_throughput"],
        "capacity_hit_rate": closed["cache_hit_rate"],
        "rate": opened["request_rate"],
        "throughput": opened["request_throughput"],
        "output_throughput": opened["output_throughput"],
        "hit_rate": opened["cache_hit_rate"],
        "ttft_p50_ms": opened["median_ttft_ms"],
        "ttft_p90_ms": opened["p90_ttft_ms"],
        "least_loaded_share": min(placed) / mean(placed),
        "engines_used": sum(count > 0 for count in placed),
        "decision_p99_below_ms": decision_p99(before, after),
        "cpu_share": spent / (os.cpu_count() or 1),
    }


def decision_p99(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Upper edge, in milliseconds, of the histogram's bucket that holds the 99th percentile of the new decisions."""
    counts = {
        float(name.split()[1]): count - before.get(name, 0.0)
        for name, count in after.items()
        if name.startswith(DECISION)
    }
    return 1000 * min(edge for edge, count in counts.items() if count >= 0.99 * max(counts.values()))


COLUMNS = (
    ("capacity req/s", "capacity", 1.0, 1),
    ("req/s", "throughput", 1.0, 1),
    ("hit %", "hit_rate", 100.0, 1),
    ("TTFT p50 ms", "ttft_p50_ms", 1.0, 0),
    ("TTFT p90 ms", "ttft_p90_ms", 1.0, 0),
    ("least/mean", "least_loaded_share", 1.0, 2),
    ("decision p99 < ms", "decision_p99_below_ms", 1.0, 2),
    ("CPU %", "cpu_share", 100.0, 0),
)


def table(results: Mapping[str, Mapping[str, Any]], capacity_of: str) -> str:
    """Markdown."""
    heads = " | ".join(title for title, *_ in COLUMNS)
    lines = [f"at {next(iter(results.values()))['rate']:.1f} requests/s ({capacity_of} sets the rate)", ""]
    lines += [f"| policy | {heads} |", "|---" + "|---:" * len(COLUMNS) + "|"]
    for policy, result in results.items():
        cells = (f"{factor * result[key]:,.{digits}f}" for _, key, factor, digits in COLUMNS)
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
