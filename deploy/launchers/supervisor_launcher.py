"""The processes of a stack that `baton up` or `baton join` runs."""

from __future__ import annotations

from deploy.launchers.interface import PoolChange
from deploy.supervisor.operator_bus import ask_admin
from deploy.supervisor.state_file import StackState


class SupervisorLauncher:
    """Asks the supervisor, by a coordinator's `admin.scale`."""

    def __init__(self, state: StackState, host: str | None = None, model: str | None = None) -> None:
        """`host`: whose supervisor is asked, in a stack of several; None: of the only one. `model`: whose pools are
        scaled, of several; None: there is one, or all share it."""
        self._state = state
        self._where = {key: value for key, value in (("host", host), ("model", model)) if value is not None}

    async def scale(self, pool: str, count: int) -> PoolChange:
        """As `Launcher.scale`."""
        answer = await ask_admin(self._state, "scale", {"service": pool, "count": count, **self._where})
        return PoolChange(tuple(answer.get("started", ())), tuple(answer.get("stopping", ())))
