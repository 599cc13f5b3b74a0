"""Processes are seen to die and to come back, and what was seen of them is bounded."""

from __future__ import annotations

from msgspec.structs import replace

from services.gateway.console.stack_view import ENDED_SHOWN, LISTENING, MAX_ENDED, MAX_EVENTS, StackView
from shared.ids import Incarnation, InstanceId
from shared.messages.lifecycle import Lifecycle, Phase


class Looking:
    """A view with a clock of its own, some time after it began to listen."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.view = StackView(lambda: self.now, lambda: self.now)

    async def say(self, instance: str, incarnation: int = 1, phase: Phase = "ready") -> None:
        await self.view.record(life(instance, incarnation, phase))

    def happened(self) -> list[tuple[str, str]]:
        return [(event.instance, event.what) for event in self.view.events]


def life(instance: str, incarnation: int = 1, phase: Phase = "ready") -> Lifecycle:
    return Lifecycle(
        service="tokenizer",
        instance=InstanceId(instance),
        incarnation=Incarnation(incarnation),
        phase=phase,
        pid=1,
        host="h",
        started=0.0,
    )


async def test_a_process_dies_and_comes_back() -> None:
    looking = Looking()
    await looking.say("t-1")
    assert looking.happened() == [], "it was there before somebody looked"
    looking.now += LISTENING + 1
    await looking.say("t-1", phase="failed")
    looking.view.look()
    assert list(looking.view.alive) == []
    assert looking.view.ended[InstanceId("t-1")].why == "failed"
    await looking.say("t-1", 2, "starting")
    await looking.say("t-1", 2)
    assert looking.view.ended == {}
    assert looking.view.deaths["t-1"] == 1
    assert looking.happened() == [("t-1", "failed"), ("t-1", "started, starting"), ("t-1", "is ready")]


async def test_a_restart_whose_death_nobody_announced_is_a_death() -> None:
    looking = Looking()
    await looking.say("t-1")
    await looking.say("t-1", 2)
    assert (looking.view.deaths["t-1"], looking.happened()) == (1, [("t-1", "restarted, ready")])
    await looking.say("t-1", 1, "failed")  # late, of the run before
    assert list(looking.view.alive) == ["t-1"]


async def test_a_stop_is_no_death_and_silence_is_one() -> None:
    looking = Looking()
    await looking.say("t-1")
    await looking.say("t-2")
    await looking.say("t-1", phase="stopped")
    looking.now += 10
    looking.view.look()
    assert {name: ended.why for name, ended in looking.view.ended.items()} == {"t-1": "stopped", "t-2": "silent"}
    assert (looking.view.deaths["t-1"], looking.view.deaths["t-2"]) == (0, 1)
    looking.now += ENDED_SHOWN
    looking.view.look()
    assert looking.view.ended == {}
    assert not looking.view.deaths


async def test_who_promises_words_less_often_is_waited_for() -> None:
    looking = Looking()
    await looking.view.record(replace(life("t-1"), keep_alive=20.0))
    looking.now += 30
    looking.view.look()
    assert list(looking.view.alive) == ["t-1"]


async def test_what_is_kept_of_the_past_is_bounded() -> None:
    looking = Looking()
    for number in range(MAX_ENDED + MAX_EVENTS):
        await looking.say(f"t-{number}")
        await looking.say(f"t-{number}", phase="failed")
    assert (len(looking.view.ended), len(looking.view.events)) == (MAX_ENDED, MAX_EVENTS)
    looking.view.look()
    assert len(looking.view.deaths) <= MAX_ENDED
