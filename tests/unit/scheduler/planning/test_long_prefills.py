"""Long prompts beside short ones and beside decodes: who goes first, and that nobody is stopped."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.limits import EngineLimits
from shared.messages.worker import StepPlan
from tests.support.engines.checking_worker import generate, right_output
from tests.support.engines.single_engine import Ring


def prompt(first: int, length: int) -> list[int]:
    """One that shares no block with those of another `first`."""
    return [first, *(4 + position % 20 for position in range(length - 1))]


LONG, OTHER_LONG, SHORT = prompt(4, 200), prompt(5, 200), prompt(6, 20)
LIMITS = EngineLimits(max_batch_tokens=64, max_running=16, run_ahead=0, long_prefill_token_threshold=32)


def counts(ring: Ring, plan: StepPlan) -> dict[str, int]:
    """Tokens of each request in a plan."""
    assert ring.engine.epoch_state is not None
    by_id = ring.engine.epoch_state.queues.by_id
    return {by_id[work.sequence].generation.request: work.count for work in plan.work}


def test_a_short_prompt_is_computed_beside_a_long_one_that_came_before() -> None:
    ring = Ring(LIMITS)
    ring.send(generate("long", LONG, max_tokens=2))
    assert counts(ring, ring.plans[0]) == {"long": 64}
    ring.send(generate("short", SHORT, max_tokens=2))
    ring.step()
    assert counts(ring, ring.plans[0]) == {"short": 20, "long": 44}
    ring.finish()
    for request, asked in (("long", LONG), ("short", SHORT)):
        assert ring.output_of(request) == right_output(generate(request, asked, max_tokens=2), ring.context)[0]


def test_without_a_threshold_it_waits_for_its_turn() -> None:
    ring = Ring(EngineLimits(max_batch_tokens=64, max_running=16, run_ahead=0))
    ring.send(generate("long", LONG, max_tokens=2))
    ring.send(generate("short", SHORT, max_tokens=2))
    ring.step()
    assert counts(ring, ring.plans[0]) == {"long": 64}


def test_short_prompts_leave_a_long_one_its_share() -> None:
    ring = Ring(LIMITS, num_blocks=64)
    ring.send(generate("long", LONG, max_tokens=2))
    for number in range(6):
        ring.send(generate(f"short {number}", prompt(number + 10, 21), max_tokens=1))
    ring.step()
    planned = counts(ring, ring.plans[0])
    assert planned["long"] == 32
    assert sum(planned.values()) == 64


def test_long_prompts_are_computed_one_after_the_other_and_hold_up_no_short_one_behind_them() -> None:
    ring = Ring(LIMITS, num_blocks=64)
    for request, asked in (("first", LONG), ("second", OTHER_LONG), ("short", SHORT)):
        ring.send(generate(request, asked, max_tokens=1))
    ring.step()
    assert counts(ring, ring.plans[0]) == {"short": 20, "first": 44}
    ring.step()
    assert counts(ring, ring.plans[0]) == {"first": 64}


def test_a_target_makes_chunks_smaller_as_soon_as_somebody_decodes() -> None:
    limits = EngineLimits(max_batch_tokens=128, max_running=16, run_ahead=0, plan_late=False, itl_target=0.010)
    ring = Ring(limits, num_blocks=64)

    def step() -> dict[str, int]:
        plan = ring.plans[0]
        ring.now += 0.0001 * sum(counts(ring, plan).values())
        ring.step()
        return counts(ring, ring.plans[0]) if ring.plans else {}

    ring.send(generate("decoding", SHORT, max_tokens=20, ignore_eos=True))
    step()
    ring.send(generate("prompt", LONG, max_tokens=1))
    chunks = []
    while "decoding" in (planned := step()):
        chunks.append(planned.get("prompt", 0))
    assert [chunk for chunk in chunks if chunk]
    assert all(chunk <= 105 for chunk in chunks), "100 tokens take as long as the target"


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 120), st.integers(1, 3)), min_size=1, max_size=12),
    st.integers(0, 40),
    st.sampled_from([None, 0.001, 0.1]),
    st.integers(16, 80),
)
def test_every_request_gets_what_it_would_without_a_threshold_or_a_target(
    requests: list[tuple[int, int]], threshold: int, target: float | None, budget: int
) -> None:
    limits = EngineLimits(
        max_batch_tokens=budget, max_running=8, long_prefill_token_threshold=threshold, itl_target=target
    )
    ring = Ring(limits, num_blocks=64)
    asked = [
        generate(f"r{number}", prompt(number + 4, length), max_tokens=most)
        for number, (length, most) in enumerate(requests)
    ]
    for each in asked:
        ring.send(each)
    while ring.plans:
        ring.now += 0.01
        ring.step()
    for each in asked:
        assert ring.output_of(each.generation.request) == right_output(each, ring.context)[0]
