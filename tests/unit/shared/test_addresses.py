"""Where ranks meet and on which network they speak."""

from __future__ import annotations

from pathlib import Path

from shared.addresses import RANK_INTERFACES, rank_interfaces, rendezvous_file


def test_ranks_speak_on_one_interface_unless_the_user_has_chosen_another() -> None:
    gloo, nccl = RANK_INTERFACES
    assert rank_interfaces("lo", {}) == {gloo: "lo", nccl: "lo"}
    assert rank_interfaces("lo", {gloo: "eth7"}) == {nccl: "lo"}
    assert rank_interfaces(None, {}) == {}


def test_ranks_meet_in_a_file_of_their_own(tmp_path: Path) -> None:
    first, second = (rendezvous_file(tmp_path, "engine-1") for _ in range(2))
    assert first != second
    assert first.startswith(f"file://{tmp_path}/engine-1-")
    assert not Path(first.removeprefix("file://")).exists()
