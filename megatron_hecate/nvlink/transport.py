"""The transport ``nvlink``: spAG and spRS by our kernels, over memory shared by peers (`peers`).

The kernels read the plan itself (`tables`): a launch has the same arguments for every plan. The
receiver pulls. A home sums its replicas' gradients into its main gradients. Between NVLink domains
stripes are sent as messages (`messages`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.comm.p2p import P2P
from megatron_hecate.comm.transfer import Transfer
from megatron_hecate.comm.transport import HomeGradients, LayerBuffer, LoadExchange, TransferPlan
from megatron_hecate.device.autograd import is_capturing
from megatron_hecate.nvlink.launch import TransferKernels
from megatron_hecate.nvlink.loads import SharedLoads, shared_bytes
from megatron_hecate.nvlink.memory import (
    MAX_STEPS,
    Memory,
    SharedLayout,
    check_chunks,
    places_of,
)
from megatron_hecate.nvlink.messages import Round, rounds_of
from megatron_hecate.nvlink.peers import Peers
from megatron_hecate.nvlink.resident import LaunchTables
from megatron_hecate.nvlink.tables import DomainPlan, Domains, most_numbers

# Bits of the gradients that the kernels sum, and of main gradients that they add to.
BITS: dict[torch.dtype, int] = {torch.float32: 32, torch.bfloat16: 16}


class _Job(NamedTuple):
    """One transfer of a layer on this rank.

    Args:
        what: "spAG" or "spRS".
        label: name of the layer.
        kernel: name of the kernel.
        plan: copies, seen from this rank.
        memory: addresses of the memory, without the plan's table.
        tables: what kernels read.
        tensors: parameters or main gradients of the own experts, kept while kernels read addresses.
    """

    what: str
    label: str
    kernel: str
    plan: DomainPlan
    memory: Memory
    tables: LaunchTables
    tensors: Sequence[Sequence[Tensor]]


class NVLink:
    """Transport of one FSSDP group's replicas by kernels. See `transport.Transport`.

    Args:
        group: process group of all ranks.
        domain: process group of this rank's NVLink domain, in order of the ranks in ``group``.
        domains: NVLink domains as ranks of ``group``; every rank is in one domain.
        timeout: seconds per wait.
    """

    name = "nvlink"
    scatters = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        domain: dist.ProcessGroup,
        *,
        domains: Domains,
        timeout: float,
    ) -> None:
        self.group = group
        self.timeout = timeout
        self._domain = domain
        self._domains = tuple(map(tuple, domains))
        self._sizes = tuple(map(len, self._domains))
        # Peers and sizes of messages between domains would be frozen.
        self.is_capturable = len(self._domains) == 1
        self._rank = group.rank()
        self._between = P2P(group, timeout=timeout)
        # Progress counters of the next transfer; initially the counters are 0.
        self._begin = 1
        self._peers: Peers | None = None
        self._shared = torch.empty(0)
        # ``None`` with several domains.
        self._loads: SharedLoads | None = None
        self._tables: LaunchTables | None = None
        # Progress counters where the iteration began, from which positions count.
        self._epoch = 0
        # Transfers that a CUDA graph holds: progress since the epoch, and the failure's text.
        self._captured: list[tuple[int, str]] = []

    def extra_bytes(self, layers: Sequence[LayerBuffer]) -> int:
        """Return the bytes of the buffers that peers read, for the largest layers.

        Raises:
            ValueError: the kernels cannot count the bytes of an expert.
        """
        check_chunks(layers)
        return sum(shared_bytes(layers, self._sizes))

    def allocate(self, size: int, layers: Sequence[LayerBuffer], device: torch.device) -> Tensor:
        """Allocate [size] uint8 that peers can read, followed by the transport's own buffer.

        Raises:
            RuntimeError: on all ranks, if the memory cannot be allocated on one or not be mapped by
                its peers.
        """
        check_chunks(layers)
        # Transfers in flight may use the memory that is freed here.
        if self._peers is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        # The old memory is freed before the new memory is allocated.
        self.release()
        sizes = [LayerBuffer.aligned(size, torch.uint8), *shared_bytes(layers, self._sizes)]
        domain = next(domain for domain in self._domains if self._rank in domain)
        self._kernels = TransferKernels(device)
        self._peers = Peers(
            self._domain, sum(sizes), device=device, ranks=domain, timeout=self.timeout
        )
        # The counters and the epoch in the new memory are 0.
        self._begin, self._epoch = 1, 0
        self._captured.clear()
        slots = max(layer.slots for layer in layers)
        numbers = 4 * most_numbers(self.group.size(), slots)
        self._tables = LaunchTables(len(layers), numbers, self._peers.signals, device)
        replicas, self._shared, memory = self._peers.buffers.split(sizes)
        if len(self._domains) == 1:
            self._loads = SharedLoads(self._peers, memory)
        return replicas[:size]

    def release(self) -> None:
        self._peers = self._loads = None
        self._shared = self._shared.new_empty(0)
        self._tables = None

    def exchange_loads(self, num_experts: int, *, label: str) -> LoadExchange | None:
        return None if self._loads is None else self._loads.exchange(num_experts, label=label)

    def write(self, plans: Mapping[str, TransferPlan]) -> None:
        """Write the tables of all layers, and the epoch of the iteration, on the current stream.

        Called on all ranks before each iteration that a CUDA graph may replay. A replay runs the
        transfers that were captured, without Python, from the epoch on.
        """
        if self._begin == self._epoch and self._captured:
            # The graph was replayed.
            self._begin += self._captured[-1][0] + MAX_STEPS
        self._epoch = self._begin
        peers = self._memory_of_peers()
        peers.write_epoch(self._epoch)
        for position, text in self._captured:
            peers.remember(self._epoch + position, text)
        self._launch_tables().write(
            {label: self._seen_from_here(plan) for label, plan in plans.items()}
        )

    def prepare(self, plan: TransferPlan) -> None:
        self._seen_from_here(plan)

    def fetch(
        self,
        plan: TransferPlan,
        homes: Sequence[Sequence[Tensor]],
        slots: Sequence[Tensor],
        *,
        label: str,
    ) -> Transfer:
        """Begin a spAG. ``slots`` have the same offsets in the memory of all ranks."""
        if not plan.copies and plan.covered is None:
            return self._start([], what="spAG", label=label)
        for index, tensors in enumerate(homes):
            # The kernels read parameters by address, without strides.
            if not all(tensor.is_contiguous() for tensor in tensors):
                raise ValueError(f"{label}: parameters of own expert {index} are not contiguous")
        size = slots[0].nbytes
        layout = SharedLayout.of_fetch(len(homes), size, min(self._sizes))
        send, stripes = layout.chunks(self._shared.data_ptr())
        memory = Memory(
            homes=tuple(tuple(tensor.data_ptr() for tensor in tensors) for tensors in homes),
            sizes=tuple(tensor.nbytes for tensor in homes[0]),
            chunks=(send, places_of(slots), (0, 0), stripes),
        )
        seen, tables = self._seen_from_here(plan), self._launch_tables()
        job = _Job("spAG", label, "fssdp_gather", seen, memory, tables, homes)
        runs = self._prepare_runs(job, size=size, layout=layout, dtype=torch.uint8)
        return self._start(runs, what="spAG", label=label)

    def return_gradients(
        self, plan: TransferPlan, slots: Sequence[Tensor], homes: HomeGradients, *, label: str
    ) -> Transfer:
        """Begin a spRS. ``slots`` have the same offsets in the memory of all ranks.

        Raises:
            ValueError: the gradients are neither fp32 nor bf16.
        """
        if not plan.copies and plan.covered is None:
            return self._start([], what="spRS", label=label)
        elements, dtype = len(slots[0]), slots[0].dtype
        if dtype not in BITS:
            raise ValueError(
                f"{label}: gradients of {dtype} cannot be summed by our kernels; use p2p"
            )
        targets: dict[int, Sequence[Tensor] | None]
        targets = {index: homes.main_grads(index) for index in plan.replicated}
        totals: dict[int, Tensor] = {}
        if not all(targets.values()):
            # `HomeGradients.add` takes the sums at the end.
            totals = {index: slots[0].new_zeros(elements, dtype=torch.float32) for index in targets}
            targets = {index: [total] for index, total in totals.items()}
        first = next(filter(None, targets.values()), [slots[0]])
        layout = SharedLayout.of_return(len(slots), elements, min(self._sizes))
        parts, stripes = layout.chunks(self._shared.data_ptr())
        rows = [[0] * len(first) for _ in range(1 + max(targets, default=0))]
        for index, grads in targets.items():
            rows[index] = [grad.data_ptr() for grad in grads or ()]
        memory = Memory(
            homes=tuple(map(tuple, rows)),
            sizes=tuple(grad.numel() for grad in first),
            chunks=((0, 0), places_of(slots), parts, stripes),
        )
        kernel = f"fssdp_reduce_{BITS[dtype]}_{BITS[first[0].dtype]}"
        tensors = list(filter(None, targets.values()))
        seen, tables = self._seen_from_here(plan), self._launch_tables()
        job = _Job("spRS", label, kernel, seen, memory, tables, tensors)
        runs = self._prepare_runs(job, size=elements, layout=layout, dtype=torch.float32)

        def add_totals() -> None:
            for index, total in totals.items():
                # The memory was allocated on another stream, whose later work must not reuse it
                # before this stream has read it.
                if total.is_cuda:
                    total.record_stream(torch.cuda.current_stream())
                homes.add(index, total)

        return self._start(runs, add_totals if totals else None, what="spRS", label=label)

    def _start(
        self,
        runs: Sequence[Callable[[], None]],
        finish: Callable[[], None] | None = None,
        *,
        what: str,
        label: str,
    ) -> Transfer:
        """Start a transfer, which CPU ranks then run at once.

        Args:
            runs: the stages, never left to `Transfer.wait`: the progress counters increase in the
                order of the transfers.
            finish: work that is left to `Transfer.wait` where it splits the steps.
            what: as for `Transfer`.
            label: as for `Transfer`.
        """

        def steps() -> Iterator[None]:
            for run in runs:
                run()
            if finish is not None:
                yield
                finish()

        device = self._memory_of_peers().device
        return Transfer(steps(), device, what=what, label=label)

    def _launch_tables(self) -> LaunchTables:
        assert self._tables is not None, "allocate was not called"
        return self._tables

    def _seen_from_here(self, plan: TransferPlan) -> DomainPlan:
        return DomainPlan.of(plan.copies, self._rank, self._domains)

    def _memory_of_peers(self) -> Peers:
        assert self._peers is not None, "allocate was not called"
        return self._peers

    def _prepare_runs(
        self, job: _Job, *, size: int, layout: SharedLayout, dtype: torch.dtype
    ) -> list[Callable[[], None]]:
        """Prepare all stages of a transfer now, and return the functions that run them.

        Args:
            job: the transfer.
            size: elements of a chunk, of data type ``dtype``.
            layout: division of the shared buffer.
            dtype: data type of stripes.
        """
        peers = self._memory_of_peers()
        # A kernel that timed out has destroyed the CUDA context: no further launch can succeed.
        if peers.device.type == "cuda":
            peers.raise_failure()
        runs = [self._prepare_kernel(job)]
        if len(self._domains) > 1:
            rounds = rounds_of(job.plan, size, sums=job.what == "spRS")
            tag = self._between.next_tag()
            runs += [
                self._prepare_messages(messages, job, tag=tag, layout=layout, dtype=dtype)
                for messages in rounds
            ]
            runs.append(self._prepare_kernel(job, away=True))
        return runs

    def _prepare_messages(
        self, messages: Round, job: _Job, *, tag: int, layout: SharedLayout, dtype: torch.dtype
    ) -> Callable[[], None]:
        """Prepare a round of messages between domains, and return the function that runs it."""

        def stripe(buffer: int, size: int) -> Tensor:
            begin = layout.stripes_begin + buffer * layout.stripe_stride
            return self._shared[begin : begin + size * dtype.itemsize].view(dtype)

        batch = self._between.batch(tag, what=job.what, label=job.label)
        for stripes, post in ((messages.sends, batch.send), (messages.receives, batch.receive)):
            for buffer, size, peer in stripes:
                post(stripe(buffer, size), peer)
        sums = [stripe(into, source.size) for source, into in messages.adds]
        received = [stripe(source.buffer, source.size) for source, _ in messages.adds]

        def run() -> None:
            batch.start()
            batch.finish()
            if sums:
                torch._foreach_add_(sums, received)

        return run

    def _prepare_kernel(self, job: _Job, *, away: bool = False) -> Callable[[], None]:
        """Prepare a stage inside the domain, and return the function that runs it.

        Args:
            job: the transfer.
            away: whether the stage is the one after the messages of other domains.
        """
        peers = self._memory_of_peers()
        # All ranks count every stage that is launched, also ranks without copies.
        begin = self._begin
        self._begin += MAX_STEPS
        text = (
            f"{job.label}: {job.what} failed on rank {self._rank} of {self.group.size()} (timeout "
            f"{self.timeout:g} s): expected rank {{peer}} to finish its steps"
        )
        peers.remember(begin, text)
        if is_capturing():
            if begin == self._epoch:
                self._captured.clear()
            self._captured.append((begin - self._epoch, text))
        return functools.partial(self._run_kernel, peers, job, begin - self._epoch, away)

    def _run_kernel(self, peers: Peers, job: _Job, position: int, away: bool) -> None:
        """Run a stage on the current stream, or on the host.

        Raises:
            TransferError: a peer died or did not answer in time, in this or an earlier transfer.
        """
        if peers.failure is None:
            description = job.tables.describe(job.label, job.what, job.plan, job.memory)
            try:
                self._kernels.run(
                    job.kernel, description, position=position, away=away, ranks=len(peers.ranks)
                )
            except RuntimeError:
                # The barrier of the peers timed out, which ends the CUDA context.
                if peers.failure is None:
                    raise
        # It also prints the reason: the caller that waits for the transfer may be stuck elsewhere.
        peers.raise_failure()
