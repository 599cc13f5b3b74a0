"""What `baton ps` says of an engine and of a store, to people and to scripts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from deploy.cli.ps import StackSnapshot, _row, detail, sentence
from deploy.supervisor.core.members import State, SupervisedProcess
from deploy.supervisor.core.plan import Counts, all_process_specs
from deploy.supervisor.state_file import recorded
from services.gateway.console.document import stack_document
from services.gateway.console.stack_view import StackView
from shared.ids import NodeId
from shared.messages.lifecycle import SleepReport, StoreReport
from tests.support.engines.coordinator_events import engine, life

STORE = StoreReport(
    node=NodeId("n1"),
    slots=64,
    committed=32,
    reserved=1,
    pinned=2,
    bytes_used=2**25,
    bytes_total=2**26,
    hits=30,
    misses=10,
    lower_hits=5,
)


def test_a_store_tells_how_full_it_is_and_how_often_it_helps() -> None:
    said = detail(life("kvstore", "kvstore-1", store=STORE))
    assert said is not None
    assert (said["blocks"], said["slots"], said["hit_rate"], said["lower_hits"]) == (32, 64, 0.75, 5)
    assert sentence(said) == "n1: 32/64 MiB, 32 blocks, 2 pinned, 75% hits, 5 from below"


def test_who_has_another_block_size_is_said_to_be_ignored() -> None:
    said = detail(life("tokenizer", "tokenizer-1", block_size=16), 32)
    assert sentence(said).startswith("ignored by the others: its KV blocks have 16 tokens, those here 32")
    assert detail(life("tokenizer", "tokenizer-1", block_size=32), 32) is None


def test_a_store_without_lookups_has_no_hit_rate() -> None:
    fresh = msgspec.structs.replace(STORE, hits=0, misses=0, lower_hits=0, pinned=0)
    said = detail(life("kvstore", "kvstore-1", store=fresh))
    assert said is not None
    assert said["hit_rate"] is None
    assert sentence(said) == "n1: 32/64 MiB, 32 blocks, no lookups yet"


@pytest.mark.parametrize(("node", "shown"), [(None, "decode: "), (NodeId("n1"), "decode at n1: ")])
def test_an_engine_tells_its_role_and_its_node(node: NodeId | None, shown: str) -> None:
    report = engine("decode-1", running=1, waiting=2).engine
    assert report is not None
    said = detail(life("scheduler", "decode-1", engine=msgspec.structs.replace(report, role="decode", node=node)))
    assert said is not None
    assert (said["role"], said["node"]) == ("decode", node)
    assert sentence(said) == f"{shown}1 running, 2 waiting, 50/100 blocks free"


def test_of_others_there_is_nothing_more_to_say() -> None:
    assert detail(life("gateway", "gateway-1")) is None
    assert sentence(None) == ""


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"phase": "starting"}, "starting"),
        ({"phase": "ready"}, "ready"),
        ({"phase": "draining"}, "draining"),
        ({"phase": "draining", "standby": True}, "standby"),
        ({"phase": "starting", "sleep": SleepReport(1)}, "asleep"),
    ],
)
async def test_ps_top_and_the_console_have_one_word_for_how_a_process_is(fields: dict[str, Any], shown: str) -> None:
    said = msgspec.structs.replace(engine("engine-1"), **fields)
    process = next(each for each in all_process_specs(Counts(engines=1)) if each.instance == "engine-1")
    row = _row(
        recorded(SupervisedProcess(process, pid=said.pid, state="running")), StackSnapshot({said.instance: said}, {})
    )
    view = StackView(lambda: 0.0, lambda: 0.0)
    await view.record(said)
    figures = view.look()
    page = stack_document(view, figures, [], {})
    assert [row["phase"], figures.engines[0].phase, page["instances"]["engine-1"]["phase"]] == [shown] * 3
    assert page["engines"]["engine-1"].get("phase", shown) == shown


@pytest.mark.parametrize(
    ("state", "restarts", "shown"),
    [("waiting", 0, "waiting"), ("waiting", 2, "restarting"), ("ending", 0, "ending"), ("running", 0, "silent")],
)
def test_without_a_word_of_its_own_a_process_is_what_its_supervisor_knows(
    state: State, restarts: int, shown: str
) -> None:
    process = all_process_specs(Counts(engines=1))[0]
    row = _row(recorded(SupervisedProcess(process, state=state, restarts=restarts)), StackSnapshot({}, {}))
    assert row["phase"] == shown
