"""Stacks of several hosts, each in namespaces of its own: a lane of its own, `make test-hosts`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster.namespace_hosts import Hosts, why_no_hosts


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Hosts on one wire, yet to be made; nothing of them is left afterwards."""
    if (why := why_no_hosts()) is not None:
        pytest.skip(why)
    with Hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made
