"""The transport ``nvlink``: spAG and spRS by our kernels, over memory that peers can read (`peers`).

The receiver pulls, so nothing is sent; a home sums its replicas' gradients in one pass, into fp32 main gradients where
there are some. Between NVLink domains stripes travel by messages (`domains`). Copies of a spAG may be made by the GPU's
copy engines.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hecate.comm.nvlink.domains import (
    Domains,
    Messages,
    Stage,
    Stages,
)
from megatron_hecate.comm.nvlink.launch import TransferKernels
from megatron_hecate.comm.nvlink.peers import Peers
from megatron_hecate.comm.nvlink.places import Place
from megatron_hecate.comm.nvlink.program import Extent
from megatron_hecate.comm.nvlink.program_cache import Memory, Programs
from megatron_hecate.comm.nvlink.schedule import PLANS, Schedule
from megatron_hecate.comm.p2p import P2P
from megatron_hecate.comm.transfer import Stopwatch, Transfer
from megatron_hecate.comm.transport import Copy, HomeGradients, LayerBuffer, TransferPlan, chunks_in
from megatron_hecate.job.collectives import TransferError

REFRESH: int = (
    1 << 30
)  # steps after which all ranks tell each other, lest a counter fall behind by half its range

Build = Callable[..., tuple[Stage, ...]]


@dataclasses.dataclass(frozen=True)
class _Job:
    """A transfer.

    Args:
        what: "spAG" or "spRS".
        label: name of the layer.
        itemsize: bytes of an element.
        memory: the tensors of every place in this rank's memory.
        watch: its "begin" is marked when all ranks have come.
    """

    what: str
    label: str
    itemsize: int
    memory: Callable[[Place], Sequence[Tensor]]
    watch: Stopwatch | None = None

    def mark_begin(self) -> None:
        """Mark the "begin" of the watch, if there is one and it has none."""
        if self.watch is not None and not self.watch.begun:
            self.watch.mark("begin")

    @property
    def name(self) -> str:
        return f"{self.label}: {self.what}"


class NVLink:
    """Moves one FSSDP group's replicas by kernels. See `transport.Transport`.

    Args:
        group: all ranks.
        domain: the ranks of this rank's NVLink domain, in order of their rank in ``group``.
        domains: NVLink domains, in ranks of ``group``; every rank is in one.
        timeout: seconds per wait.
        copy_engines: whether they make the copies of a spAG.
    """

    name, scatters = "nvlink", True

    def __init__(
        self,
        group: dist.ProcessGroup,
        domain: dist.ProcessGroup,
        *,
        domains: Domains,
        timeout: float,
        copy_engines: bool = False,
    ) -> None:
        self.group, self.timeout, self.copy_engines = group, timeout, copy_engines
        self._domain, self._domains = domain, tuple(map(tuple, domains))
        self._rank = group.rank()
        self._between = P2P(group, timeout=timeout)
        self._stripe_elements: dict[int, int] = {}  # by elements of a chunk
        self._begin = 1  # more than what the counters stand at
        self._ended: Future[None] = (
            Future()
        )  # CPU ranks: transfers run one after the other, as on a stream
        self._ended.set_result(None)
        self._peers: Peers | None = None
        self._programs: Programs | None = None
        self._sent = self._stripes = torch.empty(0)

    def extra_bytes(self, layers: Sequence[LayerBuffer]) -> int:
        """The send buffer, where peers read this rank's experts, and stripe buffers for what goes between domains."""
        return sum(self._sent_and_stripe_bytes(layers))

    def _sent_and_stripe_bytes(self, layers: Sequence[LayerBuffer]) -> tuple[int, int]:
        if not any(layer.slots for layer in layers):
            return 0, 0
        sent = max(layer.homes * LayerBuffer.aligned(*layer.weights) for layer in layers)
        stripes, domains = 0, [len(domain) for domain in self._domains]
        for layer in layers:
            elements, dtype = layer.weights
            fetched, in_fetch, _ = Stages.stripe_buffers(layer, elements, domains)
            returned, _, in_return = Stages.stripe_buffers(layer, layer.elements, domains)
            in_fetch *= LayerBuffer.aligned(fetched, dtype)
            stripes = max(
                stripes, in_fetch, in_return * LayerBuffer.aligned(returned, layer.grad_dtype)
            )
        return sent, stripes

    def allocate(self, size: int, layers: Sequence[LayerBuffer], device: torch.device) -> Tensor:
        """[size] uint8 that peers can read, with the send buffer and stripe buffers behind.

        Raises:
            RuntimeError: on all ranks, when there is too little memory, or ranks cannot see each other's.
        """
        futures.wait([self._ended])
        if self._peers is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        self._peers, self._sent, self._stripes = (
            None,
            torch.empty(0),
            torch.empty(0),
        )  # before there is new memory
        sizes = [LayerBuffer.aligned(size, torch.uint8), *self._sent_and_stripe_bytes(layers)]
        domain = next(domain for domain in self._domains if self._rank in domain)
        self._kernels = TransferKernels(device)
        self._peers = Peers(
            self._domain, sum(sizes), device=device, ranks=domain, timeout=self.timeout
        )
        self._programs = Programs(self._peers.signals)
        self._begin = 1
        replicas, self._sent, self._stripes = self._peers.buffers.split(sizes)
        domains = [len(domain) for domain in self._domains]
        chunks = [
            (layer, elements) for layer in layers for elements in (layer.weights[0], layer.elements)
        ]
        self._stripe_elements = {
            n: Stages.stripe_buffers(layer, n, domains)[0] for layer, n in chunks
        }
        return replicas[:size]

    def release(self) -> None:
        self._peers = self._programs = None
        self._sent, self._stripes = self._sent.new_empty(0), self._stripes.new_empty(0)

    def prepare(self, plan: TransferPlan, layer: LayerBuffer) -> None:
        self._stages(Stages.of_fetch, plan, elements=layer.weights[0])
        self._stages(Stages.of_return, plan, elements=layer.elements)

    def fetch(
        self,
        plan: TransferPlan,
        homes: Sequence[Sequence[Tensor]],
        slots: Sequence[Tensor],
        *,
        label: str,
        timed: bool = False,
    ) -> Transfer:
        """Begin a spAG. ``slots`` lie at the same place on all ranks."""
        for index in plan.replicated:
            if not all(tensor.is_contiguous() for tensor in homes[index]):
                raise ValueError(f"{label}: parameters of own expert {index} are not contiguous")
        elements, dtype = sum(tensor.numel() for tensor in homes[0]), homes[0][0].dtype
        sent = chunks_in(self._sent, len(homes) if plan.copies else 0, elements, dtype)
        stripes = self._stripe_chunks(elements, dtype)

        def memory(place: Place) -> Sequence[Tensor]:
            if place.memory == "parameters":
                return homes[place.index]
            return ({"send": sent, "slot": slots, "stripe": stripes}[place.memory][place.index],)

        stages = self._stages(Stages.of_fetch, plan, elements=elements)
        device = self._memory_of_peers().device
        watch = Stopwatch(device) if timed else None
        meet = None  # in one domain the ranks of the kernel meet anyhow
        if timed and len(stages) > 1:
            meet = functools.partial(
                self._between.meet, plan, device, tag=self._between.next_tag(), label=label
            )
        steps = self._run(stages, _Job("spAG", label, dtype.itemsize, memory, watch), meet)
        return self._start(steps, what="spAG", label=label, watch=watch)

    def return_gradients(
        self, plan: TransferPlan, slots: Sequence[Tensor], homes: HomeGradients, *, label: str
    ) -> Transfer:
        """Begin a spRS. ``slots`` lie at the same place on all ranks, and may hold parts of sums afterwards.

        Raises:
            ValueError: for gradients that are not fp32.
        """
        if not plan.copies:
            return self._start(iter(()), what="spRS", label=label)
        if slots[0].dtype is not torch.float32:
            raise ValueError(
                f"{label}: gradients of {slots[0].dtype} cannot be summed by our kernels; use p2p"
            )
        into = {index: homes.main_grads(index) for index in plan.replicated}
        apart = {
            index: torch.zeros_like(slots[0]) for index, found in into.items() if found is None
        }
        elements = slots[0].numel()
        stripes = self._stripe_chunks(elements, torch.float32)

        def memory(place: Place) -> Sequence[Tensor]:
            if place.memory == "main_grad":
                return into[place.index] or (apart[place.index],)
            return ((stripes if place.memory == "stripe" else slots)[place.index],)

        stages = self._stages(Stages.of_return, plan, elements=elements)
        steps = self._run(stages, _Job("spRS", label, 4, memory))

        def run() -> Iterator[None]:
            yield from steps
            if apart:
                yield
            for index, total in apart.items():
                if total.is_cuda:
                    total.record_stream(torch.cuda.current_stream())
                homes.add(index, total)

        return self._start(run(), what="spRS", label=label)

    def _start(
        self, steps: Iterator[None], *, what: str, label: str, watch: Stopwatch | None = None
    ) -> Transfer:
        device = self._memory_of_peers().device
        transfer = Transfer(steps, device, what=what, label=label, watch=watch, after=self._ended)
        if device.type != "cuda":
            self._ended = transfer.ended
        return transfer

    def _stages(self, build: Build, plan: TransferPlan, *, elements: int) -> tuple[Stage, ...]:
        return _kept_stages(
            build, plan.copies, rank=self._rank, domains=self._domains, elements=elements
        )

    def _memory_of_peers(self) -> Peers:
        assert self._peers is not None, "allocate was not called"
        return self._peers

    def _stripe_chunks(self, elements: int, dtype: torch.dtype) -> list[Tensor]:
        width = self._stripe_elements[elements]
        return chunks_in(
            self._stripes, self._stripes.nbytes // LayerBuffer.aligned(width, dtype), width, dtype
        )

    def _run(
        self, stages: Sequence[Stage], job: _Job, meet: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """The steps of all stages, after all ranks ``meet`` where they must before."""
        peers = self._memory_of_peers()
        if peers.device.type == "cuda" and peers.failure is not None:
            raise TransferError(peers.explain_failure())
        tag = self._between.next_tag() if len(stages) > 1 else 0
        runs = [
            self._run_messages(stage, job, tag=tag)
            if isinstance(stage, Messages)
            else self._run_kernel(stage, job)
            for stage in stages
        ]

        def run() -> Iterator[None]:
            if meet is not None:
                meet()
                job.mark_begin()
            for (
                run_stage
            ) in runs:  # none is left to `Transfer.wait`: counters go up in the order of transfers
                run_stage()
            yield from ()

        return run()

    def _run_messages(self, stage: Messages, job: _Job, *, tag: int) -> Callable[[], None]:
        """A stage between domains."""
        batch = self._between.batch(tag, what=job.what, label=job.label)
        for parts, post in ((stage.sends, batch.send), (stage.receives, batch.receive)):
            for part, rank in parts:
                (tensor,) = job.memory(part.at)
                post(tensor[part.begin - part.at.begin : part.end - part.at.begin], rank)

        def run() -> None:
            batch.start()
            batch.finish()

        return run

    def _run_kernel(self, schedule: Schedule, job: _Job) -> Callable[[], None]:
        """A stage inside the domain."""
        peers, sums, begin = self._memory_of_peers(), job.what == "spRS", self._begin
        self._begin += len(schedule.steps) + 1
        if begin // REFRESH != self._begin // REFRESH or job.watch is not None:
            schedule = dataclasses.replace(schedule, peers=frozenset(peers.ranks) - {self._rank})
        if not schedule.peers and not any(schedule.steps):
            return job.mark_begin
        expected = f"to finish {len(schedule.steps)} steps"
        failing = (
            f"{job.name} failed (timeout {self.timeout:g} s): expected rank {{peer}} {expected}"
        )
        peers.remember(begin, f"rank {self._rank} of {self.group.size()}: {failing}")

        def own(place: Place) -> list[Extent]:
            tensors = job.memory(place)
            assert place.memory in ("parameters", "main_grad") or all(map(peers.holds, tensors)), (
                "not in the buffers"
            )
            return [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]

        memory = Memory(own, rank=self._rank, apart=peers.apart)
        assert self._programs is not None
        program = self._programs.make(
            schedule, memory, itemsize=job.itemsize, sums=sums, begin=begin
        )

        def run() -> None:
            start = time.monotonic()
            if peers.failure is None:
                at = torch.empty(len(program.data), dtype=torch.uint8, device=peers.device)
                try:
                    if self.copy_engines and not sums:
                        stopped = lambda: peers.failure is not None  # noqa: E731
                        self._kernels.run_by_copy_engines(
                            program, at, stopped=stopped, met=job.mark_begin
                        )
                    else:
                        name = "fssdp_reduce" if sums else "fssdp_gather"
                        self._kernels.run(name, program, at, met=job.mark_begin)
                except RuntimeError:
                    if (
                        peers.failure is None
                    ):  # else the block that meets the peers gave up, and CUDA with it
                        raise
            if peers.failure is not None:
                if peers.device.type == "cuda" or not schedule.peers:
                    raise TransferError(peers.explain_failure())
                steps = {peer: peers.steps_of(peer, since=begin) for peer in sorted(schedule.peers)}
                last = min(steps, key=steps.__getitem__)  # others may wait for it as well
                text = (
                    f"{job.name} failed on rank {self._rank} of {self.group.size()} after "
                    f"{time.monotonic() - start:.1f} s (timeout {self.timeout:g} s): expected rank {last} {expected}, "
                    f"{max(0, steps[last])} were seen. Rank {last} died, hangs, or did not take part, in this transfer "
                    "or in one before."
                )
                peers.report(text)  # whoever waits for it may be stuck elsewhere
                raise TransferError(text)

        return run


@functools.lru_cache(maxsize=PLANS)
def _kept_stages(
    build: Build, copies: tuple[Copy, ...], *, rank: int, domains: Domains, elements: int
) -> tuple[Stage, ...]:
    """A plan's stages, which its microbatches share."""
    return build(copies, rank, domains=domains, elements=elements)
