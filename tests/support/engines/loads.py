"""What engines that share a store must have computed, whatever they loaded."""

from __future__ import annotations

from shared.messages.scheduler import GenerateRequest
from tests.support.engines.checking_worker import right_output
from tests.support.engines.engines_and_store import EnginesAndStore


def computed(engines: EnginesAndStore, name: str) -> int:
    """Rows of all plans of an engine."""
    return sum(work.count for plan in engines[name].sent_plans for work in plan.work)


def expect_right(engines: EnginesAndStore, asked: GenerateRequest) -> None:
    """The stream is that of a single engine."""
    stream = engines.stream(asked.generation.request)
    assert (stream.tokens, stream.finish) == right_output(asked, 256)


def assert_failed_load_leaves_cached(
    engines: EnginesAndStore, whole: GenerateRequest, begun: GenerateRequest, asked: GenerateRequest
) -> None:
    """`p` has computed the 200 tokens of `whole`, `d` the first 97 of them, `begun`. A load of `asked`, which has the
    same prompt, fails on `d`: it computes what is behind the blocks of its own."""
    engines["p"].send(whole)
    engines["d"].send(begun)
    engines.settle()
    before = computed(engines, "d")
    engines["d"].send(asked)
    engines.until(lambda: "loading" in engines["d"].phases)
    while not engines["d"].copy(fails=True):
        engines["d"].step()
    engines.settle()
    expect_right(engines, asked)
    assert computed(engines, "d") - before == 200 - 96 + 19
    engines.check_nothing_is_held()
