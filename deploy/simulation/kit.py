"""What every engine of a simulation is made from."""

from __future__ import annotations

from typing import NamedTuple

from deploy.simulation.hops import HopDelays
from services.scheduler.core.limits import EngineLimits
from services.worker.sim.backend import SimBackend
from services.worker.sim.kv_copier import SimKvCopier
from shared.messages.kv_events import KV_EVENT_SECONDS
from shared.messages.lifecycle import HEARTBEAT_SECONDS, Role


class EnginePools(NamedTuple):
    """How many engines of each role there are at first. Their numbers go in this order."""

    mixed: int = 0
    prefill: int = 0
    decode: int = 0

    def role_of(self, number: int) -> Role:
        """Of the engine with that number, one of the first."""
        first = self.mixed + self.prefill
        return "prefill" if self.mixed <= number < first else "decode" if 0 <= number - first < self.decode else "mixed"

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


class SlowEngines(NamedTuple):
    """The first engines of a simulation, on slower devices than the others'."""

    engines: int = 0
    speed: float = 1.0
    """What they compute in a second, as a share of what the others do."""

    def speed_of(self, number: int) -> float:
        """Of the engine with that number."""
        return self.speed if number < self.engines else 1.0


class EngineKit(NamedTuple):
    """What every engine of a simulation is made from."""

    limits: EngineLimits
    device: SimBackend
    """Each engine has another one of its kind."""
    hops: HopDelays
    checked: bool = False
    """Check the core's invariants after every event: slow, for tests."""
    pools: EnginePools = EnginePools()
    slow: SlowEngines = SlowEngines()
    pulls: bool = False
    """Prefill engines pull prompts from the coordinator's queue."""
    store_memory: int = 0
    """Bytes of the KV store that all engines share, on one node; 0: there is none."""
    report_seconds: float = HEARTBEAT_SECONDS
    """Between two reports of an engine's load."""
    kv_event_seconds: float = KV_EVENT_SECONDS
    """For which engines and the store gather changes of their blocks."""

    @property
    def copier(self) -> SimKvCopier:
        """What is known of copies between a device and the store. Raises SimulationError."""
        if self.device.kv is None or not isinstance(self.device.kv.copier, SimKvCopier):
            raise SimulationError("the device has no KV memory to copy")
        return self.device.kv.copier


class SimulationError(Exception):
    """The cores did what no simulation without faults expects: a bug."""
