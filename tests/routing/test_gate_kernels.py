"""The kernels after the gate as one block of threads, with teams of lanes, under sanitizers; and with bugs planted.

Oracle: the sanitizers, and values: quotas by one thread, which `test_quotas` compares with libraries' solvers; tokens
rerouted one by one in Python.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from gate_mutations import MUTATIONS
from plan_cases import chain, some_homes, some_replicas, some_world
from quota_cases import noted_loads
from rerouting_cases import as_indices
from selftests import SANITIZERS, build, build_planted, fails, run

from megatron_hecate.plan import Placement, World
from megatron_hecate.routing.quotas import NOTED
from megatron_hecate.routing.tables import GroupShape, HolderOrder
from megatron_hecate.tools.quotas import quotas_of_all

pytestmark = pytest.mark.slow
TILE = 7


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """What is run: a placement, the loads of all sources, and how many threads, lanes of a team and blocks."""

    placement: Placement
    world: World
    loads: np.ndarray
    threads: int
    lanes: int
    blocks: int = 3

    def write(self, path: Path, rng: np.random.Generator) -> None:
        """One source's part of it, with tokens of its own that its loads follow."""
        experts, tokens = self.placement.num_experts, int(rng.integers(1, 40))
        chosen = rng.random((tokens, experts)) < 0.3
        rank, loads = int(rng.integers(self.placement.num_ranks)), self.loads.astype(np.int32)
        loads[rank] = chosen.sum(axis=0)
        shape = GroupShape(self.world, self.placement)
        quotas, order = quotas_of_all(loads, self.placement, shape)
        most, counts = shape.num_physical, np.bincount(order.expert, minlength=experts)
        begin = np.concatenate([[0], np.cumsum(counts)])
        parts = np.zeros(shape.parts_size, np.int32)
        for e in range(experts):
            parts[begin[e] : begin[e + 1]] = quotas[rank, begin[e] : begin[e + 1]].cumsum()
        parts[most : most + len(order.physical)], parts[2 * most :] = order.physical, begin
        before = [chosen[:first].sum(axis=0) for first in range(0, tokens, TILE)]
        draw = functools.partial(rng.integers, 1, 2**31, dtype=np.uint32)
        probs, out_grad = draw(size=(tokens, experts)), draw(size=(tokens, most))
        out, grad = np.zeros((tokens, most), np.uint32), np.zeros((tokens, experts), np.uint32)
        place, physical_of = np.zeros(experts, np.int64), {}
        for token, expert in np.argwhere(chosen):
            last = parts[begin[expert] : begin[expert + 1]]
            physical = order.physical[begin[expert] + np.flatnonzero(place[expert] < last)[0]]
            physical_of[token, expert] = physical
            place[expert] += 1
            out[token, physical] = probs[token, expert]
            grad[token, expert] = out_grad[token, physical]
        tokens_of = np.zeros((len(loads), most), np.int64)
        tokens_of[:, order.physical] = quotas
        # now and then there is too little shared memory
        shared = shape.shared_bytes(self.threads) if rng.random() < 0.75 else 0
        own = int(np.flatnonzero(shape.order == rank)[0])
        head = [self.threads, self.lanes, self.blocks, tokens, TILE, own, rank]
        indices = as_indices(
            chosen, torch.int64, top=int(chosen.sum(axis=1).max(initial=1))
        ).numpy()
        bits = int(rng.choice([16, 32, 64]))
        head += [shape.work_size(self.threads), shared, experts, most, indices.shape[1], bits]
        arrays = [np.array(head, np.int32), shape.table()]
        arrays += [HolderOrder(self.placement, shape).table(), loads, parts, chosen]
        arrays += [np.array(before, np.int32), loads[rank], probs, out > 0, out, out_grad.T, grad]
        arrays.append(exchange(tokens_of, rank, shape.slots_per_rank))
        earlier = np.array(rng.choice([0, 2 * NOTED, 99 * NOTED], 2))
        arrays += [earlier, np.maximum(earlier, noted_loads(quotas, order, self.placement, loads))]
        within, physical = np.zeros(indices.shape, np.int32), np.full(indices.shape, -1)
        for token, i in np.argwhere(indices >= 0):
            expert, first = indices[token, i], token // TILE * TILE
            within[token, i] = chosen[first:token, expert].sum()
            physical[token, i] = physical_of[token, expert]
        arrays += [indices.astype(f"i{bits // 8}"), within, physical.astype(f"i{bits // 8}")]
        contents = [np.uint64(a.nbytes).tobytes() + a.tobytes() for a in arrays]
        path.write_bytes(b"".join(contents))


def exchange(tokens: np.ndarray, rank: int, slots: int) -> np.ndarray:
    """One rank's counts from all tokens [N, R * P], laid out as `exchange_at`; source n is rank n."""
    received = tokens[:, rank * slots : (rank + 1) * slots]
    sent = tokens[rank].reshape(-1, slots).sum(axis=1)
    total = [received.sum()]
    return np.concatenate(
        [received.ravel(), received.sum(axis=0), received.sum(axis=1), sent, total]
    )


def some_block(seed: int, *, threads: int, lanes: int) -> tuple[Block, np.random.Generator]:
    """Steep loads on random holders; every fourth a chain of ranks, every fourth counts near 2^31, every fifth homes
    only."""
    rng = np.random.default_rng(seed)
    if seed % 4 == 1:
        placement = chain(int(rng.integers(3, 14)))
    else:
        placement = some_replicas(rng, some_homes(rng), share=1.0)
    if seed % 5 == 3:
        placement = placement.homes_only
    world = some_world(rng, placement.num_ranks)
    # A first level that fits into 32 bits although a later one does not, or none that does.
    most = int(rng.choice([2**31 - 1, 2**30 // placement.num_ranks**2]))
    scale = most if seed % 4 == 2 else 3000
    shares = rng.dirichlet(np.full(placement.num_experts, 0.3), placement.num_ranks)
    loads = (shares * scale).astype(np.int64)
    loads[rng.random(placement.num_ranks) < 0.2] = 0
    return Block(placement, world, loads, threads, lanes), rng


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gate")
    return {sanitizer: build(folder, "selftest_gate", sanitizer) for sanitizer in SANITIZERS}


@pytest.mark.parametrize(("threads", "lanes"), [(1, 1), (6, 1), (6, 2), (8, 4), (8, 8)])
@pytest.mark.parametrize("sanitizer", list(SANITIZERS))
def test_a_block_of_threads(
    programs: dict[str, Path], tmp_path: Path, sanitizer: str, threads: int, lanes: int
) -> None:
    """The same integers for any number of threads and lanes; no race, no access out of bounds, no overflow."""
    for seed in range(8):
        block, rng = some_block(seed, threads=threads, lanes=lanes)
        block.write(tmp_path / "file", rng)
        done = run(programs[sanitizer], tmp_path / "file")
        assert (done.stdout, done.returncode) == ("OK\n", 0), (seed, done.stdout + done.stderr)


def large_group(seed: int) -> Block:
    """More than 64 ranks, a home each, whose slots mostly hold the first experts; seed 0: a chain."""
    rng = np.random.default_rng(seed)
    if seed == 0:
        placement = chain(70)
    else:
        ranks = int(rng.integers(70, 130))
        homes = Placement.initial(ranks, ranks, num_slots=1)
        wanted = np.minimum(ranks - 1, rng.pareto(0.7, ranks) * 3).astype(int)
        replicas = [(int(e), r) for r, e in enumerate(wanted) if not homes.holders[e, r]]
        placement = homes.with_replicas(replicas)
    ranks = placement.num_ranks
    loads = rng.dirichlet(np.full(placement.num_experts, 0.3), ranks) * 3000
    return Block(placement, some_world(rng, ranks), loads.astype(np.int64), threads=4, lanes=2)


@pytest.mark.parametrize("sanitizer", list(SANITIZERS))
def test_sets_of_several_words(programs: dict[str, Path], tmp_path: Path, sanitizer: str) -> None:
    """The same in groups whose sets of ranks take several words each, by several threads."""
    for seed in range(4):
        large_group(seed).write(tmp_path / "file", np.random.default_rng(seed))
        done = run(programs[sanitizer], tmp_path / "file")
        assert (done.stdout, done.returncode) == ("OK\n", 0), (seed, done.stdout + done.stderr)


@pytest.mark.parametrize("bug", list(MUTATIONS))
def test_a_planted_bug_is_caught(tmp_path: Path, bug: str) -> None:
    """By a sanitizer, a wrong value, or a run that does not end."""
    binary = build_planted(tmp_path, "selftest_gate", MUTATIONS[bug])
    for seed in range(24):
        block, rng = some_block(seed, threads=8, lanes=2)
        block.write(tmp_path / "file", rng)
        if fails(binary, tmp_path / "file", timeout=30):
            return
    pytest.fail("the bug was not caught")
