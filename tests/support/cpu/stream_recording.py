"""Notes what a rank that trains under `gpu_on_cpu` tells its GPU, as entries of `stream_order`.

Work is every ATen operation that is no view, every launch of our kernels, and every collective: on a stream of its
group, as NCCL's are, which waits for the current one. ``.item()`` is a wait of the host, and so is every synchronization
of a stream or an event. Memory is followed where it lives for longer than a step: buffers of
replicas, on all ranks, parameters and main gradients. ``.cpu()`` and ``.tolist()`` cannot be seen.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import streams_on_cpu
import torch
import torch.distributed as dist
from graph_capture import written
from stream_order import Entry, Range, Work
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_hecate.device.launch import Kernels
from megatron_hecate.nvlink import peers
from megatron_hecate.nvlink.transport import NVLink

PRIVATE = 1 << 56  # addresses of memory that one rank alone sees
COLLECTIVE_BLOCKS = 8  # of NCCL's kernels, which wait for other ranks as well


class Recording(TorchDispatchMode):
    """Notes from `begin` to `end`. Make it before the model, so that it knows the buffers of replicas."""

    def __init__(self) -> None:
        super().__init__()
        self._rank, self._sent = dist.get_rank(), Counter[str]()
        # memory that is followed: begin and end here, its rank, and what to add for an address that all ranks share
        self._regions: list[tuple[int, int, int, int]] = []
        self._num_buffers = self._num_exchanges = 0
        # the running transfer, and where the memory of each of its peers begins
        self._transfer: tuple[Any, int, dict[int, int]] | None = None
        self._events: dict[Any, Any] = {}  # of collectives, by their works
        self._is_on = False
        _after(peers.Peers, "__init__", self._follow_buffers)
        _around(NVLink, "_run_kernel", self._transferring)
        _after(Kernels, "launch", self._launched)
        _after(dist.Work, "wait", self._waited)

    def begin(self, chunks: Iterable[torch.nn.Module]) -> None:
        """From here on; the models' parameters and gradients are followed."""
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            for tensor in (parameter.data, getattr(parameter, "main_grad", None)):
                if tensor is not None:
                    address = tensor.data_ptr()
                    region = address, address + tensor.nbytes, self._rank, PRIVATE
                    self._regions.append(region)
        streams_on_cpu.issued.clear()
        self._is_on = True
        self.__enter__()

    def end(self) -> list[Entry]:
        """What was noted."""
        self.__exit__(None, None, None)
        self._is_on = False
        return list(streams_on_cpu.issued)

    def _note(self, name: str, **fields: Any) -> None:
        if self._is_on:
            stream = torch.cuda.current_stream().cuda_stream
            streams_on_cpu.issued.append(Work(stream, name, **fields))

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        results = op(*args, **(kwargs or {}))
        name = op._schema.name
        if name.startswith("c10d::"):
            self._collective(name, args, results)
            return results
        if name == "aten::_local_scalar_dense":
            torch.cuda.current_stream().synchronize()
        inputs = _tensors((args, kwargs))
        storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        is_new = any(t.untyped_storage()._cdata not in storages for t in _tensors(results))
        if (name != "aten::set_" and op._schema.is_mutable) or (is_new and "empty" not in name):
            self._note(
                name.removeprefix("aten::"),
                reads=self._memory(inputs),
                writes=self._memory(written(op, args, kwargs or {})),
            )
        return results

    # memory

    def _follow_buffers(self, buffers: peers.Peers, *_: Any, **__: Any) -> None:
        self._num_buffers += 1
        size = peers.COUNTERS + buffers.buffers.nbytes
        for rank, base in enumerate(buffers.signals.progress):
            self._regions.append((base, base + size, rank, (self._num_buffers << 40) - base))

    def _memory(self, tensors: Iterable[Tensor]) -> tuple[Range, ...]:
        ranges: list[Range] = []
        for tensor in tensors:
            if tensor.numel():
                steps = zip(tensor.shape, tensor.stride(), strict=True)
                last = sum((size - 1) * stride for size, stride in steps)
                ranges += self._ranges(tensor.data_ptr(), (last + 1) * tensor.element_size())
        return tuple(ranges)

    def _ranges(self, begin: int, size: int) -> list[Range]:
        end = begin + size
        for start, stop, rank, shift in reversed(self._regions):
            if begin < stop and start < end:
                return [(rank, begin + shift, end + shift)]
        return []

    # what is launched

    @contextlib.contextmanager
    def _transferring(
        self, transport: NVLink, buffers: peers.Peers, job: Any, begin: int, away: bool
    ) -> Iterator[None]:
        bases = dict(zip(buffers.ranks, buffers.signals.progress, strict=True))
        self._transfer = job, begin, bases
        yield
        self._transfer = None

    def _launched(
        self, _: Any, name: str, *arguments: Any, blocks: int, threads: int, shared_bytes: int = 0
    ) -> None:
        if self._transfer is None:
            exchanges = name == "fssdp_quotas" and arguments[-2].value
            self._num_exchanges += bool(exchanges)
            met = f"loads {self._num_exchanges}", frozenset(range(dist.get_world_size()))
            self._note(name, blocks=1, **(dict(meets=met) if exchanges else {}))
            return
        job, begin, bases = self._transfer
        moves = name != "fssdp_synchronize"
        reads, writes = self._moved(job, bases) if moves else ((), ())
        self._note(
            f"{job.what if moves else name} {begin}",
            blocks=blocks,
            meets=(f"{name} {begin}", frozenset(bases)),
            reads=tuple(reads),
            writes=tuple(writes),
        )

    def _moved(self, job: Any, bases: dict[int, int]) -> tuple[list[Range], list[Range]]:
        """Slots of the layer, and parameters or main gradients; nobody else uses the transport's own buffer."""
        itemsize = 1 if job.what == "spAG" else int(job.kernel.split("_")[2]) // 8
        main_itemsize = 1 if job.what == "spAG" else int(job.kernel.split("_")[3]) // 8
        homes: list[Range] = []
        slots: dict[bool, list[Range]] = {True: [], False: []}  # of this rank, and of others
        first, stride = job.memory.chunks[1]
        for copy in job.plan.copies:
            if copy.home == job.plan.rank:
                sizes = zip(job.memory.homes[copy.index], job.memory.sizes, strict=True)
                for address, size in sizes:
                    homes += self._ranges(address, size * main_itemsize)
            begin = first + copy.slot * stride + bases[copy.rank] - bases[job.plan.rank]
            ranges = self._ranges(begin, sum(job.memory.sizes) * itemsize)
            slots[copy.rank == job.plan.rank] += ranges
        if job.what == "spAG":
            return homes, slots[True]
        return slots[True] + slots[False], homes

    # collectives

    def _collective(self, name: str, args: tuple, results: Any) -> None:
        scripted = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.ScriptObject)]
        group = next(
            dist.ProcessGroup.unbox(leaf)
            for leaf in scripted
            if "ProcessGroup" in str(leaf._type())
        )
        self._sent[group.group_name] += 1
        key = f"{name} {self._sent[group.group_name]} of {group.group_name}"
        memory = self._memory(_tensors(args))
        stream = _stream_of(group.group_name)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._note(
                name.removeprefix("c10d::"),
                blocks=COLLECTIVE_BLOCKS,
                meets=(key, frozenset(dist.get_process_group_ranks(group))),
                reads=memory,
                writes=memory,
            )
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.ScriptObject):
                work = torch._C._distributed_c10d.Work.unbox(leaf)
                self._events[id(work)] = stream.record_event(), work

    def _waited(self, work: Any, *_: Any) -> None:
        if self._is_on:
            assert id(work) in self._events, "a wait for a collective that was not seen"
            torch.cuda.current_stream().wait_event(self._events.pop(id(work))[0])


@functools.cache
def _stream_of(group: str) -> Any:
    return torch.cuda.Stream()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _around(owner: Any, name: str, during: Any) -> None:
    """Call every call of the method ``name`` in a block of ``during``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def noted(*args: Any, **kwargs: Any) -> Any:
        with during(*args, **kwargs):
            return original(*args, **kwargs)

    setattr(owner, name, noted)


def _after(owner: Any, name: str, note: Any) -> None:
    """Call ``note`` with the arguments of every call of the method ``name``, before it returns."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def noted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        note(*args, **kwargs)
        return result

    setattr(owner, name, noted)
