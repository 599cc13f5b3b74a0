"""The templates of one host: one forks what needs PyTorch, workers and encoders, the other one all other services."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from deploy.supervisor.template.link import SERVICE_TEMPLATE, TEMPLATE, TemplateProcess

TEMPLATES = 2
"""Those of one host."""


class Templates:
    """Owns both template processes."""

    def __init__(self, workers: Collection[str], services: Collection[str], notify: Callable[[], None]) -> None:
        """`workers`, `services`: modules of the programs; another service is started without. `notify`: called when a
        template has said something."""
        self.workers = TemplateProcess(TEMPLATE, workers, notify)
        self.services = TemplateProcess(SERVICE_TEMPLATE, services, notify)

    def of(self, imports_torch: bool) -> TemplateProcess:
        """Which one forks a process that imports PyTorch, or one that does not."""
        return self.workers if imports_torch else self.services

    async def services_settled(self) -> None:
        """Returns once no service needs to wait, after WARM_TIMEOUT at the latest."""
        while not self.services.is_settled:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """Ends both. What they have forked goes on."""
        self.workers.close()
        self.services.close()
