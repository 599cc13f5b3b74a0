"""Whatever drafting costs and brings, however steps waver: it is hardly ever slower than none, and mostly about as fast
as the best number of drafts."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.scheduler.planning.test_speculation import Engine

seconds = st.floats(1e-5, 2e-3)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sequences=st.sampled_from([1, 2, 8, 24]),
    acceptance=st.floats(0.0, 0.95),
    fixed=st.floats(3e-4, 5e-3),
    row=seconds,
    asking=seconds,
    draft=seconds,
    noise=st.floats(0.0, 0.3),
)
@example(sequences=24, acceptance=0.0, fixed=0.001, row=2e-05, asking=0.002, draft=0.002, noise=0.1)
@example(sequences=24, acceptance=0.0, fixed=0.001, row=2e-05, asking=0.002, draft=0.002, noise=0.0)
def test_drafting_is_hardly_ever_slower_than_none(
    sequences: int, acceptance: float, fixed: float, row: float, asking: float, draft: float, noise: float
) -> None:
    engine = Engine(sequences, 4, fixed=fixed, row=row, acceptance=acceptance, asking=asking, draft=draft, noise=noise)
    engine.run(1000)
    rate, _ = engine.run(2000)
    assert rate > 0.94 * engine.rate_of(0)
    assert rate > 0.85 * max(engine.rate_of(drafts) for drafts in range(5))
