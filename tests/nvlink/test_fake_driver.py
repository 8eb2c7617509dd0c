"""The CUDA branch of the transport `nvlink` and of routing as a whole, over a driver without a GPU (`gpu_on_cpu`).

Oracles: the dense reference of `one_layer`, bitwise, to which both transports are held; the loop of `test_rerouting`;
the header of CUDA's driver, with which the stand-in is compiled; and what the cubin says of its kernels' parameters.
That the stand-in notices is shown by faults planted here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gpu_on_cpu
import megatron_on_cpu
import pytest
import torch
import torch.distributed as dist
from kernel_scripts import REDUCES
from one_layer import Reference, allocate, check, copies, make_transport
from ranks import ranks
from rerouting_cases import TOKENS, check_every_token
from virtual_ranks import check_one_hot_experts, check_random_placements

from megatron_hecate.comm import device as job_device
from megatron_hecate.comm.collectives import TransferError
from megatron_hecate.comm.transport import TransferPlan
from megatron_hecate.device import driver as calls
from megatron_hecate.device import launch as launches
from megatron_hecate.device.launch import Kernels
from megatron_hecate.nvlink.launch import TransferKernels
from megatron_hecate.plan import Placement, World
from megatron_hecate.routing.quotas import QuotaTables
from megatron_hecate.routing.reroute import CountedTokens
from megatron_hecate.routing.tables import GroupShape
from megatron_hecate.switch_on import connect

pytestmark = pytest.mark.newest
APART = ((0, 1), (2, 3))
# Of transfers: ranks meet by the first; sums by bits of gradients, and of main gradients.
KERNELS = {"fssdp_synchronize", "fssdp_gather", "fssdp_reduce_32_32"}


@pytest.mark.parametrize(
    ("name", "domains", "multiprocessors"),
    [
        ("p2p", (), 132),
        pytest.param("nvlink", (), 132, marks=pytest.mark.slow),
        ("nvlink", APART, 132),
        # a slice of a GPU: with fewer than the blocks that wait for each other, some would never begin
        ("nvlink", (), 8),
    ],
)
@ranks(4)
def test_transfers(name: str, domains: tuple, multiprocessors: int) -> None:
    driver = gpu_on_cpu.install(multiprocessors=multiprocessors)
    check(make_transport(name, domains), Reference(0, torch.bfloat16, domains), gpu_on_cpu.GPU)
    assert not driver.faults, driver.log
    if name == "nvlink":
        assert set(driver.launched) == KERNELS
        streams = {line.split("stream=")[1] for line in driver.log if line.startswith("launch ")}
        assert len(streams) == 1 and "(nil)" not in streams, "one stream, not the default one"


@ranks(1)
def test_ranks_of_one_launch() -> None:
    """What `test_virtual_ranks` does on a GPU: its launches, at small sizes."""
    driver = gpu_on_cpu.install()
    check_random_placements("cuda", 1)
    check_one_hot_experts("cuda", (2 * 3333, 3333))
    assert not driver.faults, driver.log
    sums = {f"fssdp_reduce_{grad}_{main}" for grad, main in REDUCES}
    assert set(driver.launched) == KERNELS | sums


@pytest.mark.parametrize("tp_size", [1, 2])
@ranks(1)
def test_routing(tp_size: int) -> None:
    """Also on ranks without tokens. Oracle: the loop of `test_rerouting`."""
    driver = gpu_on_cpu.install()
    for seed in range(4):
        check_every_token(seed, tp_size=tp_size)
    check_every_token(4, tp_size=tp_size, tokens=(TOKENS, 0, 0, TOKENS))
    assert not driver.faults, driver.log
    kernels = ("fssdp_count", "fssdp_quotas", "fssdp_reroute_64", "fssdp_reroute_gradient_64")
    counts = {driver.launched.count(name) for name in kernels}
    assert counts == {5 * 4 * tp_size}, "one launch of each, for each source"
    driver.clear()
    check_every_token(1, tp_size=tp_size, indices=torch.int16)
    forms = ("count_choices", "quotas", "reroute_choices_64", "reroute_choices_gradient_64")
    assert {driver.launched.count(f"fssdp_{name}") for name in forms} == {4 * tp_size}
    assert not driver.faults, driver.log


@ranks(1)
def test_layers_of_two_sizes_that_need_much_shared_memory() -> None:
    """As if any size needed an opt-in. Oracle: the driver, which refuses a launch above its kernel's limit."""
    driver = gpu_on_cpu.install()
    launches.SHARED_BYTES = 0
    world, tables = World(node=(0, 0, 0, 0)), list[QuotaTables]()
    for num_experts in (16, 8):
        homes = Placement.initial(num_experts, 4, num_slots=1)
        shape, kernels = GroupShape(world, homes), Kernels(gpu_on_cpu.GPU)
        tables.append(QuotaTables(shape, gpu_on_cpu.GPU, kernels))
        tables[-1].place(homes.with_replicas([(0, 3)]))
    large, small = tables
    for layer in (large, small, large):
        layer.parts(torch.ones(4, layer.shape.num_experts, dtype=torch.int32), 0)
    assert not driver.faults and driver.launched == ["fssdp_quotas"] * 3, driver.log


@pytest.mark.parametrize("version", [13000, 12070])
@ranks(2)
def test_switch_on(version: int) -> None:
    """As if each rank had a GPU, whose driver has this version."""
    driver = gpu_on_cpu.install(version=version)
    job_device.on_gpus = connect.on_gpus = lambda: True
    problems: list[str] = []
    connection = connect.connect("auto", (0, 1), problems, timeout=20.0)
    assert (connection.name, problems) == ("nvlink", []) and not driver.faults, (
        connection,
        driver.log,
    )
    assert set(driver.launched) == KERNELS
    check(connection.transport, Reference(0, torch.bfloat16), gpu_on_cpu.GPU)


@ranks(2)
def test_a_peer_that_does_not_come_is_named() -> None:
    """The kernel gives up, and with it the context, as CUDA's does."""
    gpu_on_cpu.install()
    (layer,) = allocate(make_transport("nvlink", timeout=1.0), gpu_on_cpu.GPU, torch.bfloat16)
    if layer.rank == 0:
        plan = TransferPlan(layer.rank, copies("one to all"))
        for _ in range(2):
            with pytest.raises(
                TransferError,
                match=r"layer 1: spAG failed on rank 0 of 2 .*expected rank 1 to finish",
            ):
                layer.fetch(plan, Reference(0, torch.bfloat16))
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            torch.cuda.synchronize()
    dist.barrier()


@ranks(1)
def test_threads_without_a_context() -> None:
    """Such as autograd's. Oracle: the driver, which refuses what a thread without a current context asks for."""
    driver = gpu_on_cpu.install()
    kernels, routing_map = TransferKernels(gpu_on_cpu.GPU), torch.ones(5, 3, dtype=torch.bool)

    def in_new_thread(call: Callable[[], Any]) -> Any:
        def run() -> Any:
            with megatron_on_cpu._CudaIsCpu():
                return call()

        with ThreadPoolExecutor(1) as pool, torch.cuda.stream(torch.cuda.Stream()):
            return pool.submit(run).result()

    with pytest.raises(RuntimeError, match="cuLaunchKernel failed: CUDA_ERROR_INVALID_CONTEXT"):
        in_new_thread(
            lambda: calls.launch(
                kernels.function("fssdp_gather"), (), blocks=1, threads=1, stream=1
            )
        )
    driver.clear()
    assert in_new_thread(lambda: CountedTokens(routing_map, kernels)).loads.tolist() == [5, 5, 5]
    assert not driver.faults, driver.log


@ranks(1)
def test_counts_that_may_run_at_once_share_no_counter() -> None:
    """By which a launch knows its last block: `fssdp_count`'s last argument. Launches on two streams may overlap, and
    so may replays of two graphs, whatever streams captured them."""
    driver = gpu_on_cpu.install()
    kernels, routing_map = Kernels(gpu_on_cpu.GPU), torch.ones(5, 3, dtype=torch.bool)
    counters: list[int] = []
    memory: list[torch.Tensor] = []  # not used again while a graph may run
    launch, zeros = calls.launch, torch.zeros

    def noted(kernel: int, arguments: Any, **sizes: Any) -> None:
        counters.append(arguments[-1].value)
        launch(kernel, arguments, **sizes)

    def keep(*args: Any, **kwargs: Any) -> torch.Tensor:
        memory.append(zeros(*args, **kwargs))
        return memory[-1]

    calls.launch, torch.zeros = noted, keep
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams * 2:
        with torch.cuda.stream(stream):
            assert CountedTokens(routing_map, kernels).loads.tolist() == [5, 5, 5]
    torch.cuda.is_current_stream_capturing = lambda: True
    for _ in range(2):
        CountedTokens(routing_map, kernels)
    assert counters[:2] == counters[2:4] and len(set(counters)) == 4
    assert not driver.faults, driver.log


@ranks(1)
def test_a_driver_that_takes_no_cubin_of_the_compiler_is_explained() -> None:
    gpu_on_cpu.install().refuse_cubins()
    message = r"CUDA_ERROR_INVALID_IMAGE: the driver does not load .* update it to NVRTC's version"
    with pytest.raises(RuntimeError, match=message):
        Kernels(gpu_on_cpu.GPU)


@ranks(1)
def test_planted_faults_are_noticed() -> None:
    driver = gpu_on_cpu.install(multiprocessors=32)
    kernels, at = TransferKernels(gpu_on_cpu.GPU), ctypes.c_void_p(4096)
    number = ctypes.c_uint(1)
    launch = at, number, number
    calls.ensure_context(0)
    faults: list[tuple[tuple, dict[str, int], str]] = [
        ((at, number), {}, "2 arguments, it takes 3"),
        ((), {}, "0 arguments, it takes 3"),
        ((number, number, number), {}, "argument 0 has 4 bytes, it takes 8"),
        (launch, dict(threads=257), "257 threads, it allows 256"),
        (launch, dict(blocks=0), "an empty grid or block"),
        (launch, dict(blocks=33), "33 blocks wait for each other on 32 SMs"),
        (launch, dict(stream=0), "on the default stream"),
    ]
    for arguments, settings, expected in faults:
        driver.clear()
        sizes = {"blocks": 1, "threads": 256, "stream": 0x10, **settings}
        with pytest.raises(RuntimeError, match="failed: CUDA_ERROR_INVALID_VALUE"):
            calls.launch(kernels.function("fssdp_gather"), arguments, **sizes)
        assert driver.faults == [f"fssdp_gather: {expected}"]
    driver.clear()
    with pytest.raises(RuntimeError, match="cuLibraryGetKernel failed: CUDA_ERROR_NOT_FOUND"):
        Kernels(gpu_on_cpu.GPU).function("fssdp_nothing")
