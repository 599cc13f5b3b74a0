"""Which engine a request goes to, and whether another one prefills it. Costs are in blocks of work.

cost = prefill blocks still to compute there (the request's own, and those that wait) + decode blocks in use

as NVIDIA Dynamo's KV router has it; blocks in KV stores, saturation and the hand-over are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from services.coordinator.core.choice import Choice
from services.coordinator.core.expected_prompts import ExpectedPrompt, ExpectedPrompts, Prompt, prompt_of
from services.coordinator.core.fleet import DECODING, Fleet, Seat
from services.coordinator.core.kv_sources import KvSources
from services.coordinator.core.load import cost
from services.coordinator.core.policies import Lot, chance, pick
from services.coordinator.core.reuse import NO_REUSE, Reuse, Reuses
from services.coordinator.core.routing import Routing
from shared.blocks import BLOCK_SIZE, blocks_for
from shared.messages.generation import Generation
from shared.tokens import TOKEN_BYTES

A_FEW = 4
"""Requests in hand beyond the mean that are no saturation: a step takes about as long for a handful as for one."""


class _Asked(NamedTuple):
    """A request as far as it matters where it goes."""

    generation: Generation
    prompt: Prompt
    tokens: int
    blocks: int
    reuses: Reuses
    expected: ExpectedPrompt | None


class Router:
    """Reads the fleet and the sources, which the coordinator owns; holds nothing of its own."""

    def __init__(self, fleet: Fleet, sources: KvSources, expected: ExpectedPrompts, routing: Routing) -> None:
        self._fleet = fleet
        self._sources = sources
        self._expected = expected
        self._routing = routing

    def choose(self, generation: Generation, now: float) -> Choice | None:
        """None where no engine, or no detokenizer, takes one more."""
        seats = self._fleet.decoding(generation)
        detokenizer = self._fleet.detokenizer()
        if not seats or detokenizer is None:
            return None
        asked = self._asked(generation, now)
        reuses = _reuses(asked, seats)
        chosen = self._pick(self._costs(asked, seats, reuses), asked, "decode")
        engine, reuse = seats[chosen], reuses[chosen]
        apart = self._apart(asked, reuse, [seat for seat in seats if seat.engine.report.role in DECODING])
        if apart is not None:
            prefill, reuse, decode = apart
            return Choice(prefill.engine.id, detokenizer, reuse, asked.blocks, decode.engine.id)
        return Choice(engine.engine.id, detokenizer, reuse, asked.blocks)

    def _asked(self, generation: Generation, now: float) -> _Asked:
        """The last token is always computed, as the next is drawn from it; so a block that ends with it is, too. Of a
        prompt whose log-probabilities are wanted everything is."""
        tokens = len(generation.tokens) // TOKEN_BYTES
        scored = generation.sampling.prompt_logprobs is not None and tokens == generation.prompt_length
        reusable = 0 if scored else (tokens - 1) // BLOCK_SIZE
        hits = self._sources.hits(generation.model, generation.block_hashes, reusable)
        prompt = prompt_of(generation)
        expected = self._expected.of(prompt, now) if self._routing.policy == "kv" and not scored else None
        return _Asked(generation, prompt, tokens, blocks_for(tokens), Reuses(hits), expected)

    # ---- one engine

    def _costs(self, asked: _Asked, seats: Sequence[Seat], reuses: Sequence[Reuse]) -> list[float]:
        if self._routing.policy != "kv":
            return [cost(seat.engine.report, seat.placed.requests) for seat in seats]
        blocks, discount = asked.blocks, self._routing.store_discount
        counted = [
            NO_REUSE if saturated else reuse for reuse, saturated in zip(reuses, self._saturated(seats), strict=True)
        ]
        return [
            _prefill_before(seat, asked, reuse) + blocks - reuse.worth(discount) + _blocks_after(seat, blocks, reuse)
            for seat, reuse in zip(seats, counted, strict=True)
        ]

    def _saturated(self, seats: Sequence[Seat]) -> list[bool]:
        """Who has too much in hand, or no running slot, to win by what it has cached. Where all are, none is."""
        in_hand = [engine.report.waiting + engine.report.running + placed.requests for engine, placed in seats]
        bound = self._routing.saturation * sum(in_hand) / len(in_hand) + A_FEW
        saturated = [
            load > bound or load - engine.report.waiting >= engine.report.max_running
            for load, (engine, _) in zip(in_hand, seats, strict=True)
        ]
        return [False] * len(seats) if all(saturated) else saturated

    def _pick(self, costs: Sequence[float], asked: _Asked, draw: str) -> int:
        generation = asked.generation
        lot = Lot(self._turn(asked.prompt), chance(generation.request, generation.attempt, draw))
        return pick(self._routing.policy, costs, self._routing.temperature, lot)

    def _turn(self, prompt: Prompt) -> int:
        """Who comes where costs are equal. Several coordinators may be asked for choices of one request at once, before
        they hear of each other: equal prompts give all of them the same."""
        if self._routing.policy == "kv" and prompt.blocks and self._fleet.other_coordinators():
            return int.from_bytes(prompt.last_block[:8])
        return self._fleet.turn

    # ---- two engines

    def _apart(self, asked: _Asked, local: Reuse, decoding: Sequence[Seat]) -> tuple[Seat, Reuse, Seat] | None:
        """Who prefills, with what, and who decodes; None where the request is better kept in one place.

        Blocks pass through KV stores, so both engines need one on their node.
        """
        if not self._long(asked, local):
            return None
        prefilling = [
            seat for seat in self._fleet.handing_over(asked.generation) if seat.engine.report.node is not None
        ]
        receiving = [seat for seat in decoding if seat.engine.report.node is not None]
        if not prefilling or not receiving or self._busy(prefilling):
            return None
        reuses = _reuses(asked, prefilling)
        chosen = self._pick(self._costs(asked, prefilling, reuses), asked, "prefill")
        prefill = prefilling[chosen]
        decode = receiving[self._pick(self._receiving_costs(asked, prefill, receiving), asked, "hand-over")]
        return prefill, reuses[chosen], decode

    def _long(self, asked: _Asked, local: Reuse) -> bool:
        """Whether enough of the prompt is left to compute."""
        left, routing = asked.tokens - local.blocks * BLOCK_SIZE, self._routing
        large_share = left >= routing.disaggregate_share * asked.tokens
        return left >= routing.disaggregate_tokens or (large_share and left >= routing.disaggregate_least)

    def _busy(self, prefilling: Sequence[Seat]) -> bool:
        waiting = sum(map(_prefill_work, prefilling)) * BLOCK_SIZE
        return waiting > self._routing.disaggregate_busy * len(prefilling)

    def _receiving_costs(self, asked: _Asked, prefill: Seat, receiving: Sequence[Seat]) -> list[float]:
        """Nothing is left to compute there; what comes from another node's store comes at the price of the way."""
        if self._routing.policy != "kv":
            return [cost(seat.engine.report, seat.placed.requests) for seat in receiving]
        price, near = 1 - self._routing.store_discount, prefill.engine.report.node
        return [
            _prefill_work(seat)
            + _blocks_after(seat, asked.blocks, reuse)
            + (0.0 if seat.engine.report.node == near else price * (asked.blocks - reuse.device))
            for seat, reuse in zip(receiving, _reuses(asked, receiving), strict=True)
        ]


def _reuses(asked: _Asked, seats: Sequence[Seat]) -> list[Reuse]:
    of, expected = asked.reuses.of, asked.expected
    reuses = [of(engine.life.instance, engine.report.node) for engine, _ in seats]
    if expected is not None:
        for place, (engine, _) in enumerate(seats):
            if engine.life.instance == expected.engine and reuses[place].device < expected.blocks:
                reuses[place] = Reuse(device=expected.blocks)
    return reuses


def _prefill_work(seat: Seat) -> float:
    """Blocks that the engine computes before it gets to one more request."""
    return seat.engine.prefill + seat.placed.prefill


def _prefill_before(seat: Seat, asked: _Asked, reuse: Reuse) -> float:
    """The same for `asked`: what another one's prefill computes for it too is counted as its own, and once."""
    work = _prefill_work(seat)
    expected = asked.expected
    if expected is None or expected.engine != seat.engine.life.instance or reuse is NO_REUSE:
        return work
    return max(0.0, work - expected.blocks)


def _blocks_after(seat: Seat, blocks: int, reuse: Reuse) -> int:
    """Blocks in use, which every decode step reads, once the engine holds a request of `blocks` too.

    What it has of them on its device may be in use already, and is not taken twice.
    """
    used = seat.engine.used + seat.placed.blocks
    return used + blocks - min(reuse.device, used)
