"""The transport ``nvlink``: spAG and spRS by our kernels, over memory shared by peers (`peers`).

The receiver pulls. A home sums its replicas' gradients in one pass, into fp32 main gradients where
they exist. Between NVLink domains stripes are sent as messages (`domains`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.comm.collectives import TransferError
from megatron_hecate.comm.p2p import P2P
from megatron_hecate.comm.transfer import Transfer
from megatron_hecate.comm.transport import HomeGradients, LayerBuffer, TransferPlan
from megatron_hecate.nvlink.chunks import CACHED, SEND, SLOT, STRIPE, Part
from megatron_hecate.nvlink.domains import (
    Domains,
    Messages,
    Stage,
    most_stripes,
    stages_of,
    stripe_elements,
)
from megatron_hecate.nvlink.launch import TransferKernels
from megatron_hecate.nvlink.peers import Peers
from megatron_hecate.nvlink.program import Memory, assemble, compile_programs
from megatron_hecate.nvlink.schedule import TransferSchedule

# Steps after which one transfer signals between all ranks of the domain: a counter that has fallen
# behind by half of its range would appear to be ahead.
REFRESH: int = 1 << 30


class _Job(NamedTuple):
    """One transfer of a layer on this rank.

    Args:
        what: "spAG" or "spRS".
        label: name of the layer.
        homes: tensors of the own experts that are moved, kept: stages read addresses.
        slots: chunks of the slots.
        memory: addresses of the memory.
    """

    what: str
    label: str
    homes: Mapping[int, Sequence[Tensor]]
    slots: Sequence[Tensor]
    memory: Memory


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
        self._domain_sizes = tuple(map(len, self._domains))
        self._rank = group.rank()
        self._between = P2P(group, timeout=timeout)
        self._begin = 1  # progress counters of the next transfer; initially the counters are 0
        # CPU ranks run transfers one after the other, as on a stream: the end of the last one.
        self._ended: Future[None] = Future()
        self._ended.set_result(None)
        self._peers: Peers | None = None
        self._sent = torch.empty(0)
        self._stripes = torch.empty(0)

    def extra_bytes(self, layers: Sequence[LayerBuffer]) -> int:
        """Return the bytes of the send buffer, which peers read, and of the stripe buffers."""
        return sum(buffer_bytes(layers, self._domain_sizes))

    def allocate(self, size: int, layers: Sequence[LayerBuffer], device: torch.device) -> Tensor:
        """Allocate [size] uint8 that peers can read, followed by send buffer and stripe buffers.

        Raises:
            RuntimeError: on all ranks, if the memory cannot be allocated on one or not be mapped by
                its peers.
        """
        compile_programs()
        # Transfers in flight may use the memory that is freed here.
        futures.wait([self._ended])
        if self._peers is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        # The old memory is freed before the new memory is allocated.
        self.release()
        sizes = [LayerBuffer.aligned(size, torch.uint8), *buffer_bytes(layers, self._domain_sizes)]
        domain = next(domain for domain in self._domains if self._rank in domain)
        self._kernels = TransferKernels(device)
        self._peers = Peers(
            self._domain, sum(sizes), device=device, ranks=domain, timeout=self.timeout
        )
        # The counters in the new memory are 0.
        self._begin = 1
        replicas, self._sent, self._stripes = self._peers.buffers.split(sizes)
        return replicas[:size]

    def release(self) -> None:
        self._peers = None
        self._sent = self._sent.new_empty(0)
        self._stripes = self._stripes.new_empty(0)

    def prepare(self, plan: TransferPlan, layer: LayerBuffer) -> None:
        self._stages(plan, elements=layer.weights[0], sums=False)
        self._stages(plan, elements=layer.elements, sums=True)

    def fetch(
        self,
        plan: TransferPlan,
        homes: Sequence[Sequence[Tensor]],
        slots: Sequence[Tensor],
        *,
        label: str,
    ) -> Transfer:
        """Begin a spAG. ``slots`` have the same offsets in the memory of all ranks."""
        # The kernels read parameters by address, without strides.
        for index in plan.replicated:
            if not all(tensor.is_contiguous() for tensor in homes[index]):
                raise ValueError(f"{label}: parameters of own expert {index} are not contiguous")
        stages = self._stages(plan, elements=len(slots[0]), sums=False)
        own_homes = {index: homes[index] for index in plan.replicated}
        job = self._job("spAG", label, own_homes, slots)
        return self._start(self._prepare_runs(stages, job), what="spAG", label=label)

    def return_gradients(
        self, plan: TransferPlan, slots: Sequence[Tensor], homes: HomeGradients, *, label: str
    ) -> Transfer:
        """Begin a spRS. ``slots`` have the same offsets in the memory of all ranks.

        Afterwards ``slots`` may hold parts of sums.

        Raises:
            ValueError: the gradients are not fp32.
        """
        if not plan.copies:
            return self._start([], what="spRS", label=label)
        if slots[0].dtype is not torch.float32:
            raise ValueError(
                f"{label}: gradients of {slots[0].dtype} cannot be summed by our kernels; use p2p"
            )
        main_grads = {index: homes.main_grads(index) for index in plan.replicated}
        # Sums of experts without main gradients, which `HomeGradients.add` takes at the end.
        totals = {
            index: torch.zeros_like(slots[0])
            for index, grads in main_grads.items()
            if grads is None
        }
        elements = len(slots[0])
        sizes = [elements]
        for grads in filter(None, main_grads.values()):
            sizes = [grad.numel() for grad in grads]
        targets = {
            index: grads or totals[index].split(sizes) for index, grads in main_grads.items()
        }
        stages = self._stages(plan, elements=elements, sums=True)
        job = self._job("spRS", label, targets, slots)
        runs = self._prepare_runs(stages, job)

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
        """Start a transfer; on CPU ranks after the transfers started before.

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
        transfer = Transfer(steps(), device, what=what, label=label, previous=self._ended)
        if transfer.ended is not None:
            self._ended = transfer.ended
        return transfer

    def _stages(self, plan: TransferPlan, *, elements: int, sums: bool) -> tuple[Stage, ...]:
        return _cached_stages(
            plan.copies, self._rank, domains=self._domains, elements=elements, sums=sums
        )

    def _job(
        self, what: str, label: str, homes: Mapping[int, Sequence[Tensor]], slots: Sequence[Tensor]
    ) -> _Job:
        """Describe a transfer of ``homes``, the tensors of the own experts that are moved."""
        slot = slots[0]
        stride = LayerBuffer.aligned(len(slot), slot.dtype)
        stripe = LayerBuffer.aligned(stripe_elements(len(slot), self._domain_sizes), slot.dtype)
        places = {
            SEND: (self._sent.data_ptr(), stride),
            SLOT: (slot.data_ptr(), stride),
            STRIPE: (self._stripes.data_ptr(), stripe),
        }
        buffers = tuple(places.get(kind, (0, 0)) for kind in range(1 + STRIPE))
        return _Job(what, label, homes, slots, Memory.of(homes, buffers, slot.itemsize))

    def _elements(self, part: Part, job: _Job) -> Tensor:
        """Return the elements of ``part``, which is on this rank."""
        if part.memory == SLOT:
            chunk = job.slots[part.index]
        else:
            memory = self._sent if part.memory == SEND else self._stripes
            _, stride = job.memory.buffers[part.memory]
            chunk = memory[part.index * stride :][:stride].view(job.slots[0].dtype)
        return chunk[part.begin - part.first : part.end - part.first]

    def _memory_of_peers(self) -> Peers:
        assert self._peers is not None, "allocate was not called"
        return self._peers

    def _prepare_runs(self, stages: Sequence[Stage], job: _Job) -> list[Callable[[], None]]:
        """Prepare all stages of a transfer now, and return the functions that run them."""
        peers = self._memory_of_peers()
        # A kernel that timed out has destroyed the CUDA context: no further launch can succeed.
        if peers.device.type == "cuda" and peers.failure is not None:
            raise TransferError(peers.explain_failure())
        tag = self._between.next_tag() if len(stages) > 1 else 0
        return [
            self._prepare_messages(stage, job, tag=tag)
            if isinstance(stage, Messages)
            else self._prepare_kernel(stage, job)
            for stage in stages
        ]

    def _prepare_messages(self, stage: Messages, job: _Job, *, tag: int) -> Callable[[], None]:
        """Prepare a stage of messages between domains, and return the function that runs it."""
        batch = self._between.batch(tag, what=job.what, label=job.label)
        for messages, post in ((stage.sends, batch.send), (stage.receives, batch.receive)):
            for part, rank in messages:
                post(self._elements(part, job), rank)
        sums = [self._elements(total, job) for _, total in stage.adds]
        received = [self._elements(source, job) for source, _ in stage.adds]

        def run() -> None:
            batch.start()
            batch.finish()
            if sums:
                torch._foreach_add_(sums, received)

        return run

    def _prepare_kernel(self, schedule: TransferSchedule, job: _Job) -> Callable[[], None]:
        """Prepare a stage inside the domain, and return the function that runs it."""
        peers = self._memory_of_peers()
        # The next stage begins above the last counter of this one, ``begin`` plus its steps. All
        # ranks count every stage, also stages without a part for them.
        begin = self._begin
        self._begin += schedule.num_steps + 1
        if begin // REFRESH != self._begin // REFRESH:
            schedule = dataclasses.replace(schedule, participants=frozenset(peers.ranks))
        if self._rank not in schedule.participants:
            return lambda: None
        peers.remember(
            begin,
            f"{job.label}: {job.what} failed on rank {self._rank} of {self.group.size()} (timeout "
            f"{self.timeout:g} s): expected rank {{peer}} to finish {schedule.num_steps} steps",
        )
        program = assemble(schedule, job.memory, peers.signals, begin=begin)
        return functools.partial(self._run_kernel, program, peers, job)

    def _run_kernel(self, program: np.ndarray, peers: Peers, job: _Job) -> None:
        """Run a stage on the current stream, or on the host.

        Raises:
            TransferError: a peer died or did not answer in time, in this or an earlier transfer.
        """
        name = "fssdp_reduce" if job.what == "spRS" else "fssdp_gather"
        if peers.failure is None:
            try:
                self._kernels.run(name, program, ranks=len(peers.ranks))
            except RuntimeError:
                # The barrier of the peers timed out, which ends the CUDA context.
                if peers.failure is None:
                    raise
        if peers.failure is not None:
            # The caller that waits for the transfer may be stuck elsewhere.
            peers.look_for_failure()
            raise TransferError(peers.explain_failure())


# All microbatches of a plan have the same stages.
_cached_stages = functools.lru_cache(maxsize=CACHED)(stages_of)


def buffer_bytes(layers: Sequence[LayerBuffer], domains: tuple[int, ...]) -> tuple[int, int]:
    """Return the bytes of the send buffer and of all stripe buffers, for the largest layers.

    Args:
        layers: sizes of the layers.
        domains: number of ranks of each NVLink domain.
    """
    if not any(layer.slots for layer in layers):
        return 0, 0
    send_bytes = max(layer.homes * LayerBuffer.aligned(*layer.weights) for layer in layers)
    stripes = 0
    for layer in layers:
        in_fetch, in_return = most_stripes(layer, domains)
        elements, dtype = layer.weights
        fetch_bytes = LayerBuffer.aligned(stripe_elements(elements, domains), dtype)
        elements, dtype = layer.elements, layer.grad_dtype
        return_bytes = LayerBuffer.aligned(stripe_elements(elements, domains), dtype)
        stripes = max(stripes, in_fetch * fetch_bytes, in_return * return_bytes)
    return send_bytes, stripes
