"""Lists of API keys: what they say, what is refused, and what the settings' own keys may do."""

from __future__ import annotations

import pytest

from services.gateway.core.api_keys import (
    MIN_PRIORITY,
    SCOPES,
    KeyEntry,
    KeyFileError,
    KeyName,
    KeyRing,
    entry_text,
    hashed_key,
    keys_of_settings,
    read_keys,
)
from shared.ids import ModelName

HASH = hashed_key(b"a secret")
OTHER = hashed_key(b"another one")


def entry(name: str, hashed: str = HASH, more: str = "") -> str:
    return f'[keys.{name}]\nhash = "{hashed}"\n{more}\n'


def test_a_key_is_found_by_what_the_client_sends_and_kept_as_a_hash_only() -> None:
    ring = KeyRing(read_keys(entry("alice") + entry("bob", OTHER)))
    found = ring.find(b"another one")
    assert found is not None
    assert found.name == "bob"
    assert ring.find(b"a third one") is None
    assert ring.find(HASH.encode()) is None
    assert b"a secret" not in repr(vars(ring)).encode()


def test_without_more_a_key_may_generate_with_every_model_and_go_before_nobody() -> None:
    ((_, key),) = read_keys(entry("alice"))
    assert [scope for scope in SCOPES if key.allows(scope)] == ["inference", "read-only"]
    assert key.allows_model(ModelName("any"))
    assert key.priority_ceiling == 0


def test_an_entry_is_read_as_it_was_written() -> None:
    made = KeyEntry(hash=HASH, scopes=("admin", "inference"), models=(ModelName('a "b"'),), priority_ceiling=-5)
    ((hashed, key),) = read_keys(entry_text(KeyName("alice"), made))
    assert hashed == HASH
    assert key == made.key(KeyName("alice"))
    assert not key.allows_model(ModelName("b"))


def test_keys_of_the_settings_may_do_everything() -> None:
    keys = dict(keys_of_settings(["plain", "second", f"ci={OTHER}"]))
    assert [key.name for key in keys.values()] == ["default", "default-2", "ci"]
    assert keys[hashed_key(b"plain")].scopes == set(SCOPES)
    assert keys[OTHER].priority_ceiling == MIN_PRIORITY


def test_salts_of_two_keys_differ_whatever_their_clients_send() -> None:
    keys = [key for _, key in read_keys(entry("a") + entry("a-b", OTHER))]
    salts = {key.salt(given) for key in keys for given in (None, "b", "-b", "a/", "/b")}
    assert len(salts) == 10


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[keys.alice", "not valid TOML"),
        ("port = 8000", "port: unknown"),
        ("keys = 3", "keys: tables"),
        ("keys.alice = 3", r"keys\.alice: "),
        ("[keys.alice]", r"keys\.alice: .*hash"),
        (entry("alice", "sha256:12"), r"keys\.alice: .*hash"),
        (entry("alice", more='scopes = ["root"]'), r"keys\.alice: .*scopes"),
        (entry("alice", more="scopes = []"), r"keys\.alice: .*scopes"),
        (entry("alice", more="scope = []"), r"keys\.alice: .*\bscope\b"),
        (entry("alice", more="priority_ceiling = 1.5"), r"keys\.alice: .*priority_ceiling"),
        (entry('"a b"'), "'a b' is no name of a key"),
        (entry("alice") + entry("bob"), r"keys\.bob: hash: it is that of 'alice'"),
        (entry("default"), r"keys\.default: there are two of this name"),
    ],
)
def test_a_list_that_cannot_be_used_is_refused_with_the_entry_and_the_field(text: str, says: str) -> None:
    with pytest.raises(KeyFileError, match=says):
        KeyRing([*keys_of_settings(["plain"]), *read_keys(text)])
