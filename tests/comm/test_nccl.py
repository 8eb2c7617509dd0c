"""What our process groups ask of NCCL, over gloo and a GPU that is none. Oracle: what torch is asked for, its timeouts,
and for a transfer whose peer does not come, whose wait returns at once as NCCL's does: literal texts.
"""

from __future__ import annotations

from typing import Any

import gpu_on_cpu
import pytest
import torch
import torch.distributed as dist
from one_layer import Reference, allocate, copies
from ranks import ranks

from megatron_hecate.comm import device as job_device
from megatron_hecate.comm.p2p import P2P, _Messages
from megatron_hecate.comm.transport import TransferPlan
from megatron_hecate.faults import under_way, watchdog
from megatron_hecate.switch_on import connect

MIB = 1 << 20


class _Asked:
    """Notes what torch is asked for: CTAs of process groups, and collectives; each of these takes 30 MiB of the GPU."""

    def __init__(self) -> None:
        gpu_on_cpu.install()
        job_device.on_gpus = connect.on_gpus = lambda: True
        self.ctas: list[int] = []
        self.connected: list[tuple[str, int, list[float]]] = []
        torch.cuda.mem_get_info = self._memory
        new_group, all_to_all, all_reduce = dist.new_group, dist.all_to_all_single, dist.all_reduce

        def note_group(*args: Any, **settings: Any) -> Any:
            options = settings["pg_options"]
            assert options.is_high_priority_stream, "messages come before other work"
            self.ctas.append(options.config.max_ctas)
            return new_group(*args, **settings)

        def exchange(out: Any, given: Any, group: Any, async_op: bool) -> Any:
            self.connected.append(("pairs", group.size(), given.tolist()))
            return all_to_all(out, given, group=group, async_op=async_op)

        def reduce(given: Any, group: Any, async_op: bool) -> Any:
            self.connected.append(("ring", group.size(), given.tolist()))
            return all_reduce(given, group=group, async_op=async_op)

        dist.distributed_c10d.new_group = note_group
        dist.all_to_all_single, dist.all_reduce = exchange, reduce

    def _memory(self, *_: Any) -> tuple[int, int]:
        return 1000 * MIB - 30 * MIB * len(self.connected), 1000 * MIB


@ranks(3)
def test_messages_have_few_blocks_and_all_pairs_connected() -> None:
    """At switch-on, with every other rank by an element; NCCL's memory is measured there."""
    asked = _Asked()
    connection = connect.connect("p2p", (0, 1, 2), [], timeout=20.0, nccl_ctas=8)
    assert asked.ctas == [8] and asked.connected == [("pairs", 3, [0.0] * 3)]
    assert connection.name == "p2p" and connection.nccl_bytes == 30 * MIB
    connect.connect("p2p", (0, 1, 2), [], timeout=20.0, nccl_ctas=5)
    assert asked.ctas == [8, 5]


@pytest.mark.newest
@ranks(2)
def test_pairs_are_connected_where_nvlink_gives_way_to_messages() -> None:
    asked = _Asked()
    assert connect.connect("nvlink", (0, 1), [], timeout=20.0).name == "nvlink"
    assert [kind for kind, *_ in asked.connected] == ["ring"]
    asked.connected.clear()
    connect.self_test = lambda *_, **__: (["rank 0 got other weights"], True)
    connection = connect.connect("auto", (0, 1), [], timeout=20.0)
    assert connection.name == "p2p" and connection.nccl_bytes == 60 * MIB
    assert [kind for kind, *_ in asked.connected] == ["ring", "pairs"]


@ranks(2)
def test_groups_have_the_job_s_timeout() -> None:
    """And never less than ours."""
    _Asked()
    for ours, expected in ((20.0, 60), (90.0, 90)):
        transport = connect.connect("p2p", (0, 1), [], timeout=ours).transport
        options = transport.group._get_backend(torch.device("cpu")).options
        assert options._timeout.total_seconds() == expected


class _NeverEnds:
    """What a batch of NCCL returns when a peer does not come: on a GPU the stream waits, the host does not."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return False


@ranks(2)
def test_messages_that_do_not_end_are_told() -> None:
    """Torch's watchdog kills a rank whose peer does not come; the line before it says what was under way."""
    gpu_on_cpu.install()
    (layer,) = allocate(P2P(dist.group.WORLD, timeout=600.0), gpu_on_cpu.GPU, torch.bfloat16)
    _Messages._post = lambda self: self._works.append(_NeverEnds())  # type: ignore[method-assign]
    plan = TransferPlan(layer.rank, copies("one to all"))
    assert TransferPlan(0, plan.copies).sends == ((1, 1),)
    # nothing is raised, and the host does not wait
    layer.fetch(plan, Reference(0, torch.bfloat16)).wait()
    size = 2 * sum(tensor.numel() for tensor in Reference(0, torch.bfloat16).drawn(0, 0, 1))
    what = ("send to rank 1", "receive from rank 0")[layer.rank]
    expected = f"layer 1: spAG, rank {layer.rank} of 2 expected to {what} ({size} bytes)"
    assert under_way.describe().startswith(f"{expected} (for ")


@ranks(1)
def test_works_of_an_abandoned_attempt_are_not_told() -> None:
    """They never end. Oracle: what is under way in the attempt after it."""
    under_way.note([_NeverEnds()], lambda: "layer 1: spAG")
    watchdog.watch([0], timeout=600.0)
    under_way.note([_NeverEnds()], lambda: "layer 2: spRS")
    assert under_way.describe() == "layer 2: spRS (for 0 s)"
