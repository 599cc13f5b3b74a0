"""A TP 2 × PP 2 engine on two hosts, in two network namespaces: it serves, survives its ranks, and ends as one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster.stores_in_two_namespaces import unshare, why_no_namespaces
from tests.support.paths import REPOSITORY


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_of_two_hosts_serve_together_and_start_anew_together(tmp_path: Path) -> None:
    if (why := why_no_namespaces()) is not None:
        pytest.skip(why)
    done = subprocess.run(
        [*unshare(), sys.executable, "-m", "tests.support.cluster.engine_in_two_namespaces", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    assert done.stdout.splitlines()[:-1] == [
        "ranks engine-1-rank0 engine-1-rank1 engine-1-rank2 engine-1-rank3",
        "others there",
        "equal after the death of engine-1-rank3 True",
        "equal after the death of engine-1-rank1 True",
        "equal after the death of the second host True",
        "second ended 0",
    ]
