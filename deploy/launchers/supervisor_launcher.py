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

    async def scale(self, pool: str, count: int, data_parallel_size: int | None = None) -> PoolChange:
        """As `Launcher.scale`. `data_parallel_size`: engines of each group from now on; None: as many as before."""
        wanted = {"service": pool, "count": count, **self._where}
        if data_parallel_size is not None:
            wanted["data_parallel_size"] = data_parallel_size
        answer = await ask_admin(self._state, "scale", wanted)
        return PoolChange(*(tuple(answer.get(which, ())) for which in ("started", "stopping", "superseded")))
