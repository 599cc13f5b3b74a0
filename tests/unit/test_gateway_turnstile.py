"""A crowd of requests before one event loop."""

from __future__ import annotations

import asyncio

from services.gateway.http.turnstile import Turnstile


class Counted(Turnstile):
    turns = 0

    def _turn(self) -> None:
        self.turns += 1
        super()._turn()


async def crowd(turnstile: Counted, size: int) -> tuple[list[asyncio.Task[None]], list[tuple[int, int]]]:
    """Tasks that want in, in this order; and who got in, with the turn in which it did."""
    entered: list[tuple[int, int]] = []

    async def visitor(number: int) -> None:
        await turnstile.enter()
        entered.append((number, turnstile.turns))

    tasks = [asyncio.create_task(visitor(number)) for number in range(size)]
    await asyncio.sleep(0)
    return tasks, entered


async def test_who_comes_alone_goes_through_at_once() -> None:
    turnstile = Counted(2)
    tasks, entered = await crowd(turnstile, 2)
    assert entered == [(0, 0), (1, 0)]
    assert all(task.done() for task in tasks)


async def test_a_crowd_is_let_in_a_few_at_each_turn_of_the_loop_first_come_first_in() -> None:
    turnstile = Counted(2)
    tasks, entered = await crowd(turnstile, 7)
    await asyncio.gather(*tasks)
    assert entered == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3)]


async def test_nobody_overtakes_those_who_wait() -> None:
    turnstile = Counted(1)
    tasks, entered = await crowd(turnstile, 3)
    later, entered_later = await crowd(turnstile, 1)
    await asyncio.gather(*tasks, *later)
    assert entered_later[0][1] > entered[-1][1]


async def test_who_gives_up_takes_nobodys_place() -> None:
    turnstile = Counted(1)
    tasks, entered = await crowd(turnstile, 3)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [number for number, _ in entered] == [0, 2]


async def test_without_a_crowd_the_loop_sleeps() -> None:
    turnstile = Counted(2)
    tasks, _ = await crowd(turnstile, 5)
    await asyncio.gather(*tasks)
    await asyncio.sleep(0.01)
    turns = turnstile.turns
    await asyncio.sleep(0.01)
    assert turnstile.turns == turns
    _, entered = await crowd(turnstile, 1)
    assert len(entered) == 1
