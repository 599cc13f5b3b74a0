"""Which trees are drafted, against a brute force that looks at every path by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.batch.draft_trees import TreeShape
from services.worker.batch.rows import Int32s
from services.worker.models.config import LatentConfig, ModelError
from services.worker.models.weights import KvCaches
from services.worker.ops.interface import BatchMeta
from services.worker.platforms.installed import built_in_platform
from services.worker.sampling.parameters import ParameterTable, SamplingBatch
from services.worker.sampling.races import race_times
from services.worker.sampling.random_numbers import race_keys
from services.worker.sampling.sampler import draft_candidates, sample_draft
from services.worker.speculation.choice import check_trees
from services.worker.speculation.settings import SpeculationError, read_speculation
from services.worker.speculation.trees.expansion import TreeExpansion
from services.worker.speculation.trees.selection import ROOT, TreeCandidates, best_tree
from shared.ids import SequenceId
from shared.messages.generation import SamplingOptions
from shared.messages.worker import NewSequence
from tests.unit.worker.models.test_native_decoder import LLAMA

VOCABULARY, SIZE, BLOCKS = 40, 16, 64
CACHES: KvCaches = []


class PathHead:
    """A head whose logits are a function of every token on a row's path, as its cache has them by the row's table."""

    hidden_size = 1
    kv_block_bytes = 0

    def __init__(self, lanes: int) -> None:
        self.cache = np.full((BLOCKS + lanes) * SIZE, -1)

    def predict(
        self, ids: Tensor, given: Tensor, meta: BatchMeta, caches: KvCaches, *, wants_logits: bool
    ) -> tuple[Tensor, Tensor]:
        self.cache[meta.slots.numpy()] = ids.numpy()
        if meta.copies is not None:
            self.cache[meta.copies.targets.numpy()] = self.cache[meta.copies.sources.numpy()]
        rows = zip(meta.block_tables.numpy(), meta.context_lens.tolist(), given[:, 0].tolist(), strict=True)
        logits = []
        for table, context, before in rows:
            places = np.arange(context)
            path = self.cache[table[places // SIZE] * SIZE + places % SIZE]
            assert (path >= 0).all(), "nobody reads what was never written"
            logits.append(path_logits((*path.tolist(), before)))
        return ids.float().unsqueeze(1), torch.stack(logits)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.stack([path_logits((before,)) for before in hidden[:, 0].tolist()])

    def combine(self, features: Tensor) -> Tensor:
        raise NotImplementedError

    def allocate_kv(self, num_blocks: int) -> KvCaches:
        raise NotImplementedError

    def draft_chain(
        self, first: Tensor, meta: BatchMeta, steps: int, stride: int, caches: KvCaches, given: Tensor
    ) -> Tensor | None:
        raise NotImplementedError


def path_logits(path: tuple[float, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(hash(path) % (1 << 31))
    return torch.randn(VOCABULARY, generator=generator) * 2


class Histories:
    """Sequences of these lengths, each of whose rows in the cache is a number of its own."""

    def __init__(self, lengths: list[int], samplings: list[SamplingOptions], head: PathHead) -> None:
        self.tokens = np.zeros((len(lengths), 100), dtype=np.int32)
        self.lengths = np.array(lengths, dtype=np.int32)
        self.block_tables = (
            np.random.default_rng(0).permutation(BLOCKS)[: len(lengths) * 8].reshape(len(lengths), 8).astype(np.int32)
        )
        self.block_size = SIZE
        self._table = ParameterTable(len(lengths), VOCABULARY)
        for number, sampling in enumerate(samplings):
            new = NewSequence(
                sequence=SequenceId(number), tokens=b"", prompt_length=0, computed=0, blocks=b"", sampling=sampling
            )
            self._table.put(number, new)
            for place in range(lengths[number] - 1):
                head.cache[self.block_tables[number, place // SIZE] * SIZE + place % SIZE] = known(number, place)

    def sampling_batch(self, seq_indices: NDArray[np.intp], ahead: Int32s | int) -> SamplingBatch:
        return self._table.sampling_batch(seq_indices, np.zeros(len(seq_indices), dtype=np.int32) + 3 + ahead)


def known(sequence: int, place: int) -> int:
    return 1000 * sequence + place


class Found(NamedTuple):
    path: tuple[int, ...]
    value: float


def brute_force(
    sequence: int, histories: Histories, shape: TreeShape, limit: int, hidden: float
) -> set[tuple[int, ...]]:
    """The paths of the best tree: EAGLE-2's, each path's logits computed from all that is on it."""
    before = tuple(known(sequence, place) for place in range(int(histories.lengths[sequence]) - 1))

    def followed(path: tuple[int, ...], value: float) -> Iterator[Found]:
        given = path[-2] if len(path) > 1 else hidden
        logits = path_logits((*before, *path, given) if path else (given,))
        ahead = histories.sampling_batch(np.array([sequence]), len(path))
        found = draft_candidates(logits.unsqueeze(0), ahead, shape.topk)
        for token, share in zip(found.tokens[0].tolist(), found.shares[0].tolist(), strict=True):
            if share:
                yield Found((*path, token), value + float(np.log(np.float32(share))))

    level = list(followed((), 0.0))
    every = list(level)
    for _ in range(1, limit):
        level = sorted(level, key=lambda one: -one.value)[: shape.topk]
        level = [one for each in level for one in followed(*each)]
        every += level
    best = sorted(every, key=lambda one: (-one.value, len(one.path)))[: shape.of_depth(limit)]
    return {one.path for one in best if one.value >= shape.least_value}


@pytest.mark.parametrize(
    ("topk", "depth", "drafts", "least"),
    [(2, 3, 6, 0.0), (3, 5, 9, 0.1), (4, 4, 60, 0.01), (4, 4, 60, 0.0), (8, 2, 11, 0.0)],
)
def test_the_best_paths_are_drafted_wherever_their_keys_lie(topk: int, depth: int, drafts: int, least: float) -> None:
    shape = TreeShape(topk, depth, drafts, least)
    lengths, limits = [1, 15, 16, 17, 30, 47, 64], np.array([depth, depth, 1, depth, 2, depth, depth], dtype=np.int32)
    samplings = [
        SamplingOptions(seed=number, temperature=0.0 if number % 3 == 0 else 0.8, top_p=1.0 if number % 2 else 0.9)
        for number in range(len(lengths))
    ]
    head = PathHead(shape.lane_blocks(len(lengths)))
    histories = Histories(lengths, samplings, head)
    expansion = TreeExpansion(head, shape, CACHES, BLOCKS)
    hidden = torch.arange(len(lengths)).unsqueeze(1) + 0.5
    drafts_of = expansion.draft(np.arange(len(lengths)), limits, histories, hidden)
    assert drafts_of.parents is not None
    for sequence, limit in enumerate(limits.tolist()):
        count = int(drafts_of.counts[sequence])
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(drafts_of.known()[sequence, :count], drafts_of.parents[sequence, :count], strict=True):
            paths.append((*paths[parent], int(token)))
        assert set(paths[1:]) == brute_force(sequence, histories, shape, limit, sequence + 0.5)
        assert len(set(paths)) == count + 1


def test_a_tree_is_the_best_tokens_in_the_order_of_rows() -> None:
    random = np.random.default_rng(5)
    for _ in range(50):
        parents = np.array([random.integers(ROOT, number) if number else ROOT for number in range(12)], dtype=np.int32)
        values = np.zeros(12, dtype=np.float32)
        for number, parent in enumerate(parents):
            values[number] = (0.0 if parent == ROOT else values[parent]) + np.log(random.random())
        candidates = TreeCandidates(np.arange(12, dtype=np.int32), parents, values)

        def value(chosen: tuple[int, ...], values: NDArray[np.float32] = values) -> float:
            return float(np.exp(values[list(chosen)]).sum())

        trees = [
            chosen
            for chosen in itertools.combinations(range(12), 4)
            if all(parents[each] in (ROOT, *chosen) for each in chosen)
        ]
        tree = best_tree(candidates, 4, TreeShape(2, 12, 4).least_value)
        assert value(tuple(tree.tokens)) == pytest.approx(max(map(value, trees)))
        for row, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), start=1):
            assert parents[token] == (ROOT if not parent else tree.tokens[parent - 1])
            earlier = [number for number, other in enumerate(tree.parents[: row - 1], start=1) if other == parent]
            assert earlier or parent == row - 1, "the first that follows a row is the next row"


def test_candidates_are_those_that_win_the_race_one_after_the_other() -> None:
    histories = Histories(
        [5, 5],
        [SamplingOptions(seed=3, temperature=0.7, top_k=30), SamplingOptions(seed=0, temperature=0.0)],
        PathHead(0),
    )
    logits = torch.stack([path_logits((1,)), path_logits((2,))])
    choices = histories.sampling_batch(np.arange(2), 0)
    found = draft_candidates(logits, choices, 4)
    assert found.tokens[:, 0].tolist() == sample_draft(logits, choices, no_history).tolist()
    assert found.tokens[1].tolist() == logits[1].topk(4).indices.tolist()
    torch.testing.assert_close(found.shares[1], logits[1].softmax(0).topk(4).values)
    weights = (logits[0] / 0.7).softmax(0).double()
    weights[weights < weights.topk(30).values[-1]] = 0.0
    keys = torch.from_numpy(race_keys(np.array([3], dtype=np.uint64), choices.position[:1]))
    speeds = weights / race_times(keys, torch.arange(VOCABULARY))[0]
    assert found.tokens[0].tolist() == speeds.topk(4).indices.tolist()
    torch.testing.assert_close(found.shares[0].double(), speeds.topk(4).values / speeds.sum(), rtol=1e-4, atol=1e-6)


def no_history(seq_indices: NDArray[np.intp], positions: Int32s) -> tuple[Int32s, Int32s, Int32s]:
    raise AssertionError("nothing asks for it")


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ('"speculative_eagle_topk": 9', "speculative_eagle_topk is 9, must be from 1 to 8"),
        (
            '"speculative_eagle_topk": 2, "speculative_eagle_min_path_prob": 2',
            "speculative_eagle_min_path_prob is 2.0, must be from 0.0 to 1.0",
        ),
        ('"speculative_num_draft_tokens": 9', "speculative_num_draft_tokens is 9, which only trees have"),
        (
            '"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 3',
            "speculative_num_draft_tokens is 3, must be from 4, .* to 64",
        ),
    ],
)
def test_what_is_no_tree_is_refused_by_name(keys: str, complaint: str) -> None:
    with pytest.raises(SpeculationError, match=complaint):
        read_speculation(f'{{"method": "eagle3", "model": "x", {keys}}}')
    with pytest.raises(SpeculationError, match="speculative_eagle_topk is 2, which only methods eagle, eagle3 have"):
        read_speculation('{"method": "ngram", "speculative_eagle_topk": 2}')


def test_a_trees_rows_are_those_of_all_levels_unless_something_else_is_said() -> None:
    read = read_speculation(
        '{"method": "eagle", "model": "x", "num_speculative_tokens": 5, "speculative_eagle_topk": 4}'
    )
    assert (read.tree_rows, read.most) == (21, 5)


def test_trees_are_refused_where_they_cannot_be_verified() -> None:
    chains, trees = (
        read_speculation(f'{{"method": "eagle", "model": "x", "speculative_eagle_topk": {topk}}}') for topk in (1, 2)
    )
    cpu = built_in_platform("cpu")
    sizes = LatentConfig(q_rank=None, kv_rank=16, nope_dim=8, rope_dim=8, value_dim=16, interleaved=False)
    latent = msgspec.structs.replace(LLAMA, latent=sizes)
    for config, refused, reason in (
        (latent, {}, "models of ours that keep keys and values in all layers"),
        (LLAMA, {"logits_processors": True, "other": True}, "logits_processors does not go with trees"),
    ):
        check_trees(chains, config, cpu, refused)
        with pytest.raises(ModelError, match=f"speculative_eagle_topk is 2, must be 1: .*{reason}"):
            check_trees(trees, config, cpu, refused)
    check_trees(trees, LLAMA, cpu, {"logits_processors": False})


def test_what_is_hardly_ever_accepted_is_left_out_but_for_the_best() -> None:
    parents, values = np.array([ROOT, ROOT, 0, 2], dtype=np.int32), np.log([0.5, 0.04, 0.06, 0.03], dtype=np.float32)
    assert best_tree(TreeCandidates(np.arange(4, dtype=np.int32), parents, values), 4, np.log(0.05)) == ([0, 2], [0, 1])
    none = TreeCandidates(np.arange(4, dtype=np.int32), parents, values - 9)
    assert best_tree(none, 4, np.log(0.05)) == ([0], [0])
