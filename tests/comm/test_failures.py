"""Peers that die or do not take part, and memory that cannot be had. Oracle: literal messages, and the clock."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from one_layer import CPU, ELEMENTS, Layer, Reference, Sums, allocate, make_transport
from ranks import ranks

from megatron_hecate.comm.collectives import TransferError, wait_collective
from megatron_hecate.comm.transfer import Transfer
from megatron_hecate.comm.transport import Copy, TransferPlan
from megatron_hecate.nvlink import peer_memory as module
from megatron_hecate.nvlink.peers import Peers

TRANSPORTS = ["p2p", "nvlink"]
# what a rank that waits for rank 2 says; a home waits for gradients, the others for weights
EXPECTED = {
    "p2p": r"waiting to receive from rank 2 \(\d+ bytes\): expected \d messages, 0 were seen. Rank 2 died",
    "nvlink": r"expected rank 2 to finish its steps; it waited for step 0, 0 were seen. Rank 2 died, hangs, or did not take part",
}


def _plan(*copies: Copy) -> TransferPlan:
    return TransferPlan(dist.get_rank(), copies)


def _fetch(layer: Layer, plan: TransferPlan) -> Transfer:
    return layer.fetch(plan, Reference(0))


def _return(layer: Layer, plan: TransferPlan) -> Transfer:
    return layer.give_back(plan, Reference(0), Sums([[torch.zeros(ELEMENTS)]] * 2, direct=True))


@pytest.mark.fast
def test_a_transfer_that_failed_fails_in_every_wait() -> None:
    transfer = Transfer(map([None].__getitem__, [0, 1]), CPU, what="spRS", label="layer 1")
    with pytest.raises(IndexError, match="list index out of range"):
        transfer.wait()
    with pytest.raises(RuntimeError, match="layer 1: this spRS failed before"):
        transfer.wait()


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("dies", [False, True], ids=["hangs", "dies"])
@ranks(3, timeout=60, killed=frozenset({2}))
def test_a_peer_is_named_within_the_timeout(name: str, dies: bool) -> None:
    """In a spAG, whose home it is; and in a later spRS, where it has a replica. Our kernels then name the first wait
    that failed."""
    (layer,) = allocate(make_transport(name, timeout=1.0), CPU, torch.float32)
    if layer.rank == 2:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(4)
        return
    for what, transfer, plan in (
        ("spAG", _fetch, _plan(Copy(2, 0, 0, 0), Copy(2, 0, 1, 0))),
        ("spRS", _return, _plan(Copy(0, 0, 2, 0), Copy(1, 0, 2, 1))),
    ):
        start = time.monotonic()
        failed = "spAG" if name == "nvlink" else what
        match = rf"layer 1: {failed} failed on rank {layer.rank} of 3 .*\(timeout 1 s\).* {EXPECTED[name]}"
        with pytest.raises(TransferError, match=match):
            transfer(layer, plan).wait()
        assert time.monotonic() - start < 4


@ranks(3, timeout=60, killed=frozenset({2}))
def test_a_dead_peer_is_named_after_one_that_lives() -> None:
    transport, rank = make_transport("p2p", timeout=2.0), dist.get_rank()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    messages = transport.batch(transport.next_tag(), what="spRS", label="layer 1")
    if rank == 1:
        messages.receive(torch.empty(ELEMENTS), 0)
        messages.start()
        return messages.finish()
    messages.send(torch.ones(ELEMENTS), 1)
    messages.send(torch.ones(ELEMENTS), 2)
    with pytest.raises(TransferError, match=r"waiting to send to rank 2 .* Rank 2 died"):
        messages.start()
        messages.finish()
    time.sleep(2)  # until rank 1 has received


@ranks(4, timeout=60)
def test_a_peer_in_another_domain_is_named() -> None:
    (layer,) = allocate(make_transport("nvlink", ((0, 1), (2, 3)), timeout=1.0), CPU, torch.float32)
    if layer.rank >= 2:
        time.sleep(4)
        return
    plan = _plan(*(Copy(home, 0, rank, 0) for home, rank in ((0, 2), (1, 3), (2, 0), (3, 1))))
    match = rf"layer 1: spAG failed on rank {layer.rank} of 4 .* waiting to (send to|receive from) rank [23] "
    with pytest.raises(TransferError, match=match):
        _fetch(layer, plan).wait()


@ranks(2)
def test_a_collective_that_is_left_alone_is_named() -> None:
    group, tensor = dist.new_group([0, 1]), torch.zeros(1)
    if dist.get_rank() == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        match = r"layer 2: loads failed on rank 0 of 2 after .* \(timeout 0.5 s\): expected all of ranks \[0, 1\]"
        with pytest.raises(TransferError, match=match):
            wait_collective(work, tensor, group, what="loads", label="layer 2", timeout=0.5)
    else:
        time.sleep(2)


@ranks(2)
def test_too_little_shared_memory_is_said_on_all_ranks() -> None:
    transport = make_transport("nvlink")
    if dist.get_rank() == 1:

        def full(*_: int) -> None:
            raise OSError(28, "No space left on device")

        module.os.posix_fallocate = full
    with pytest.raises(
        RuntimeError,
        match=r"transport nvlink: rank 1: cannot allocate \d+ bytes of shared memory, \d+ are free in /dev/shm: "
        ".*use p2p",
    ):
        allocate(transport, CPU, torch.float32)


@ranks(2)
def test_a_failure_on_record_is_explained() -> None:
    """As a GPU leaves it, whose counters cannot be read any more: with rank, peer, expected and seen, on stderr too."""
    own, said = dist.get_rank(), io.StringIO()
    peers = Peers(dist.group.WORLD, 1 << 12, device=CPU, ranks=range(2), timeout=5.0)
    for begin, label in ((1, "layer 7"), (4, "layer 8"), (7, "layer 9")):
        peers.remember(
            begin,
            f"rank {own} of 2: {label}: spAG failed (timeout 5 s): expected rank {{peer}} to answer",
        )
    peers.failure_record[0] = (1, own, 1 - own, 1, 2**32 - 3, 4)
    with contextlib.redirect_stderr(said):
        for _ in range(2):
            peers.look_for_failure()
    assert said.getvalue() == (
        f"FSSDP: rank {own} of 2: layer 8: spAG failed (timeout 5 s): expected rank {1 - own} to answer; it waited for "
        f"step 1, 0 were seen. Rank {1 - own} died, hangs, or did not take part.\n"
    ), "once"


@ranks(1)
def test_a_failure_is_explained_while_transfers_begin() -> None:
    """A thread explains it, and the training thread registers further transfers meanwhile: here in between."""
    peers = Peers(dist.group.WORLD, 1 << 12, device=CPU, ranks=range(1), timeout=5.0)

    class Begin(int):
        def __mod__(self, other: int) -> int:
            peers.remember(7, "layer 9: expected rank {peer} to answer")
            return int(self) % other

    peers.remember(Begin(4), "layer 8: expected rank {peer} to answer")
    peers.failure_record[0] = (1, 0, 0, 1, 0, 4)
    assert peers.explain_failure().startswith("layer 8: expected rank 0 to answer; it waited")
