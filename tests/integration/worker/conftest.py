"""What tests of a rank's parts in this process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.worker.guided import processes
from tests.support.worker.forked_grammars import ForkedServer


@pytest.fixture(scope="module", autouse=True)
def forked_grammars() -> Iterator[None]:
    """tests/unit/worker/guided and all stacks start servers as they are started elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "started", ForkedServer)
        yield
