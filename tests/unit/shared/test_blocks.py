"""Block hashes name 16 tokens and everything before them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.blocks import HASH_BYTES, hash_chain, next_hash, root_hash, split_hashes
from shared.ids import LoraId
from shared.packing import count, pack, unpack

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=80)


@given(TOKENS)
def test_packing_is_reversible(tokens: list[int]) -> None:
    assert unpack(pack(tokens)) == tokens
    assert count(pack(tokens)) == len(tokens)


def test_packed_tokens_are_little_endian() -> None:
    assert pack([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"


@given(TOKENS, st.none() | st.text(max_size=5))
def test_every_full_block_has_a_hash_and_a_partial_one_has_none(tokens: list[int], salt: str | None) -> None:
    chain = hash_chain(pack(tokens), salt, 16)
    assert len(chain) == len(tokens) // BLOCK_SIZE
    assert all(len(h) == HASH_BYTES for h in chain)
    assert list(split_hashes(b"".join(chain))) == chain


@given(TOKENS, TOKENS)
def test_equal_prefixes_have_equal_hashes_and_no_others(a: list[int], b: list[int]) -> None:
    for i, (x, y) in enumerate(zip(hash_chain(pack(a), None, 16), hash_chain(pack(b), None, 16), strict=False), 1):
        assert (x == y) == (a[: i * BLOCK_SIZE] == b[: i * BLOCK_SIZE])


def test_a_chain_can_be_continued_by_whoever_knows_its_last_hash() -> None:
    tokens = pack(range(48))
    chain = hash_chain(tokens, "salt", 16)
    assert next_hash(chain[1], tokens[128:]) == chain[2]
    assert next_hash(root_hash("salt"), tokens[:64]) == chain[0]


def test_another_salt_shares_nothing() -> None:
    tokens = pack(range(32))
    assert not set(hash_chain(tokens, "a", 16)) & set(hash_chain(tokens, "b", 16)) & set(hash_chain(tokens, None, 16))


def test_the_hash_is_what_other_languages_would_compute() -> None:
    assert hash_chain(pack(range(16)), None, 16)[0].hex() == "52775d53915e1d127bc9a0873bd020a0"


@given(st.none() | st.text(max_size=5), st.none() | st.text(max_size=5), st.binary(min_size=16, max_size=16))
def test_an_adapter_shares_no_block_with_another_or_with_none(
    salt: str | None, other: str | None, adapter: bytes
) -> None:
    assert root_hash(salt, LoraId(adapter)) not in {root_hash(salt), root_hash(other)}
    assert (root_hash(salt, LoraId(adapter)) == root_hash(salt, LoraId(adapter[::-1]))) == (adapter == adapter[::-1])
