"""Block hashes name 16 tokens and everything before them."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.blocks import HASH_BYTES, hash_chain, next_hash, root_hash, split_hashes
from shared.ids import InstanceId, LoraId, RowsName
from shared.messages.generation import MediaRows, PromptEmbeds
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


def rows_in(*runs: tuple[int, int], values: bytes) -> PromptEmbeds:
    return PromptEmbeds(dtype="float16", size=1, rows=values, runs=runs)


def test_a_block_is_named_by_the_rows_in_it_and_by_their_places() -> None:
    tokens = pack([0] * 3 * BLOCK_SIZE)
    values = bytes(range(2 * 20))
    chain = partial(hash_chain, tokens, None, BLOCK_SIZE)
    plain = chain()
    second = chain(in_place=rows_in((BLOCK_SIZE, 20), values=values))
    assert second[0] == plain[0]
    assert len({plain[1], second[1], chain(in_place=rows_in((BLOCK_SIZE - 1, 20), values=values))[1]}) == 3
    split = chain(in_place=rows_in((BLOCK_SIZE, 10), (BLOCK_SIZE + 10, 10), values=values))
    moved = chain(in_place=rows_in((BLOCK_SIZE, 10), (BLOCK_SIZE + 11, 10), values=values))
    assert len({second[1], split[1], moved[1]}) == 3
    assert chain(in_place=rows_in((BLOCK_SIZE, 20), values=values[:-2] + b"xy"))[1:2] == second[1:2]


def test_images_beside_a_prompt_name_the_blocks_from_which_on_they_are_seen() -> None:
    """So chats share what stands before their first different image, and nothing behind it."""
    tokens, kept = (
        pack(list(range(5 * BLOCK_SIZE))),
        [MediaRows(RowsName(bytes([n])), 3, InstanceId("e")) for n in range(3)],
    )

    def chain(*images: tuple[int, MediaRows]) -> list[bytes]:
        runs = tuple((token, each.count) for token, each in images)
        embeds = PromptEmbeds(
            dtype="float16", size=1, rows=b"", runs=runs, media=tuple(each for _, each in images), encoded=True
        )
        assert embeds.fits(count(tokens))
        return list(hash_chain(tokens, None, BLOCK_SIZE, in_place=embeds))

    first, second = BLOCK_SIZE + 3, 3 * BLOCK_SIZE
    one, plain = chain((first, kept[0])), list[bytes](hash_chain(tokens, None, BLOCK_SIZE))
    assert one == chain((first, kept[0]))
    for other, equal in (
        (plain, 1),
        (chain((first, kept[1])), 1),
        (chain((first, kept[0]), (second, kept[1])), 3),
        (chain((first, kept[0]), (first + 1, kept[1])), 1),
    ):
        assert [here == there for here, there in zip(one, other, strict=True)] == [True] * equal + [False] * (5 - equal)
    assert chain((first, kept[0]), (first + 1, kept[1]))[1] != chain((first, kept[1]), (first + 1, kept[0]))[1]


def test_text_among_rows_has_none_of_them() -> None:
    """Of a run of six tokens, the second and the fourth are text."""
    texts = ((1, (7,)), (2, (8,)), (4, (9,)))
    embeds = PromptEmbeds(dtype="float16", size=1, rows=bytes(range(8)), runs=((1, 6),), texts=texts[1:])
    assert embeds.fits(7)
    assert not embeds.fits(6)
    assert [embeds.of_tokens(first, first + 3)[11:] for first in (0, 3, 6)] == [b"\0\1", b"\2\3\4\5", b"\6\7"]
    assert not replace(embeds, texts=texts).fits(7)
    kept = replace(embeds, rows=b"", media=(MediaRows(RowsName(b"n"), 4, InstanceId("e")),))
    assert kept.fits(7)
    assert not replace(kept, texts=texts).fits(7)


@pytest.mark.parametrize(
    ("runs", "rows", "length", "fits"),
    [
        ((), 5, 5, True),
        ((), 4, 5, False),
        (((0, 2), (2, 1), (4, 1)), 4, 5, True),
        (((0, 2), (4, 2)), 4, 5, False),
        (((3, 1), (0, 1)), 2, 5, False),
        (((0, 2), (1, 1)), 3, 5, False),
        (((1, 0),), 0, 5, False),
        (((1, 2),), 3, 5, False),
    ],
)
def test_rows_fit_where_each_has_a_token(runs: tuple[tuple[int, int], ...], rows: int, length: int, fits: bool) -> None:
    assert rows_in(*runs, values=bytes(2 * rows)).fits(length) is fits
