"""That a start compiles all that serving launches: what Triton compiles a kernel by is more than its constants.

Numbers that are 1 or a multiple of 16, and pointers to whole 16 bytes, make for a kernel of their own unless the kernel
says that they do not.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

pytest.importorskip("triton", reason="Triton is for Linux only")

from tests.support.kernels.traced_launches import Seen


def test_serving_compiles_nothing_that_the_start_did_not() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.kernels.traced_launches"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = msgspec.json.decode(done.stdout, type=Seen)
    attention = {"decode_kernel", "prefill_kernel", "merge_kernel", "rope_and_store_kernel"}
    states = {"convolution_kernel", "selective_kernel", "hand_on_kernel", "one_token_kernel"}
    states |= {"hand_on_chunks_kernel", "delta_chunks_kernel", "recurrent_kernel"}
    attention |= {"index_scores_kernel", "chosen_slots_kernel", "latent_decode_kernel"}
    assert attention | states | {"coded_linear_kernel", "shrink_kernel", "expand_kernel"} <= set(seen.at_start)
    assert seen.when_serving == []
    assert all(x < 1 << 31 and y < 1 << 16 and z < 1 << 16 for x, y, z in seen.grids.values())
