"""The router as it was before it kept engines in order: what its choices are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.actions import Placement
from services.coordinator.core.engine_pool import DECODING, PREFILLING, Candidate, EngineLoad, cost
from services.coordinator.core.fleet import EngineFleet, fits
from services.coordinator.core.kv_sources import NO_REUSE, KvSources, Reuse
from services.coordinator.core.outliers import ACCUSED, RatedEngine, choose_ejected
from services.coordinator.core.reservations import ExpectedPrompts, PromptPrefix
from services.coordinator.core.router import (
    SATURATION_SLACK,
    TieBreak,
    _blocks_after,
    _reuses,
    _RoutedRequest,
    chance,
    pick,
)
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.blocks import blocks_for
from shared.messages.generation import Generation
from shared.packing import TOKEN_BYTES


class ExhaustiveRouter:
    """Looks at every engine for each request, from what the fleet was told; keeps nothing."""

    def __init__(
        self, fleet: EngineFleet, sources: KvSources, expected: ExpectedPrompts, config: CoordinatorConfig
    ) -> None:
        self._fleet = fleet
        self._sources = sources
        self._expected = expected
        self._config = config
        self._draws = config.router_policy == "random" or (
            config.router_policy == "kv" and config.router_temperature > 0
        )
        """Whether chance decides."""

    def choose(self, generation: Generation, now: float) -> Placement | None:
        """Where the request goes best; None where no engine, or no detokenizer, takes one more."""
        candidates = self._decode_candidates(generation)
        detokenizer = self._fleet.choose_detokenizer(generation.model)
        if not candidates or detokenizer is None:
            return None
        request = self._describe(generation, now)
        engine, reuse = self._cheapest(request, candidates, "decode")
        split = self._disaggregate(request, reuse, candidates)
        if split is None:
            return Placement(engine.engine.id, detokenizer, request.prefix, reuse, request.blocks)
        prefill, reuse, decode = split
        return Placement(
            prefill.engine.id,
            detokenizer,
            request.prefix,
            reuse,
            request.blocks,
            decode_on=decode.engine.id,
            decode_node=None if decode.node == prefill.node else decode.node,
        )

    def _describe(self, generation: Generation, now: float) -> _RoutedRequest:
        """The last token is always computed, as the next is drawn from it; so a block that ends with it is computed,
        too. A prompt whose log-probabilities are requested is computed as a whole."""
        tokens = len(generation.tokens) // TOKEN_BYTES
        scored = generation.sampling.prompt_logprobs is not None and tokens == generation.prompt_length
        computed = scored or not generation.prefix_caching
        reusable = 0 if computed else (tokens - 1) // BLOCK_SIZE
        hits = self._sources.hits(generation.model, generation.block_hashes, reusable)
        prefix = PromptPrefix.of(generation, 16)
        shares = self._config.router_policy == "kv" and not computed
        expected = self._expected.engine_for(prefix, now) if shares else None
        return _RoutedRequest(generation, prefix, tokens, blocks_for(tokens, BLOCK_SIZE), hits, expected)

    def _decode_candidates(self, generation: Generation) -> list[Candidate]:
        fitting = [e for e in self._ready(generation) if fits(generation, e.report.model.max_model_len)]
        preferred = [engine for engine in fitting if engine.id not in generation.avoid] or fitting
        return self._candidates([e for e in preferred if e.report.role in DECODING] or preferred, generation)

    def _prefill_candidates(self, generation: Generation) -> list[Candidate]:
        able = [
            engine
            for engine in self._ready(generation)
            if engine.report.role in PREFILLING
            and engine.id not in generation.avoid
            and fits(generation, engine.report.model.max_model_len)
        ]
        return self._candidates(able, generation)

    def _ready(self, generation: Generation) -> list[EngineLoad]:
        fleet = self._fleet
        serving = fleet._serving(generation.model)
        accused = fleet._accused
        rated = [RatedEngine(e.instance, ACCUSED if e.instance in accused else e.report.health) for e in serving]
        ejected = choose_ejected(rated, self._config.max_ejected_share)
        return sorted((each for each in serving if each.instance not in ejected), key=lambda each: each.id)

    def _candidates(self, engines: list[EngineLoad], generation: Generation) -> list[Candidate]:
        made = (self._fleet._candidate(engine, fair=bool(generation.key)) for engine in engines)
        return [candidate for candidate in made if candidate is not None]

    # ---- one engine

    def _cheapest(
        self, request: _RoutedRequest, candidates: Sequence[Candidate], purpose: str
    ) -> tuple[Candidate, Reuse]:
        """The candidate that the policy picks, and what it need not compute of the request."""
        reuses = _reuses(request, candidates)
        chosen = self._pick(request, self._costs(request, candidates, reuses), purpose)
        return candidates[chosen], reuses[chosen]

    def _costs(self, request: _RoutedRequest, candidates: Sequence[Candidate], reuses: Sequence[Reuse]) -> list[float]:
        """One that is saturated (it holds too many requests, or runs as many as it can) does not win by what it has
        cached. Where all are, none is."""
        if self._config.router_policy != "kv":
            return [cost(candidate.engine.report, candidate.reserved.requests) for candidate in candidates]
        blocks, discount = request.blocks, self._config.router_store_discount
        loads = [candidate.requests for candidate in candidates]
        bound = self._config.router_saturation * sum(loads) / len(loads) + SATURATION_SLACK
        saturated = [
            load > bound or load - candidate.engine.report.waiting >= candidate.engine.report.max_running
            for load, candidate in zip(loads, candidates, strict=True)
        ]
        some = not all(saturated)
        costs = []
        for candidate, reuse, full in zip(candidates, reuses, saturated, strict=True):
            counted, before = reuse, candidate.prefill
            if full and some:
                counted = NO_REUSE
            elif candidate.engine.id == request.expected:
                # It computes the same prompt already: that is counted as this request's own reuse, and only once.
                before = max(0.0, before - request.prefix.blocks)
            left, slowdown = before + blocks - counted.worth(discount), candidate.engine.slowdown
            costs.append(slowdown.prefill * left + slowdown.decode * _blocks_after(candidate, blocks, counted))
        return costs

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
        self, request: _RoutedRequest, local: Reuse, candidates: Sequence[Candidate]
    ) -> tuple[Candidate, Reuse, Candidate] | None:
        """The engine that prefills, with what reuse, and the engine that decodes; None where the request is better
        kept in one place, which would have the reuse `local`.

        Blocks pass through KV stores by their names, so both engines need one on their node, and a request without
        prefix caching stays in one place.
        """
        if not request.generation.prefix_caching:
            return None
        config, left = self._config, request.tokens - local.blocks * BLOCK_SIZE
        large_share = left >= config.disaggregate_share * request.tokens
        if left < config.disaggregate_tokens and not (large_share and left >= config.disaggregate_least):
            return None
        prefilling = [each for each in self._prefill_candidates(request.generation) if each.node is not None]
        decoding = [each for each in candidates if each.node is not None and each.engine.report.role in DECODING]
        if not prefilling or not decoding:
            return None
        waiting = sum(candidate.prefill for candidate in prefilling) * BLOCK_SIZE
        if waiting > config.disaggregate_busy * len(prefilling):
            return None
        prefill, reuse = self._cheapest(request, prefilling, "prefill")
        costs = self._hand_over_costs(request, prefill, decoding)
        return prefill, reuse, decoding[self._pick(request, costs, "hand-over")]

    def _hand_over_costs(
        self, request: _RoutedRequest, prefill: Candidate, decoding: Sequence[Candidate]
    ) -> list[float]:
        """Nothing is left to compute there; blocks from another node's store cost what their way is taken to cost."""
        if self._config.router_policy != "kv":
            return [cost(candidate.engine.report, candidate.reserved.requests) for candidate in decoding]
        price = 1 - self._config.router_store_discount
        costs = []
        for candidate, reuse in zip(decoding, _reuses(request, decoding), strict=True):
            slowdown = candidate.engine.slowdown
            way = 0.0 if candidate.node == prefill.node else price * (request.blocks - reuse.device)
            after = _blocks_after(candidate, request.blocks, reuse)
            costs.append(slowdown.prefill * (candidate.prefill + way) + slowdown.decode * after)
        return costs
