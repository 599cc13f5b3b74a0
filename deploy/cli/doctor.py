"""`baton doctor`: what on this machine keeps Baton from running, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from deploy.cli import machine_checks, stack_checks
from deploy.cli.finding import Finding

Check = Callable[[], Finding]


def examine(run_dir: Path, *, as_json: bool) -> None:
    """Prints every finding; ends with status 1 where something fails."""
    findings = []
    for finding in found(run_dir):
        findings.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings]))
    if any(finding.status == "fail" for finding in findings):
        raise SystemExit(1)


def found(run_dir: Path) -> Iterator[Finding]:
    for check in checks(run_dir):
        yield check()


def checks(run_dir: Path) -> Sequence[Check]:
    return (
        machine_checks.python,
        machine_checks.nats_server,
        machine_checks.torch,
        machine_checks.gpu,
        machine_checks.compiler,
        machine_checks.memory,
        machine_checks.shared_memory,
        machine_checks.open_files,
        lambda: machine_checks.disk(run_dir),
        lambda: stack_checks.port(run_dir),
        lambda: stack_checks.bus(run_dir),
        lambda: stack_checks.gateway(run_dir),
    )


def _print(finding: Finding) -> None:
    from rich.console import Console

    mark = {"ok": "[green]✓[/green]", "warn": "[yellow]![/yellow]", "fail": "[red]✗[/red]"}[finding.status]
    console = Console()
    console.print(f"{mark} {finding.name:<14} {finding.detail}", highlight=False, soft_wrap=True)
    if finding.remedy:
        console.print(f"  {'':<14} → {finding.remedy}", highlight=False, soft_wrap=True)
