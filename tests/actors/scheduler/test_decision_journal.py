"""What a scheduler decided in a live run is decided again by replaying its journal, and a change is found."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from services.scheduler.core.events import Event, WorkersReady
from services.scheduler.core.limits import EngineLimits, EngineRole
from services.scheduler.journal import EVENTS, MAX_JOURNALS, Decision, DecisionJournal, EngineStart, JournalSettings
from services.scheduler.replay import replay
from services.worker.sim.tokens import SimSpeculation
from shared.bus.memory_bus import MemoryBus
from shared.ids import EngineId, Incarnation
from shared.journals.journal import Journal, JournalError, framed
from shared.messages.scheduler import StepFinished
from tests.support.engines.checking_worker import TIMING, card, generate
from tests.support.engines.engine_on_a_bus import engine_on_a_bus, make_model, sim_backend
from tests.support.small_disk import fill, small_disk

PROMPT = list(range(2, 20))


async def record(bus: MemoryBus, folder: Path, *, contents: bool = False) -> Path:
    """A short life of an engine: requests that crowd its memory, a cancelled one, workers lost and back."""
    path = folder / "engine.journal"
    model = make_model(folder / "model")
    limits = EngineLimits(max_running=4, max_batch_tokens=24)
    async with engine_on_a_bus(bus, limits, JournalSettings(path, contents)) as engine:
        worker = engine.add_worker(lambda: sim_backend(model, kv_memory_bytes=2**14))
        await engine.ready()
        for i in range(8):
            await engine.generate(generate(f"r{i}", prompt=PROMPT, max_tokens=6 + i))
        await engine.finished(*(f"r{i}" for i in range(8)))
        await engine.kill(worker)
        await engine.until(lambda: engine.scheduler.core.epoch_state is None, "the worker is missed")
        engine.add_worker(lambda: sim_backend(model))
        await engine.ready()
        await engine.generate(generate("again", prompt=PROMPT, max_tokens=3))
        await engine.finished("again")
    return path


def records(path: Path) -> list[Decision]:
    with Journal(path) as journal:
        return [msgspec.msgpack.decode(record, type=Decision) for record in journal]


def tampered(path: Path, number: int, decision: Decision) -> Path:
    """The same journal with another decision under `number`."""
    with Journal(path) as journal:
        bodies = list(journal)
    whole = path.read_bytes()
    start = len(whole) - sum(len(framed(body)) for body in bodies)
    bodies[number] = msgspec.msgpack.encode(decision)
    changed = path.with_name("tampered")
    changed.write_bytes(whole[:start] + b"".join(map(framed, bodies)))
    return changed


async def test_a_recorded_run_is_decided_again_byte_for_byte(memory_bus: MemoryBus, tmp_path: Path) -> None:
    path = await record(memory_bus, tmp_path)
    told = records(path)
    assert {"GenerateRequest", "StepFinished", "WorkersReady", "WorkersLost"} <= {each.event for each in told}
    result = replay(path)
    assert result.difference is None
    assert result.events == len(told)
    assert result.outputs == sum(len(each.outputs) for each in told) > 30
    assert not result.torn


async def test_the_first_difference_is_named(memory_bus: MemoryBus, tmp_path: Path) -> None:
    path = await record(memory_bus, tmp_path, contents=True)
    told = records(path)
    number, decision = next((i, each) for i, each in enumerate(told) if len(each.outputs) == 2)
    swapped = msgspec.structs.replace(decision, outputs=decision.outputs[::-1])
    result = replay(tampered(path, number, swapped))
    assert result.difference is not None
    assert (result.difference.number, result.events) == (number, number + 1)
    assert result.difference.event.startswith(decision.event)
    assert result.difference.expected[:2] == result.difference.got[1::-1]

    without = msgspec.structs.replace(decision, content=told[0].content, event=told[0].event)
    assert replay(tampered(path, number, without)).difference is not None
    late = msgspec.structs.replace(decision, plan_due=12.5)
    found = replay(tampered(path, number, late)).difference
    assert found is not None
    assert found.expected[-1] == "next plan due at 12.5"


async def test_a_journal_cut_anywhere_is_replayed_up_to_there(memory_bus: MemoryBus, tmp_path: Path) -> None:
    path = await record(memory_bus, tmp_path)
    whole, cut = path.read_bytes(), tmp_path / "cut"
    with Journal(path) as journal:
        sizes = [len(framed(body)) for body in journal]
    ends = [len(whole) - sum(sizes[number:]) for number in range(len(sizes) + 1)]
    for length in (*range(len(whole) - 1, len(whole) - 400, -37), ends[-3]):
        cut.write_bytes(whole[:length])
        result = replay(cut)
        assert result.difference is None
        assert result.events == sum(end <= length for end in ends[1:])
        assert result.torn == (length not in ends)


def test_every_kind_of_event_can_be_written_and_read() -> None:
    assert set(EVENTS.values()) == set(get_args(Event))
    assert len(EVENTS) == len(get_args(Event)), "two events of one name"
    for event in EVENTS.values():
        msgspec.msgpack.Decoder(event)


async def test_an_event_of_another_release_is_an_error_that_names_it(memory_bus: MemoryBus, tmp_path: Path) -> None:
    path = await record(memory_bus, tmp_path)
    foreign = msgspec.structs.replace(records(path)[3], event="MoonRisen")
    with pytest.raises(JournalError, match="event 3 is none of this release's"):
        replay(tampered(path, 3, foreign))


def test_a_bug_is_recorded_with_the_event_that_showed_it_and_shows_again(tmp_path: Path) -> None:
    start = EngineStart(EngineId("engine-1"), Incarnation(1), EngineLimits(), EngineRole())
    journal = DecisionJournal(JournalSettings(tmp_path / "j"), start, start.core())
    journal.handle(WorkersReady(card(), num_blocks=64), 1.0)
    journal.handle(generate("r", prompt=[5, 6, 7], max_tokens=4), 2.0)
    with pytest.raises(ValueError, match="0 sampled, 1 were planned"):
        journal.handle(StepFinished(epoch=Incarnation(1), step=0, sampled=(), timing=TIMING), 3.0)
    told = records(tmp_path / "j")
    assert [each.event for each in told] == ["WorkersReady", "GenerateRequest", "StepFinished"]
    assert "0 sampled" in (told[-1].raised or "")
    assert replay(tmp_path / "j").difference is None
    well = tampered(tmp_path / "j", 2, msgspec.structs.replace(told[-1], raised=None))
    found = replay(well).difference
    assert found is not None
    assert "0 sampled" in found.got[0]


def test_a_new_start_keeps_the_journal_of_the_one_before(tmp_path: Path) -> None:
    for epoch in (1, 2):
        start = EngineStart(EngineId("engine-1"), Incarnation(epoch), EngineLimits(), EngineRole())
        for place in (tmp_path / "j", tmp_path):
            DecisionJournal(JournalSettings(place), start, start.core()).close()
    epochs = {}
    for path in tmp_path.iterdir():
        with Journal(path) as journal:
            epochs[path.name] = journal.about("decisions", EngineStart).epoch
    assert epochs == {
        "j": 2,
        "j.before": 1,
        "engine-1-0000000000000001.journal": 1,
        "engine-1-0000000000000002.journal": 2,
    }


def engine_start(epoch: int) -> EngineStart:
    return EngineStart(EngineId("engine-1"), Incarnation(epoch), EngineLimits(), EngineRole())


def test_an_engine_that_starts_again_and_again_keeps_its_newest_journals_only(tmp_path: Path) -> None:
    for epoch in range(MAX_JOURNALS + 3):
        start = engine_start(epoch)
        DecisionJournal(JournalSettings(tmp_path), start, start.core()).close()
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == [f"engine-1-{epoch:016x}.journal" for epoch in range(3, MAX_JOURNALS + 3)]


def test_on_a_full_disk_an_engine_serves_without_a_journal(tmp_path: Path) -> None:
    start = engine_start(1)
    with small_disk(tmp_path) as disk:
        fill(disk)
        journal = DecisionJournal(JournalSettings(disk / "j"), start, start.core())
        alone = start.core()
        for event in (WorkersReady(card(), num_blocks=64), generate("r", prompt=[5, 6, 7], max_tokens=4)):
            assert journal.handle(event, 1.0) == alone.handle(event, 1.0)
        journal.close()
    with pytest.raises(FileNotFoundError):
        DecisionJournal(JournalSettings(tmp_path / "nowhere" / "j"), start, start.core())


async def test_when_and_how_much_is_drafted_is_decided_again(memory_bus: MemoryBus, tmp_path: Path) -> None:
    """By the seconds that steps have taken, which are in the journal: no clock is asked anew."""
    path = tmp_path / "engine.journal"
    model = make_model(tmp_path / "model")
    async with engine_on_a_bus(memory_bus, EngineLimits(run_ahead=2, plan_late=False), JournalSettings(path)) as engine:
        engine.add_worker(lambda: sim_backend(model, speculation=SimSpeculation(3, 0.6)))
        await engine.ready()
        for i in range(4):
            await engine.generate(generate(f"r{i}", prompt=PROMPT[: 5 + i], max_tokens=100 + i))
        await engine.finished(*(f"r{i}" for i in range(4)))
        assert engine.scheduler.core.counters.drafted > 0
    assert replay(path).difference is None
