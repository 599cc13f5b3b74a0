"""What is left of log lines and settings when secrets and texts are out."""

from __future__ import annotations

import json

import pytest

from deploy.cli.diagnosis.redaction import (
    PLACEHOLDER,
    own_events,
    redacted_line,
    redacted_settings,
    secrets_in,
    without,
)

SETTINGS = {
    "api_keys": ["sk-abcdef"],
    "nats_passwords": {"gateway": "pass-1", "worker": "pass-2"},
    "store": {"redis": {"url": "redis://user:pass-3@host:6379/0"}},
    "settings": {"*": {"cluster_token": "token-4", "keys_file": "/etc/keys.toml", "max_batch_tokens": "16384"}},
    "nats_url": ["nats://127.0.0.1:4222"],
    "otlp_traces_endpoint": "http://me:pass-5@collector:4318/v1/traces",
    "database": "postgresql://me:pass-6@host/name",
    "password": None,
}


def test_secrets_go_by_their_names_and_out_of_urls() -> None:
    shown = redacted_settings(SETTINGS)
    text = json.dumps(shown)
    assert "pass-" not in text
    assert "abcdef" not in text
    assert "token-4" not in text
    assert shown["store"]["redis"]["url"] == f"redis://{PLACEHOLDER}@host:6379/0"
    assert shown["settings"]["*"] == {
        "cluster_token": PLACEHOLDER,
        "keys_file": "/etc/keys.toml",
        "max_batch_tokens": "16384",
    }
    assert shown["nats_url"] == ["nats://127.0.0.1:4222"]
    assert shown["password"] is None


def test_secrets_are_known_so_that_they_are_found_elsewhere() -> None:
    secrets = set(secrets_in(SETTINGS))
    assert secrets == {"sk-abcdef", "token-4", *(f"pass-{number}" for number in (1, 2, 3, 5, 6))}
    assert without("a sk-abcdef b pass-3", secrets) == f"a {PLACEHOLDER} b {PLACEHOLDER}"


def test_a_log_line_keeps_its_numbers_its_event_and_names() -> None:
    line = {"time": "2026-11-26T12:00:00.000Z", "level": "info", "service": "gateway", "event": "audit", "status": 200}
    more = {
        "request": "chatcmpl-1",
        "trace": "4bf9",
        "key": "bob",
        "client": "10.0.0.1",
        "duration": 0.5,
        "error": None,
    }
    assert json.loads(redacted_line(json.dumps({**line, **more}))) == {
        **line,
        **more,
        "key": "(3 characters removed)",
        "client": "(8 characters removed)",
    }


@pytest.mark.parametrize("field", ["event", "model", "request", "reason", "text"])
def test_a_sentence_is_no_name(field: str) -> None:
    shown = json.loads(redacted_line(json.dumps({field: "tell me how the heron found all of the pearls"})))
    assert shown == {field: "(45 characters removed)"}


def test_texts_are_found_at_any_depth() -> None:
    shown = redacted_line(json.dumps({"parts": [{"text": "a pearl", "count": 3, "engine": "engine-1"}]}))
    assert json.loads(shown) == {"parts": [{"text": "(7 characters removed)", "count": 3, "engine": "engine-1"}]}


def test_a_traceback_keeps_its_frames_and_the_exceptions_class() -> None:
    frames = 'Traceback (most recent call last):\n  File "/a/b.py", line 7, in f'
    said = f"{frames}\n    raise KeyError(prompt)\nKeyError: pearls"
    shown = json.loads(redacted_line(json.dumps({"error": said})))["error"]
    assert shown.splitlines()[:2] == said.splitlines()[:2]
    assert shown.splitlines()[-1] == "KeyError: (removed)"
    assert "pearls" not in shown


def test_what_is_no_json_goes_but_for_its_length() -> None:
    assert redacted_line("the heron has pearls") == "(20 characters removed)"
    assert redacted_line('"the heron has pearls"') == "(22 characters removed)"


def test_events_are_those_of_the_code() -> None:
    assert {"audit", "phase", "startup", "engine suspect", "ended", "bus away"} <= own_events()
