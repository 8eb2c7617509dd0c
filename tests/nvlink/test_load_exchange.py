"""Loads of all sources through peers' memory, between CPU ranks, and as on GPUs.

Oracle: `gather_rows`, the all-gather in its place, bitwise; literal messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu_on_cpu
import numpy as np
import pytest
import torch
import torch.distributed as dist
from load_exchanges import check_exchanges, some_tables
from one_layer import CPU, allocate, make_transport
from ranks import ranks

from megatron_hecate.comm.collectives import TransferError
from megatron_hecate.faults.attempt import Attempt
from megatron_hecate.nvlink.memory import TRANSFER
from megatron_hecate.routing.reroute import CountedTokens

MATCH = r"layer 1: the exchange of loads failed on rank 0 of 2 \(timeout 1 s\): expected rank 1 to send its loads; it .* 0 were seen"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@ranks(3)
def test_the_loads_of_an_all_gather(device: str) -> None:
    driver = gpu_on_cpu.install() if device == "cuda" else None
    transport, place = make_transport("nvlink"), gpu_on_cpu.GPU if driver else CPU
    assert transport.exchange_loads(6, label="layer 1") is None, "nothing is allocated"
    allocate(transport, place, torch.float32)
    check_exchanges(transport, place)
    assert driver is None or not driver.faults, driver.log


@ranks(4)
def test_several_domains_have_no_exchange() -> None:
    transport = make_transport("nvlink", ((0, 1), (2, 3)))
    allocate(transport, CPU, torch.float32)
    assert transport.exchange_loads(8, label="layer 1") is None


def _layer(timeout: float) -> tuple[Any, Callable[[], object], Callable[[], object]]:
    """A transport, and functions that wait for the loads of a layer, and that send this rank's."""
    transport = make_transport("nvlink", timeout=timeout)
    allocate(transport, CPU, torch.float32)
    tables = some_tables(np.random.default_rng(0), 4, CPU)
    exchange = transport.exchange_loads(4, label="layer 1")
    send = partial(CountedTokens, torch.ones(5, 4, dtype=torch.bool), tables.kernels)
    return transport, partial(tables.parts, exchange, 0), partial(send, exchange=exchange)


@ranks(2)
def test_a_peer_that_sends_no_loads_is_named() -> None:
    """By the wait, and by whatever asks for an exchange later."""
    transport, wait, send = _layer(timeout=1.0)
    if dist.get_rank() == 0:
        send()
        with pytest.raises(TransferError, match=MATCH):
            wait()
        with pytest.raises(TransferError, match=MATCH):
            transport.exchange_loads(4, label="layer 2")
    dist.barrier()


@ranks(2)
def test_no_wait_outlives_the_attempt() -> None:
    """As when the job restarts in the process: as if the peer had come. So do waits that begin after its late loads, and
    what they read stays."""
    transport, wait, send = _layer(timeout=60.0)
    start, later = time.monotonic(), []

    def end() -> None:
        Attempt.current().close()
        transport.release()
        later.extend(np.full(TRANSFER.itemsize, 255, np.uint8) for _ in range(8))

    for _ in range(2):
        if dist.get_rank() == 0:
            send()
            threading.Timer(0.5, end).start()
            wait()
            assert time.monotonic() - start < 30
        dist.barrier()
        if dist.get_rank() == 1:
            send()
        dist.barrier()


@ranks(2)
def test_waits_end_before_another_model_frees_memory() -> None:
    """A GPU frees memory that peers read after all its kernels."""
    _first, wait, send = _layer(timeout=20.0)
    has_waited = threading.Event()
    Attempt.current().at_end(has_waited.wait)
    _second, *_ = _layer(timeout=20.0)
    if dist.get_rank() == 0:
        send()
        threading.Timer(0.5, Attempt.current().close).start()
        wait()
        has_waited.set()
    dist.barrier()
