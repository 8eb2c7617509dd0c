"""``measure``. Oracle: the file is what planning loads, and every number is in a range no machine leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ranks


@ranks(2)
def test_two_ranks_measure_what_planning_loads(tmp_path: Path) -> None:
    import torch.distributed as dist

    from megatron_hecate.plan import Speeds
    from megatron_hecate.tools.measure import measure

    path = tmp_path / "speeds.json"
    measure(str(path))
    if dist.get_rank() == 0:
        speeds = Speeds.load(path)
        assert 1e6 < speeds.intra.bandwidth < 1e13 and 0 <= speeds.intra.latency < 10
        assert speeds.inter == speeds.intra, "one node"
        assert 1e8 < speeds.flops < 1e17 and 0 < speeds.routing < 10 and 0 <= speeds.contention <= 1
        assert 1e8 < speeds.memory < 1e15 and 0 <= speeds.launch < 1
        assert {"memory", "launch"} <= json.loads(path.read_text()).keys()
    dist.barrier()


@ranks(2)
def test_a_path_that_cannot_be_written_ends_all_ranks(tmp_path: Path) -> None:
    import torch.distributed as dist

    from megatron_hecate.tools.measure import measure

    with pytest.raises(SystemExit) as end:
        measure(str(tmp_path))
    assert f"cannot write {tmp_path}" in str(end.value) or dist.get_rank() == 1


@ranks(3)
def test_nodes_with_different_numbers_of_ranks(tmp_path: Path) -> None:
    """By hand: two ranks on one node, one on the other. Rank 0 has the message, and no traceback."""
    import contextlib
    import io
    import os
    import socket

    import torch.distributed as dist

    from megatron_hecate.tools import measure

    rank = dist.get_rank()
    os.environ |= {"WORLD_SIZE": "3", "RANK": str(rank)}
    socket.gethostname = lambda: "node" + "aab"[rank]
    with contextlib.redirect_stderr(io.StringIO()) as told:
        assert measure.main([str(tmp_path / "speeds.json")]) == 2
    right = "not measured: measuring needs the same number of ranks on every node, got [1, 2]\n"
    assert told.getvalue() == (right if rank == 0 else "")


@pytest.mark.fast
def test_one_process_is_told_what_to_do() -> None:
    command = [sys.executable, "-m", "megatron_hecate", "measure", "speeds.json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert "measure: error: measuring needs at least 2 ranks: torchrun --nproc" in result.stderr
