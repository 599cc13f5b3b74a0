"""What prompts have in common is a tree, of which the heaviest nodes are shown, with who holds them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from services.coordinator.prefix_tree import MAX_BLOCKS, MAX_NODES, MAX_PROMPTS, PrefixNode, PrefixTree
from shared.blocks import HASH_BYTES, hash_chain
from shared.ids import InstanceId, ModelName
from shared.packing import pack
from tests.contracts.test_golden_messages import GENERATION

BLOCK = 16


def placed(tree: PrefixTree, *blocks: int, at: float = 1.0, model: str = "m", caching: bool = True) -> None:
    """A prompt whose block i is full of the token `blocks[i]`."""
    tokens = [token for token in blocks for _ in range(BLOCK)]
    hashes = b"".join(hash_chain(pack(tokens), None, BLOCK))
    generation = replace(GENERATION, model=ModelName(model), block_hashes=hashes, prefix_caching=caching)
    tree.record(generation, at)


def shown(nodes: Sequence[PrefixNode]) -> list[tuple[int, int, int, str | None]]:
    names = {node.name: f"{node.first_token}+{node.tokens}" for node in nodes}
    return [(n.first_token, n.tokens, n.requests, None if n.parent is None else names[n.parent]) for n in nodes]


def nobody(model: ModelName, chain: bytes) -> list[InstanceId]:
    return []


def test_nodes_are_what_prompts_share_and_where_they_part() -> None:
    tree = PrefixTree(BLOCK)
    assert tree.nodes(nobody) == []
    placed(tree, 1, 2, 3)
    placed(tree, 1, 2, 4, 5, at=3.0)
    placed(tree, 1, 2, at=2.0)
    placed(tree, 9)
    placed(tree, 1, 2, 4, 6)
    placed(tree, 1, 2, caching=False)
    nodes = tree.nodes(nobody)
    assert shown(nodes)[:2] == [(0, 32, 4, None), (32, 16, 2, "0+32")]
    alone = [(0, 16, 1, None), (32, 16, 1, "0+32"), (48, 16, 1, "32+16"), (48, 16, 1, "32+16")]
    assert sorted(shown(nodes)[2:], key=repr) == sorted(alone, key=repr), "of one weight, in any order"
    assert nodes[0].last_used == 3.0


def test_models_share_nothing() -> None:
    tree = PrefixTree(BLOCK)
    placed(tree, 1, model="a")
    placed(tree, 1, model="b")
    assert sorted(node.model for node in tree.nodes(nobody)) == ["a", "b"]


def test_holders_are_asked_for_the_whole_chain() -> None:
    tree = PrefixTree(BLOCK)
    placed(tree, 1, 2, 3)
    placed(tree, 1, 2, 4)

    def holders(model: ModelName, chain: bytes) -> list[InstanceId]:
        return [InstanceId(f"engine-{len(chain) // HASH_BYTES}"), InstanceId("a")]

    assert [node.held_by for node in tree.nodes(holders)] == [("a", "engine-2"), ("a", "engine-3"), ("a", "engine-3")]


def test_it_is_bounded() -> None:
    tree = PrefixTree(BLOCK)
    placed(tree, *range(2 * MAX_BLOCKS))
    assert [node.tokens for node in tree.nodes(nobody)] == [MAX_BLOCKS * BLOCK]
    for number in range(MAX_PROMPTS + 5):
        placed(tree, 1, 1000 + number)
    nodes = tree.nodes(nobody)
    assert (len(nodes), nodes[0].requests) == (MAX_NODES, MAX_PROMPTS)
