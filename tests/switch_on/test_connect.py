"""Which transport is chosen, and that one which does not work is found out. Oracle: literal messages."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import time
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ranks

from megatron_hecate.code_cache import VARIABLE
from megatron_hecate.nvlink.transport import NVLink
from megatron_hecate.switch_on import connect as module
from megatron_hecate.switch_on.connect import connect

NOTHING = types.SimpleNamespace(wait=lambda: None)  # a transfer that moves nothing
SITE_OF_THIS_RANK = module._Site.of_this_rank


def _on_nvlink(domains: str, *, one_queue: bool = False) -> None:
    """As if CPU ranks had NVLink: of every rank the name of its domain; the last may have ``one_queue`` of its GPU."""

    def of_this_rank(*args: Any) -> Any:
        domain, last = domains[dist.get_rank()], dist.get_rank() == len(domains) - 1
        found = SITE_OF_THIS_RANK(*args)
        return dataclasses.replace(found, domain=domain, slower="", one_queue=one_queue and last)

    module._Site.of_this_rank = of_this_rank


@ranks(4)
def test_what_is_chosen() -> None:
    """The same on all ranks, and what was asked for where nothing speaks against it."""
    everyone, own = (0, 1, 2, 3), ((0, 1), (2, 3))[dist.get_rank() // 2]
    problems: list[str] = []
    shared = "peers share NVLink, and a self-test moved every byte"
    for asked, domains, name, why in (
        ("p2p", "", "p2p", ""),
        ("nvlink", "", "nvlink", ""),
        ("auto", "", "p2p", "CPU ranks have no NVLink"),
        ("auto", "aabb", "nvlink", shared),
        ("auto", "abcd", "p2p", "no two ranks of a group share an NVLink domain"),
        ("nvlink", "abcd", "nvlink", ""),
    ):
        if domains:
            _on_nvlink(domains)
        for group in (own, everyone):
            connection = connect(asked, group, problems, timeout=20.0)
            assert (connection.name, connection.why, problems) == (name, why, [])
            assert connection.nodes == (0,) * len(group)
            assert connection.transport.name == name
            assert dist.get_process_group_ranks(connection.transport.group) == list(group)
    connection = connect("nvlink", own if own == (0, 1) else (), problems, timeout=20.0)
    assert (connection.transport is None) == (own != (0, 1)), "a stage without MoE layers"
    module.MAX_RANKS = 3
    _on_nvlink("aaaa")
    assert connect("nvlink", everyone, problems, timeout=20.0).transport is None
    too_large = "4 ranks share an NVLink domain; at most 3 are supported"
    assert problems == [f"transport='nvlink': {too_large}"]
    connection = connect("auto", everyone, [], timeout=20.0)
    assert (connection.name, connection.why) == ("p2p", too_large)


# what was asked for, domains of the ranks, and the transport that is chosen
ONE_QUEUE = {
    ("auto", "aaaa"): "nvlink",
    ("auto", "aabb"): "p2p",
    ("p2p", "aaaa"): "p2p",
    ("nvlink", "aabb"): "nvlink",
}


@ranks(4)
def test_streams_that_share_one_queue() -> None:
    """On one rank, and rank 0 can say so: "auto" takes what computing does not wait for."""
    for (asked, domains), name in ONE_QUEUE.items():
        _on_nvlink(domains, one_queue=True)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            connection = connect(asked, (0, 1, 2, 3), [], timeout=20.0)
        assert connection.name == name
        said = "CUDA_DEVICE_MAX_CONNECTIONS=1 puts the work of" if dist.get_rank() == 0 else ""
        assert said in printed.getvalue() and bool(said) == bool(printed.getvalue())
        if (asked, domains) == ("auto", "aabb"):
            assert "CUDA_DEVICE_MAX_CONNECTIONS=1 compute would wait" in connection.why
        _on_nvlink(domains)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            connection = connect(asked, (0, 1, 2, 3), [], timeout=20.0)
        assert (connection.name, printed.getvalue()) == (asked.replace("auto", "nvlink"), "")


@ranks(2)
def test_problems_of_one_rank_are_problems_of_all() -> None:
    group, rank = (0, 1), dist.get_rank()
    known = ["a known one"] if rank else []
    assert connect("p2p", group, known, timeout=20.0).transport is None and len(known) == rank

    start, problems = time.monotonic(), []
    connection = connect("auto" if rank else "nvlink", group, problems, timeout=20.0)
    assert connection.transport is None and not problems, "the settings are compared later"
    assert time.monotonic() - start < 10

    if rank == 1:
        os.environ[VARIABLE] = "/proc/nowhere"
    connection = connect("nvlink", group, problems, timeout=20.0)
    (problem,) = problems
    assert connection.name == "nvlink" and connection.transport is None
    assert problem.startswith("transport='nvlink': ") and "/proc/nowhere: " in problem
    assert "name another folder in $MEGATRON_HECATE_CACHE" in problem


@ranks(2)
def test_a_transport_that_moves_wrong_bytes_fails_its_self_test() -> None:
    """Asked for, it is refused; with auto it is p2p, which says why."""
    group, problems = (0, 1), []
    fetch, NVLink.fetch = NVLink.fetch, lambda *args, **settings: NOTHING
    connection = connect("nvlink", group, problems, timeout=20.0)
    texts = [f"rank {r} received wrong weights from ranks [{1 - r}]" for r in range(2)]
    assert problems == [f"transport='nvlink' failed its self-test: {text}" for text in texts]
    assert connection.name == "nvlink" and connection.transport is None
    NVLink.fetch, NVLink.return_gradients = fetch, lambda *args, **settings: NOTHING
    _on_nvlink("aa")
    connection = connect("auto", group, [], timeout=20.0)
    assert connection.name == connection.transport.name == "p2p"
    assert connection.why == "nvlink failed its self-test: " + "; ".join(
        f"rank {r} received a wrong sum of its replicas' gradients" for r in range(2)
    )


@ranks(2)
def test_wrong_bytes_on_one_rank_do_not_hold_up_the_others() -> None:
    """They end the self-test on all ranks alike."""
    fetch, group = NVLink.fetch, (0, 1)

    def wrong(transport: NVLink, plan: Any, homes: Any, slots: Any, **settings: Any) -> Any:
        transfer = fetch(transport, plan, homes, slots, **settings)
        transfer.wait()
        slots[0].zero_()
        return transfer

    if dist.get_rank() == 1:
        NVLink.fetch = wrong
    _on_nvlink("aa")
    connection = connect("auto", group, [], timeout=20.0)
    assert connection.name == connection.transport.name == "p2p"
    text = "rank 1 received wrong weights from ranks [0]"
    assert connection.why == f"nvlink failed its self-test: {text}"


@pytest.mark.parametrize("transport", ["p2p", "nvlink"])
@ranks(4)
def test_only_members_make_a_process_group(transport: str) -> None:
    """Also where ranks are in different numbers of groups before, by which torch names the next one. A job bound to a device stays so, but no group is split from it:
    NCCL would wait for all ranks. Oracle: the ranks that called, and what each group sums."""
    rank, new_group, made = dist.get_rank(), dist.new_group, []
    _on_nvlink("aabb")
    for _ in range((0, 2, 1, 0)[rank]):
        new_group([rank], use_local_synchronization=True)
    job = dist.group.WORLD

    def spy(ranks: list[int], **settings: Any) -> Any:
        assert job.bound_device_id is None
        made.append(tuple(ranks))
        return new_group(ranks, **settings)

    dist.distributed_c10d.new_group, bound = spy, torch.device("cuda", 0)
    group = (0, 1, 2) if rank < 3 else ()
    for _ in range(2):
        job.bound_device_id = bound
        connection = connect(transport, group, [], timeout=20.0)
        assert job.bound_device_id == bound
        job.bound_device_id = None
        assert (connection.transport is None) == (rank == 3)
        if connection.transport is not None:
            total = torch.tensor([2**rank])
            dist.all_reduce(total, group=connection.transport.group)
            assert int(total) == 7
    domain = (0, 1) if rank < 2 and transport == "nvlink" else ()
    assert {ranks for ranks in made if ranks != (rank,)} == {group, domain} - {()}
    dist.barrier()


@ranks(3)
def test_groups_that_others_destroy_free_no_name_of_ours() -> None:
    """torch names a group by its ranks and by the number of groups that a rank is in, which may decrease again."""
    everyone, rank, before = (0, 1, 2), dist.get_rank(), []
    for _ in range((0, 2, 1)[rank] + 2):
        before.append(dist.new_group([rank], use_local_synchronization=True))
    for _ in range(3):
        connection = connect("p2p", everyone, [], timeout=20.0)
        total = torch.tensor([2**rank])
        dist.all_reduce(total, group=connection.transport.group)
        assert int(total) == 7
        for _ in range(min(len(before), rank + 1)):
            dist.destroy_process_group(before.pop())


@pytest.mark.parametrize("connects", [pytest.param(False, marks=pytest.mark.slow), True])
@ranks(3, killed=frozenset({1}), preload=None)
def test_a_rank_that_dies_while_groups_are_made(connects: bool) -> None:
    """Before it makes its own, or when it has: the others say in time which ranks they wait for."""
    if dist.get_rank() == 1:
        last = (dist, "all_reduce") if connects else (module, "new_group")
        setattr(*last, lambda *_, **__: os._exit(1))
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1, 2\].* (one|a rank) died") as error:
        connect("p2p", (0, 1, 2), [], timeout=3.0)
    assert time.monotonic() - start < 15, error
