"""Recurrent units (RG-LRU) against the recurrence as it is written down, in float64."""

from __future__ import annotations

import pytest
import torch

from services.worker.ops.torch_mixers.states import TorchStates
from tests.support.worker.native_batches import native
from tests.support.worker.recurrent_reference import CHANNELS, recurrent_reference, recurrent_unit
from tests.support.worker.selective_reference import empty_states
from tests.support.worker.state_steps import assert_rows_do_not_depend_on_cuts, assert_steps_are_the_recurrence


@pytest.mark.parametrize("name", ["torch", "native"])
def test_sequences_in_steps_of_every_length_are_the_recurrence(name: str) -> None:
    ops, own = TorchStates() if name == "torch" else native(torch.float32).states, recurrent_unit()
    assert_steps_are_the_recurrence(
        ops, own, empty_states(1), lambda rows: recurrent_reference(rows, own), 3 * CHANNELS
    )


def test_native_rows_are_the_same_to_the_last_bit_however_a_sequence_is_cut() -> None:
    assert_rows_do_not_depend_on_cuts(recurrent_unit(), lambda: empty_states(1), 3 * CHANNELS)
