"""`baton plan`: what it says of a decision, and of bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from deploy.cli.app import loaded
from deploy.cli.plan import sentence
from deploy.errors import CommandError
from shared.messages.supervisor import PlannerDecision, PoolDecision

DECISION = PlannerDecision(
    at=1.0,
    observed_rate=6.4,
    predicted_rate=7.875,
    backlog=3,
    prompt_tokens=46.2,
    cached_tokens=0.0,
    output_tokens=20.0,
    observed_ttft=0.0921,
    observed_itl=None,
    ttft_correction=1.1,
    itl_correction=1.0,
    forecast_ttft=0.2,
    forecast_itl=0.03,
    suffices=True,
    pools=(PoolDecision(role="mixed", present=1, wanted=2, target=2, reason="as wanted"),),
    acts=True,
)


def test_a_decision_is_one_line_with_its_numbers() -> None:
    assert sentence(DECISION)[9:] == (
        "6.40 req/s, 7.88 expected (46 tokens in, 20 out), 3 wait; TTFT 92 ms, ITL - (live profile × 1.10, 1.00); "
        "mixed 1 → 2 (2 wanted: as wanted)"
    )
    assert sentence(replace(DECISION, acts=False)).endswith("; dry run, see --act")
    beyond = sentence(replace(DECISION, profile="none", profile_note="prompts are too long"))
    assert "(no profile × 1.10" in beyond
    assert beyond.endswith("; prompts are too long")
    assert "do not allow what the targets need" in sentence(replace(DECISION, suffices=False))


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ((), "--ttft-ms, --itl-ms: at least one target is needed"),
        (("--itl-ms", "9", "--max-engines", "1", "--min-engines", "2"), "--max-engines 1"),
        (("--itl-ms", "9", "--load-predictor", "seasonal", "--season-s", "60"), "at least 10 are needed"),
        (("--itl-ms", "9", "--profile", "none.json"), "--profile none.json: No such file or directory"),
        (("--itl-ms", "9"), "no stack runs in"),
    ],
)
def test_bad_input_is_explained_in_one_line(argv: tuple[str, ...], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError) as failed:
        loaded("plan").main([*argv, "--run-dir", str(tmp_path)], standalone_mode=False)
    assert complaint in str(failed.value)
    assert "\n" not in str(failed.value)
