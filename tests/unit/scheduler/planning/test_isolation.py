"""Suspects of a death are computed alone, one after the other, and the rest goes on between them."""

from __future__ import annotations

from services.scheduler.core.events import SendToGateway, TimePassed, WorkersLost
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.planning.isolation import STEPS_BETWEEN
from shared.messages.gateway import RequestFailed
from tests.support.engines.checking_worker import generate
from tests.support.engines.single_engine import Ring


def ring(**limits: int) -> Ring:
    return Ring(EngineLimits(run_ahead=1, plan_late=False, **limits), num_blocks=64)  # type: ignore[arg-type]


def composition(ring: Ring) -> list[str]:
    """Who is in the oldest plan; it is computed then."""
    assert ring.engine.epoch_state is not None
    names = {s.id: s.generation.request for s in ring.engine.requests.values()}
    present = sorted(names.get(work.sequence, "ended") for work in ring.plans[0].work)
    ring.step()
    if ring.engine.isolated is not None and not ring.plans:
        ring.send(TimePassed())
    return present


def start(ring: Ring, name: str, until: int | None, tokens: int = 40) -> None:
    number = float(len(ring.engine.requests))
    prompt = [4 + len(ring.engine.requests)] * 10
    ring.send(generate(name, prompt, max_tokens=tokens, ignore_eos=True, suspect_until=until, arrival=number))


def test_suspects_take_turns_and_the_others_have_steps_between_them() -> None:
    engine = ring()
    start(engine, "good", None, tokens=60)
    start(engine, "s1", 3)
    start(engine, "s2", 3)
    steps = [composition(engine) for _ in range(40)]
    for suspect in ("s1", "s2"):
        first = steps.index([suspect])
        assert steps[first : first + 3] == [[suspect]] * 3
        assert all(suspect not in step for step in steps[:first])
    last = max(i for i, step in enumerate(steps) if step == ["s1"])
    assert steps[last + 1 : last + 1 + STEPS_BETWEEN] == [["good", "s1"]] * STEPS_BETWEEN
    assert ["good", "s1", "s2"] in steps
    engine.finish()
    assert not engine.engine.requests


def test_a_trial_is_announced_before_its_first_step() -> None:
    engine = ring()
    start(engine, "s", 3)
    assert engine.engine.isolated == "s"
    assert not engine.plans
    assert engine.engine.plan_due == engine.now
    engine.send(TimePassed())
    assert engine.plans


def test_a_death_names_what_was_computed_and_how_far_it_was() -> None:
    engine = ring(max_running=1)
    start(engine, "a", None)
    start(engine, "waits", None)
    engine.step()
    outputs = engine.send(WorkersLost("rank 0 died", died=True))
    failed = {o.message.request: o.message for o in outputs if isinstance(o, SendToGateway)}
    assert isinstance(failed["a"], RequestFailed)
    assert (failed["a"].death, failed["a"].reached) == ("beside others", 3)
    assert isinstance(failed["waits"], RequestFailed)
    assert (failed["waits"].death, failed["waits"].reached) == (None, 0)


def test_a_death_during_a_trial_is_that_of_the_suspect() -> None:
    engine = ring()
    start(engine, "good", None)
    engine.step()
    start(engine, "s", 3)
    while engine.engine.isolated is None:
        engine.step()
    engine.send(TimePassed())
    outputs = engine.send(WorkersLost("rank 0 died", died=True))
    failed = {o.message.request: o.message for o in outputs if isinstance(o, SendToGateway)}
    deaths = {name: each.death for name, each in failed.items() if isinstance(each, RequestFailed)}
    assert deaths == {"good": None, "s": "alone"}


def test_a_death_before_the_trial_began_is_not_that_of_the_suspect() -> None:
    """Its first plan found no worker: two engines were killed at once, and it was sent from the one to the other."""
    engine = ring()
    start(engine, "s", 3)
    engine.send(TimePassed())
    assert engine.engine.isolated == "s"
    outputs = engine.send(WorkersLost("rank 0 died", died=True, unheard=engine.plans[0].step))
    (failed,) = [o.message for o in outputs if isinstance(o, SendToGateway)]
    assert isinstance(failed, RequestFailed)
    assert failed.death is None


def test_one_that_has_passed_its_death_is_no_suspect() -> None:
    engine = ring()
    engine.send(generate("a", [4] * 10, resume=(5, 6, 7), max_tokens=9, ignore_eos=True, suspect_until=3))
    assert engine.engine.isolated is None
    engine.finish()
    assert not engine.engine.requests


def test_a_suspect_that_finds_no_room_holds_back_who_came_later() -> None:
    engine = ring(max_running=1)
    start(engine, "good", None, tokens=20)
    start(engine, "s", 2, tokens=4)
    start(engine, "late", None, tokens=4)
    order: list[str] = []
    while engine.plans:
        for name in composition(engine):
            if name not in order and name != "ended":
                order.append(name)
    assert order == ["good", "s", "late"]
