"""Join tokens: read as they were printed, kept without their secrets, and valid for a while."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from deploy.supervisor.cluster.tokens import BadToken, JoinToken, TokenFile

TOKEN = JoinToken("10.0.0.1", 6221, bytes(range(32)), "ab12", "secret")


def test_a_token_is_one_word_and_says_what_it_said() -> None:
    text = TOKEN.text()
    assert text.replace(".", "").replace("_", "").replace("-", "").isalnum()
    assert JoinToken.read(f" {text}\n") == TOKEN


@pytest.mark.parametrize(
    "text", ["", "baton1.", "x", TOKEN.text()[:-4], TOKEN.text() + "A", TOKEN.text()[7:], "baton1.é"]
)
def test_what_is_no_token_or_not_all_of_one_is_refused(text: str) -> None:
    with pytest.raises(BadToken):
        JoinToken.read(text)


def test_a_token_is_valid_until_it_expires_or_is_revoked(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    identity, secret = file.issue(100.0, lifetime=50.0)
    assert file.state_of(identity, secret, 149.0) == "valid"
    assert file.state_of(identity, secret, 150.0) == "expired"
    assert file.state_of(identity, "other", 149.0) == "unknown"
    assert file.state_of("other", secret, 149.0) == "unknown"
    assert file.revoke(identity)
    assert not file.revoke(identity)
    assert file.state_of(identity, secret, 149.0) == "unknown"


def test_the_file_is_its_owners_and_holds_no_secret(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    _, secret = file.issue(100.0, lifetime=50.0)
    assert stat.S_IMODE((tmp_path / "tokens.json").stat().st_mode) == 0o600
    assert secret not in (tmp_path / "tokens.json").read_text()
    file.issue(200.0, lifetime=50.0)
    assert len(file.tokens()) == 1, "the expired one is gone"


def test_a_spoilt_file_lets_nobody_in(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text("{")
    assert TokenFile(tmp_path / "tokens.json").state_of("a", "b", 0.0) == "unknown"
