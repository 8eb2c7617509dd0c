"""Elements that change ranks. Oracle: a table of who keeps what, element by element.

That they arrive is seen in states of optimizers (`test_rehoming_optimizers`) and in `test_moving_failures`.
"""

from __future__ import annotations

import numpy as np
import pytest
from seeds import seeds


@pytest.mark.fast
@seeds(400)
def test_pieces_are_the_wanted_elements_each_from_a_rank_that_keeps_it(seed: int) -> None:
    """Random shards, which may lie over one another: of a tensor cut once (the distributed optimizer's), and of whole
    ones and parts at random."""
    from megatron_hecate.homes.exchange import Shard, pieces

    rng = np.random.default_rng(seed)
    size, num_ranks = int(rng.integers(1, 40)), int(rng.integers(1, 6))
    bounds = np.sort(rng.integers(0, size + 1, num_ranks - 1)).tolist()
    kept = [
        Shard(r, b, e)
        for r, (b, e) in enumerate(zip([0, *bounds], [*bounds, size], strict=True))
        if b < e
    ]
    for _ in range(int(rng.integers(0, 3))):
        begin, end = sorted(rng.integers(0, size + 1, 2).tolist())
        others = set(range(num_ranks)) - {shard.rank for shard in kept}  # a rank keeps one stretch
        if begin < end and others:
            kept.append(Shard(min(others), begin, end))
    begin, end = sorted(rng.integers(0, size + 1, 2).tolist())
    wanted = Shard(int(rng.integers(num_ranks)), begin, end)
    found = pieces(kept, wanted)
    source_of = [piece.rank for piece in found for _ in range(piece.begin, piece.end)]
    expected = []
    for element in range(begin, end):
        keeping = {shard.rank for shard in kept if shard.begin <= element < shard.end}
        expected.append(wanted.rank if wanted.rank in keeping else min(keeping))
    assert [e for piece in found for e in range(piece.begin, piece.end)] == list(range(begin, end))
    own = [a == wanted.rank for a in expected]
    assert [a == wanted.rank for a in source_of] == own, "what it keeps itself does not travel"
    for element, source in zip(range(begin, end), source_of, strict=True):
        assert any(s.rank == source and s.begin <= element < s.end for s in kept)
