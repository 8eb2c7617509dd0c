"""Which transport is chosen, and that one which does not work is found out. Oracle: literal messages."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch
from ranks import ranks

from megatron_hecate import kernel, launch, transports
from megatron_hecate.transports import Transport, Whereabouts, choose_transport, domains_of


@ranks(2)
def test_switching_it_on() -> None:
    """What speaks against it is said on every rank, before training."""
    import os

    import tiny_gpt
    import torch.distributed as dist

    from megatron_hecate import HecateConfig, fssdp, launch
    from megatron_hecate.compile import CACHE

    case = tiny_gpt.Case()
    tiny_gpt.initialize(case)
    hook = fssdp(HecateConfig(costs=tiny_gpt.FREE, transport="sm", timeout=30))
    nodes, shared = "aaab", [4024, 4023, 0, 9999]
    ranks = [
        Whereabouts("sm", [(0, 1)], node, node, "", "", free, True) for node, free in zip(nodes, shared, strict=True)
    ]
    assert Transport("sm").refusals(ranks, {0: 1000, 1: 2000, 3: 500}) == [
        "transport='sm' needs 4024 bytes of shared memory on a, 4023 are free in /dev/shm; make it larger, or use p2p, "
        "fewer slots or a shorter lifetime",
    ]
    before = os.environ.get(CACHE)
    if dist.get_rank() == 1:
        os.environ[CACHE] = "/proc/nowhere"
        launch.compile_for_host.cache_clear()
    with pytest.raises(
        ValueError, match=r"transport='sm': \S+: /proc/nowhere cannot be made .*name another folder in \$MEG"
    ):
        tiny_gpt.train(case, steps=1, hook=hook)
    if before is None:
        os.environ.pop(CACHE, None)
    else:
        os.environ[CACHE] = before


def _ranks(domains: str, **fields: Any) -> list[Whereabouts]:
    """One group; of every rank the name of its domain."""
    group = tuple(range(len(domains)))
    usual = dict(asked="auto", groups=[group], node="a", against="", slower="", shared=0, sound=True)
    return [Whereabouts(domain=domain, **(usual | fields)) for domain in domains]


@pytest.mark.parametrize(
    ("asked", "ranks", "chosen", "problems"),
    [
        ("auto", _ranks("aabb"), Transport("sm", "peers share NVLink, and a trial moved every byte"), []),
        ("auto", _ranks("abcd"), Transport("p2p", "no two ranks of a group share an NVLink domain"), []),
        ("auto", _ranks("aa", slower="GPU 1 has no NVLink"), Transport("p2p", "GPU 1 has no NVLink"), []),
        ("auto", _ranks("aa", against="no compiler"), Transport("p2p", "no compiler"), []),
        ("auto", _ranks("a" * 73), Transport("p2p", "73 ranks share a domain, 72 may"), []),
        ("p2p", _ranks("aa"), Transport("p2p"), []),
        ("sm", _ranks("abcd", slower="CPU ranks have no NVLink"), Transport("sm"), []),
        ("ce", _ranks("aa", against="no compiler"), Transport("ce"), ["transport='ce': no compiler"]),
        ("sm", _ranks("a" * 73), Transport("sm"), ["transport='sm': 73 ranks share a domain, 72 may"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_chosen(asked: str, ranks: list[Whereabouts], chosen: Transport, problems: list[str]) -> None:
    assert choose_transport(asked, ranks) == (chosen, problems)


@ranks(2)
def test_transports_that_differ_between_ranks_are_named_at_once() -> None:
    import time

    import tiny_gpt
    import torch.distributed as dist

    from megatron_hecate import HecateConfig, fssdp

    tiny_gpt.initialize(tiny_gpt.Case())
    config = HecateConfig(costs=tiny_gpt.FREE, transport="auto" if dist.get_rank() else "sm", timeout=60)
    start = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 has transport='auto', rank 0 has transport='sm'"):
        tiny_gpt.train(tiny_gpt.Case(), steps=1, hook=fssdp(config))
    assert time.monotonic() - start < 40


def test_domains_are_in_the_order_of_their_first_rank() -> None:
    ranks = _ranks("bbabac")
    assert domains_of((1, 2, 3, 4, 5), ranks) == [(1, 3), (2, 4), (5,)]


@ranks(2)
def test_a_transport_that_moves_wrong_bytes_fails_its_trial() -> None:
    """Asked for, it is refused; with auto it is p2p, which says why."""
    import dataclasses

    from megatron_hecate import trial

    trial.start_gather = lambda *args, **settings: _Nothing()
    problems: list[str] = []
    _, transport, transfers = trial.settle("sm", [(0, 1)], problems, timeout=20.0)
    wrong = [f"transport='sm' failed its trial: rank {r} got other weights than ranks [{1 - r}] sent" for r in range(2)]
    assert problems == wrong and transport.name == "sm" and set(transfers) == {(0, 1)}
    here = transports.Whereabouts.here

    def with_nvlink(*args: Any, **fields: Any) -> Whereabouts:
        return dataclasses.replace(here(*args, **fields), slower="")

    transports.Whereabouts.here = with_nvlink
    problems.clear()
    _, transport, _ = trial.settle("auto", [(0, 1)], problems, timeout=20.0)
    assert not problems
    assert transport.name == "p2p" and transport.why.startswith("sm failed its trial: rank 0 got other weights")


class _Nothing:
    """A transfer that moves nothing."""

    def wait(self) -> None:
        return


ONE_GPU = types.SimpleNamespace(
    current_device=lambda: 0, get_device_properties=lambda _: types.SimpleNamespace(uuid="12")
)


class _Nvml(types.ModuleType):
    """Says what a driver would of a GPU's fabric."""

    GpuFabricState = types.SimpleNamespace(COMPLETED=3)

    def __init__(self, state: int, cluster: bytes) -> None:
        super().__init__("nvml")
        self._info = types.SimpleNamespace(state=state, cluster_uuid=cluster, clique_id=7)

    def init_v2(self) -> None:
        return

    def device_get_handle_by_uuid(self, uuid: str) -> str:
        assert uuid == "GPU-12"
        return uuid

    def device_get_gpu_fabric_info_v(self, handle: str) -> Any:
        return self._info


@pytest.mark.parametrize(
    ("state", "cluster", "domain"),
    [(3, bytes(range(16)), f"fabric {bytes(range(16)).hex()} 7"), (3, bytes(16), ""), (1, bytes(range(16)), "")],
    ids=["several machines", "one machine", "not ready"],
)
def test_machines_of_one_fabric_are_one_domain(
    monkeypatch: pytest.MonkeyPatch, state: int, cluster: bytes, domain: str
) -> None:
    """Oracle: NVML's documentation; a machine's own switches report a cluster of zeros."""
    monkeypatch.setattr(transports.torch, "cuda", ONE_GPU)
    bindings = pytest.importorskip("cuda.bindings")
    monkeypatch.setattr(bindings, "nvml", _Nvml(state, cluster), raising=False)
    assert transports._fabric() == domain


def test_a_driver_that_cannot_say_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the errors of NVML's own binding, here the one of a GPU that is too old to be asked."""
    bindings = pytest.importorskip("cuda.bindings.nvml")
    unsupported = next(getattr(bindings, name) for name in dir(bindings) if name == "NotSupportedError")
    nvml = _Nvml(3, bytes(range(16)))

    def ask(handle: str) -> Any:
        raise unsupported.__new__(unsupported)

    nvml.device_get_gpu_fabric_info_v = ask
    monkeypatch.setattr(transports.torch, "cuda", ONE_GPU)
    monkeypatch.setattr(pytest.importorskip("cuda.bindings"), "nvml", nvml, raising=False)
    assert transports._fabric() == ""


@pytest.mark.newest
@pytest.mark.skipif(torch.cuda.is_available(), reason="would launch on the GPU")
def test_calls_reach_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver they end there, and not before: the bindings took their arguments."""
    stream = types.SimpleNamespace(cuda_stream=0x10)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(launch, "kernel_of", lambda name, device: 0x20)
    items = np.zeros(2, kernel.COPY)
    items["dst"], items["src"], items["bytes"] = (0x1000, 0x2000), (0x3000, 0x4000), 16
    at = torch.zeros(16, dtype=torch.uint8)
    for call in (
        lambda: launch.batch(items),
        lambda: launch.launch("fssdp_gather", at),
        lambda: launch.launch("fssdp_meet", at, 3, blocks=1),
    ):
        with pytest.raises(Exception, match="driver") as caught:
            call()
        assert type(caught.value).__name__ in ("DynamicLibNotFoundError", "RuntimeError"), caught.value


def test_copy_engines_need_batches_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = pytest.importorskip("cuda.bindings")
    driver = types.SimpleNamespace(cuDriverGetVersion=lambda: (0, 12040), cuMemcpyBatchAsync=None)
    monkeypatch.setattr(bindings, "driver", driver)
    with pytest.raises(RuntimeError, match=r"ce needs CUDA 12\.8 for batches of copies, the driver has 12040; use sm"):
        transports._need_batched_copies()
    driver.cuDriverGetVersion = lambda: (0, 13000)
    transports._need_batched_copies()
