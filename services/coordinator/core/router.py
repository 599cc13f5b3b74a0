"""Which engine a request goes to, and whether another one prefills it. Costs are in blocks of work.

cost = prefill blocks still to compute there (the request's own, and those that wait) + decode blocks in use

as NVIDIA Dynamo's KV router has it; blocks in KV stores, saturation and the hand-over are ours. Blocks are the median
engine's: where one takes twice as long it has twice the work (`engine_slowdowns`), so that costs are seconds, but for
one constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple, assert_never

from services.coordinator.config import CoordinatorConfig, Policy
from services.coordinator.core.actions import Placement
from services.coordinator.core.engine_pool import DECODING, Candidate, EnginePool, requests_of
from services.coordinator.core.fleet import EngineFleet
from services.coordinator.core.kv_sources import NO_REUSE, KvSources, PrefixHits, Reuse
from services.coordinator.core.link_costs import LinkCosts
from services.coordinator.core.reservations import ExpectedPrompts, PromptPrefix
from shared.blocks import blocks_for
from shared.ids import Attempt, DetokenizerId, EngineId, RequestId
from shared.messages.generation import Generation
from shared.packing import TOKEN_BYTES

SATURATION_SLACK = 4
"""Requests beyond the mean that are no saturation: a step takes about as long for a handful as for one."""

LORA_LOAD_BLOCKS = 8.0
"""What a request's adapter costs where the engine has it in no slot, in blocks that it would compute meanwhile."""


class TieBreak(NamedTuple):
    """Breaks ties between equal costs. Chance is a function of the request: cores draw no random numbers."""

    turn: int
    chance: float
    """In [0, 1)."""


class _RoutedRequest(NamedTuple):
    """The properties of a request on which the choice of its engine depends."""

    generation: Generation
    prefix: PromptPrefix
    tokens: int
    blocks: int
    hits: PrefixHits
    expected: EngineId | None
    """The engine that was given the same prompt a moment ago, and holds all of `prefix` soon."""


class Router:
    """Chooses the engines of a request by what the fleet, the KV sources and the expected prompts show.

    Owns nothing: the coordinator, which owns these three, changes them.
    """

    def __init__(
        self,
        fleet: EngineFleet,
        sources: KvSources,
        expected: ExpectedPrompts,
        links: LinkCosts,
        config: CoordinatorConfig,
    ) -> None:
        self._fleet = fleet
        self._links = links
        self._sources = sources
        self._expected = expected
        self._config = config
        self._draws = config.router_policy == "random" or (
            config.router_policy == "kv" and config.router_temperature > 0
        )
        """Whether chance decides."""

    def choose(self, generation: Generation, now: float, *, whole: bool = False) -> Placement | None:
        """The best engine for the request; None where no engine, or no detokenizer, has room. `whole`: one engine must
        do all of it."""
        pool = self._fleet.decode_candidates(generation)
        detokenizer = self._fleet.choose_detokenizer(generation.model)
        if not pool or detokenizer is None:
            return None
        request = self._describe(generation, now)
        engine, reuse = self._cheapest(request, pool, "decode")
        split = None if whole else self._disaggregate(request, reuse, pool)
        if split is None:
            return Placement(engine.engine.id, detokenizer, request.prefix, reuse, request.blocks)
        prefill, reuse, decode = split
        if self._config.pd_order == "decode-first":
            return Placement(
                decode.engine.id,
                detokenizer,
                request.prefix,
                _reuses(request, [decode])[0],
                request.blocks,
                prefill_on=prefill.engine.id,
                remote_from=self._least_remote(request),
            )
        return _divided(request, detokenizer, prefill, reuse, decode)

    def tokens_to_prefill(self, generation: Generation, now: float) -> int | None:
        """Tokens that a prefill engine would compute of a request that is to be divided between two engines; None where
        it is not, or where nothing takes it."""
        pool = self._fleet.decode_candidates(generation)
        if not pool or not generation.prefix_caching or not self._decoding(pool):
            return None
        request = self._describe(generation, now)
        _, reuse = self._cheapest(request, pool, "decode")
        left = request.tokens - reuse.blocks * self._config.block_size
        return left if left >= self._least_remote(request) else None

    def choose_pulled(self, generation: Generation, now: float, room: Callable[[EngineId], int]) -> Placement | None:
        """The engine that computes the prompt, of those that have asked for prompts (`room`: how many tokens each asked
        for): the one that has most of it cached, then the one with most room. A request that is computed sooner than
        handed over goes to one engine whole. None if no engine has asked, or no engine could decode it afterwards."""
        detokenizer = self._fleet.choose_detokenizer(generation.model)
        decoding = self._decoding(self._fleet.decode_candidates(generation))
        asking = [each for each in self._fleet.prefill_candidates(generation) if room(each.engine.id) > 0]
        if not decoding or not asking or detokenizer is None:
            return None
        request, discount = self._describe(generation, now), self._config.router_store_discount
        reuses = _reuses(request, asking)
        worth = [reuse.worth(discount) if self._config.router_policy == "kv" else 0.0 for reuse in reuses]
        place = max(range(len(asking)), key=lambda index: (worth[index], room(asking[index].engine.id)))
        prefill = asking[place]
        costs = self._hand_over_costs(request, prefill, reuses[place], decoding)
        if min(costs) == math.inf:
            return self.choose(generation, now, whole=True)
        decode = decoding[self._pick(request, costs, "hand-over")]
        return _divided(request, detokenizer, prefill, reuses[place], decode)

    def _decoding(self, pool: EnginePool) -> list[Candidate]:
        """The engines of the pool that may continue a request."""
        return [each for each in pool if each.node is not None and each.engine.report.role in DECODING]

    def _describe(self, generation: Generation, now: float) -> _RoutedRequest:
        """The last token is always computed, as the next is drawn from it; so a block that ends with it is computed,
        too. A prompt whose log-probabilities are requested, or all of whose
        tokens are pooled, is computed as a whole."""
        tokens, size = len(generation.tokens) // TOKEN_BYTES, self._config.block_size
        scored = generation.sampling.prompt_logprobs is not None and tokens == generation.prompt_length
        pools_all = generation.pooling is not None and generation.pooling.computes_all
        computed = scored or pools_all or not generation.prefix_caching
        reusable = 0 if computed else (tokens - 1) // size
        hits = self._sources.hits(generation.model, generation.block_hashes, reusable)
        prefix = PromptPrefix.of(generation, size)
        shares = self._config.router_policy == "kv" and not computed
        expected = self._expected.engine_for(prefix, now) if shares else None
        return _RoutedRequest(generation, prefix, tokens, blocks_for(tokens, size), hits, expected)

    # ---- one engine

    def _cheapest(self, request: _RoutedRequest, pool: EnginePool, purpose: str) -> tuple[Candidate, Reuse]:
        """The candidate that the policy picks, and how much of the request it need not compute."""
        if self._config.router_policy != "kv":
            equals = list(pool) if self._draws else pool.least()
            chosen = equals[self._pick(request, [0.0] * len(equals), purpose)]
            return chosen, self._priced_reuses(request, [chosen])[0]
        bound = self._config.router_saturation * pool.requests / len(pool) + SATURATION_SLACK
        looked_at = self._candidates_of(request, pool, bound)
        reuses = self._priced_reuses(request, looked_at)
        costs = self._costs(request, pool, looked_at, reuses, bound)
        order = sorted(range(len(costs)), key=lambda index: looked_at[index].engine.id)
        place = order[self._pick(request, [costs[index] for index in order], purpose)]
        return looked_at[place], reuses[place]

    def _candidates_of(self, request: _RoutedRequest, pool: EnginePool, bound: float) -> list[Candidate]:
        """The candidates that have some of the request cached, and the least loaded of the others (one of each node, if
        KV stores have some of it). All candidates if the policy gives each of them a chance."""
        if self._draws:
            return list(pool)
        names = {EngineId(instance) for instance in request.hits.engines}
        if request.expected is not None:
            names.add(request.expected)
        if request.generation.lora is not None:
            names.update(each.engine.id for each in pool if request.generation.lora in each.engine.report.loras)
        holders = [candidate for name in names if (candidate := pool.get(name)) is not None]
        if request.hits.stores:
            return holders + pool.least_by_node(names, lambda candidate: _is_saturated(candidate, bound))
        return holders + pool.least(names)

    def _costs(
        self,
        request: _RoutedRequest,
        pool: EnginePool,
        candidates: Sequence[Candidate],
        reuses: Sequence[Reuse],
        bound: float,
    ) -> list[float]:
        """Costs of the candidates. For a saturated engine (it holds too many requests, or runs as many as it can)
        cached blocks do not count. If all engines of the pool are saturated, none counts as such."""
        saturated = [_is_saturated(candidate, bound) for candidate in candidates]
        if any(saturated) and all(_is_saturated(candidate, bound) for candidate in pool.by_work()):
            saturated = [False] * len(candidates)
        return [
            self._cost(request, candidate, NO_REUSE if full else reuse, full=full)
            for candidate, reuse, full in zip(candidates, reuses, saturated, strict=True)
        ]

    def _cost(self, request: _RoutedRequest, candidate: Candidate, reuse: Reuse, *, full: bool = False) -> float:
        before, blocks = candidate.prefill, request.blocks
        if candidate.engine.id == request.expected and not full:
            # It computes the same prompt already: that is counted as this request's own reuse, and only once.
            before = max(0.0, before - request.prefix.blocks)
        worth, slowdown = reuse.worth(self._config.router_store_discount), candidate.engine.slowdown
        lora = request.generation.lora
        if lora is not None and lora not in candidate.engine.report.loras:
            before += LORA_LOAD_BLOCKS
        return slowdown.prefill * (before + blocks - worth) + slowdown.decode * _blocks_after(candidate, blocks, reuse)

    def _priced_reuses(self, request: _RoutedRequest, candidates: Sequence[Candidate]) -> list[Reuse]:
        """For each candidate the blocks of the request that it need not compute. Blocks that are computed sooner than
        they come from another node do not count."""
        reuses = _reuses(request, candidates)
        for index, (candidate, reuse) in enumerate(zip(candidates, reuses, strict=True)):
            price = self._links.price(candidate, reuse.remote_node, reuse.remote) if reuse.remote else None
            if price is not None and price < reuse.remote:
                reuses[index] = reuse._replace(remote_price=price)
            elif price is not None:
                reuses[index] = reuse._replace(remote=0, remote_node=None)
        return reuses

    def _pick(self, request: _RoutedRequest, costs: Sequence[float], purpose: str) -> int:
        """If costs are equal, rotation decides. Several coordinators may place choices of one request at the same
        moment, before they receive each other's placements: they decide by the prompt, which is the same for all of
        them."""
        generation, prefix, turn = request.generation, request.prefix, self._fleet.turn
        if self._config.router_policy == "kv" and prefix.blocks and self._fleet.peers:
            turn = int.from_bytes(prefix.last_block[:8])
        drawn = chance(generation.request, generation.attempt, purpose) if self._draws else 0.0
        return pick(self._config.router_policy, costs, self._config.router_temperature, TieBreak(turn, drawn))

    # ---- two engines

    def _disaggregate(
        self, request: _RoutedRequest, local: Reuse, pool: EnginePool
    ) -> tuple[Candidate, Reuse, Candidate] | None:
        """The engine that prefills, with what reuse, and the engine that decodes; None where the request is better
        kept in one place, which would have the reuse `local`.

        Blocks pass through KV stores by their names, so both engines need one on their node, and a request without
        prefix caching stays in one place.
        """
        if not request.generation.prefix_caching:
            return None
        config = self._config
        left = request.tokens - local.blocks * config.block_size
        if left < self._least_remote(request):
            return None
        prefilling = self._fleet.prefill_candidates(request.generation)
        if not prefilling:
            return None
        decoding = self._decoding(pool)
        if not decoding:
            return None
        waiting = sum(candidate.prefill for candidate in prefilling) * config.block_size
        if waiting > config.disaggregate_busy * len(prefilling):
            return None
        prefill, reuse = self._cheapest(request, prefilling, "prefill")
        costs = self._hand_over_costs(request, prefill, reuse, decoding)
        if min(costs) == math.inf:
            return None
        return prefill, reuse, decoding[self._pick(request, costs, "hand-over")]

    def _least_remote(self, request: _RoutedRequest) -> int:
        """The tokens left to compute from which on another engine computes them."""
        config = self._config
        large_share = max(config.disaggregate_least, math.ceil(config.disaggregate_share * request.tokens))
        return min(config.disaggregate_tokens, large_share)

    def _hand_over_costs(
        self, request: _RoutedRequest, prefill: Candidate, computed: Reuse, decoding: Sequence[Candidate]
    ) -> list[float]:
        """The cost of decoding there, where nothing is left to compute. Blocks from another node's store cost what
        their transfer takes beyond the prefill, or is assumed to. Infinite if computing them again there would be
        sooner."""
        if self._config.router_policy != "kv":
            return [requests_of(candidate) for candidate in decoding]
        left = request.blocks - computed.blocks
        return [
            self._hand_over_cost(candidate, prefill, request.blocks, left, reuse)
            for candidate, reuse in zip(decoding, self._priced_reuses(request, decoding), strict=True)
        ]

    def _hand_over_cost(self, candidate: Candidate, prefill: Candidate, blocks: int, left: int, reuse: Reuse) -> float:
        slowdown = candidate.engine.slowdown
        way = 0.0 if candidate.node == prefill.node else self._way(candidate, prefill, blocks, left, reuse)
        return slowdown.prefill * (candidate.prefill + way) + slowdown.decode * _blocks_after(candidate, blocks, reuse)

    def _way(self, candidate: Candidate, prefill: Candidate, blocks: int, left: int, reuse: Reuse) -> float:
        """The cost of sending a prompt's blocks to the node that decodes it, in units of computing a block. They are
        sent while the `left` blocks are computed, so only the rest is waited for: at least the transfer of one
        block."""
        wanted = blocks - reuse.device - reuse.stored
        price = self._links.price(candidate, prefill.node, wanted)
        if price is None:
            return (1 - self._config.router_store_discount) * (blocks - reuse.device)
        waited_for = max(price / max(1, wanted), price - left)
        return waited_for if waited_for < max(1, wanted) else math.inf


def _divided(
    request: _RoutedRequest, detokenizer: DetokenizerId, prefill: Candidate, reuse: Reuse, decode: Candidate
) -> Placement:
    return Placement(
        prefill.engine.id,
        detokenizer,
        request.prefix,
        reuse,
        request.blocks,
        decode_on=decode.engine.id,
        decode_node=None if decode.node == prefill.node else decode.node,
    )


def _reuses(request: _RoutedRequest, candidates: Sequence[Candidate]) -> list[Reuse]:
    """For each candidate what it need not compute of the request, soon to be held blocks counted."""
    reuses = request.hits.reuses([(candidate.engine.instance, candidate.node) for candidate in candidates])
    if request.expected is not None:
        for index, candidate in enumerate(candidates):
            if candidate.engine.id == request.expected and reuses[index].device < request.prefix.blocks:
                reuses[index] = Reuse(device=request.prefix.blocks)
    return reuses


def _is_saturated(candidate: Candidate, bound: float) -> bool:
    report = candidate.engine.report
    return candidate.requests > bound or candidate.requests - report.waiting >= report.max_running


def _blocks_after(candidate: Candidate, blocks: int, reuse: Reuse) -> int:
    """Blocks in use, which every decode step reads, once the engine holds a request of `blocks` too.

    What it has of them on its device may be in use already, and is not counted twice.
    """
    return candidate.used + blocks - min(reuse.device, candidate.used)


def chance(request: RequestId, attempt: Attempt, purpose: str) -> float:
    """A number in [0, 1), equally distributed over requests, and another one for each attempt and `purpose`."""
    digest = blake2b(f"{request}\0{attempt}\0{purpose}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53


def pick(policy: Policy, costs: Sequence[float], temperature: float, tie_break: TieBreak) -> int:
    """The index of the one chosen. `costs` are in an order that is the same at each call, and not empty."""
    match policy:
        case "kv" if temperature > 0:
            return _draw(costs, temperature, tie_break.chance)
        case "kv" | "least-loaded":
            least = min(costs)
            equals = [index for index, cost in enumerate(costs) if cost == least]
            return equals[tie_break.turn % len(equals)]
        case "round-robin":
            return tie_break.turn % len(costs)
        case "random":
            return int(tie_break.chance * len(costs))
        case _:
            assert_never(policy)


def _draw(costs: Sequence[float], temperature: float, chance: float) -> int:
    """Softmax over costs scaled to [0, 1]: the cheapest is exp(1 / temperature) times as likely as the dearest."""
    least, most = min(costs), max(costs)
    scale = temperature * (most - least or 1.0)
    weights = [math.exp((least - cost) / scale) for cost in costs]
    left = chance * sum(weights)
    for index, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return index
    return len(costs) - 1
