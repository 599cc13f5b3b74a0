"""How rows of a data-parallel group go to experts and back, as `--all2all-backend` names it. No torch."""

from __future__ import annotations

from typing import Literal

All2AllBackend = Literal["auto", "allgather_reducescatter", "low_latency", "high_throughput"]
