"""Notes what a rank that trains under `gpu_on_cpu` tells its GPU, as entries of `stream_order`.

Work is every ATen operation that is no view, every launch of our kernels, and every collective: on a stream of its group, as NCCL's are, which waits for the current one. ``.item()`` is a wait of the host, and so is
every synchronization of a stream or an event. Memory is followed where it lives for longer than a step: buffers of
replicas, on all ranks, parameters and main gradients. ``.cpu()`` and ``.tolist()`` cannot be seen.

Lengths are units, not times: a GEMM takes 1, a transfer 2, a collective 1, everything else next to nothing.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import streams_on_cpu
import torch
import torch.distributed as dist
from stream_order import Entry, Range, Work
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_hecate.device.launch import Kernels
from megatron_hecate.nvlink import peers
from megatron_hecate.nvlink.launch import TransferKernels
from megatron_hecate.nvlink.program import COPY, SOURCE, SUM, TRANSFER

GEMMS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_scaled_dot_product")
PRIVATE = 1 << 56  # addresses of memory that one rank alone sees
GEMM, TRANSFERRED, COLLECTIVE, SMALL = 1.0, 2.0, 1.0, 0.01
COLLECTIVE_BLOCKS = 8  # of NCCL's kernels, which wait for other ranks as well


class Recording(TorchDispatchMode):
    """Notes from `begin` to `end`. Make it before the model, so that it knows the buffers of replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.where = ""  # what part of the model computes
        self._rank, self._sent = dist.get_rank(), Counter[str]()
        self._blocks: list[
            tuple[int, int, int, int]
        ] = []  # rank, address here, bytes, where the rank sees it
        self._watched: list[tuple[int, int]] = []
        self._programs: dict[int, np.ndarray] = {}
        self._ended: dict[Any, Any] = {}
        self._on = False
        _after(peers.Peers, "__init__", self._buffers)
        _after(
            TransferKernels,
            "_upload",
            lambda _, data, at: self._programs.__setitem__(at.data_ptr(), data),
        )
        _after(
            Kernels,
            "launch",
            lambda _, name, *arguments, **sizes: self._launched(name, arguments, **sizes),
        )
        _after(dist.Work, "wait", lambda work, *_: self._waited(work))

    def begin(self, chunks: Iterable[torch.nn.Module]) -> None:
        """From here on; the models' parameters and gradients are followed."""
        for chunk in chunks:
            for parameter in chunk.parameters():
                for tensor in (parameter.data, getattr(parameter, "main_grad", None)):
                    if tensor is not None:
                        self._watched.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
            for name, module in chunk.named_modules():
                if name.endswith("self_attention"):
                    module.register_forward_pre_hook(
                        lambda *_: setattr(self, "where", "attention ")
                    )
                    module.register_forward_hook(lambda *_: setattr(self, "where", ""))
        streams_on_cpu.issued.clear()
        self._on = True
        self.__enter__()

    def end(self) -> list[Entry]:
        """What was noted."""
        self.__exit__(None, None, None)
        self._on = False
        return list(streams_on_cpu.issued)

    def _note(self, name: str, length: float, **fields: Any) -> None:
        if self._on:
            work = Work(
                torch.cuda.current_stream().cuda_stream, self.where + name, length, **fields
            )
            streams_on_cpu.issued.append(work)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        made = op(*args, **(kwargs or {}))
        name = op._schema.name
        if name.startswith("c10d::"):
            self._collective(name, args, made)
            return made
        if name == "aten::_local_scalar_dense":
            torch.cuda.current_stream().synchronize()
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {tensor.untyped_storage()._cdata for tensor in given}
        new = [
            t
            for t in tree_leaves(made)
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in known
        ]
        if (name != "aten::set_" and op._schema.is_mutable) or (new and "empty" not in name):
            written = _written(op, args, kwargs or {})
            reads = tuple(found for tensor in given for found in self._place(tensor))
            writes = tuple(found for tensor in written for found in self._place(tensor))
            self._note(
                name.removeprefix("aten::"),
                GEMM if name in GEMMS else SMALL,
                reads=reads,
                writes=writes,
            )
        return made

    # memory

    def _buffers(self, made: peers.Peers, *_: Any, **__: Any) -> None:
        bases = made.signals.progress_at.values()
        number = len(self._blocks) // len(bases)
        size = peers.COUNTERS + made.buffers.nbytes
        self._blocks += [(rank, base, size, number << 40) for rank, base in enumerate(bases)]

    def _place(self, tensor: Tensor) -> list[Range]:
        if not tensor.numel():
            return []
        begin = tensor.data_ptr()
        last = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        end = begin + (last + 1) * tensor.element_size()
        inside = any(begin < stop and start < end for start, stop in self._watched)
        return [self._range(begin, end - begin)] if inside or self._shared(begin) else []

    def _shared(self, address: int) -> tuple[int, int, int, int] | None:
        return next(
            (
                block
                for block in reversed(self._blocks)
                if block[1] <= address < block[1] + block[2]
            ),
            None,
        )

    def _range(self, begin: int, size: int) -> Range:
        block = self._shared(begin)
        if block is None:
            return self._rank, PRIVATE + begin, PRIVATE + begin + size
        rank, base, _, common = block
        return rank, common + begin - base, common + begin - base + size

    # what is launched

    def _launched(
        self, name: str, arguments: tuple, *, blocks: int, threads: int, shared_bytes: int = 0
    ) -> None:
        program = self._programs.get(arguments[0].value)
        if program is None:
            self._note(name, SMALL)
            return
        transfer = program[: TRANSFER.itemsize].view(TRANSFER)[0]
        bits = int(transfer["peers"][0]) | int(transfer["peers"][1]) << 64
        ranks = frozenset(rank for rank in range(int(transfer["world"])) if bits >> rank & 1) | {
            self._rank
        }
        meets = (f"{name} {transfer['begin']}", ranks)
        kind = {"fssdp_gather": "spAG", "fssdp_reduce": "spRS"}.get(name, "")
        reads: tuple[Range, ...] = ()
        writes: tuple[Range, ...] = ()
        if kind:
            begin = arguments[0].value
            reads, writes = self._moved(program, transfer, begin=begin, sums=kind == "spRS")
        self._note(
            f"{kind or name} {transfer['begin']}",
            TRANSFERRED if kind else SMALL,
            blocks=blocks,
            meets=meets,
            reads=reads,
            writes=writes,
        )

    def _moved(
        self, program: np.ndarray, transfer: Any, *, begin: int, sums: bool
    ) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """What a whole transfer reads and writes; what it wrote before it reads it is none of the others' business."""
        reads, writes = [], []

        def array(at: int, dtype: np.dtype, count: int) -> np.ndarray:
            return program[at - begin :][: count * dtype.itemsize].view(dtype)

        for step in transfer["steps"][: int(transfer["num_steps"])]:
            if not sums:
                for item in array(int(step["items"]), COPY, int(step["count"])):
                    reads.append(self._range(int(item["src"]), int(item["bytes"])))
                    writes.append(self._range(int(item["dst"]), int(item["bytes"])))
                continue
            for item in array(int(step["items"]), SUM, int(step["count"])):
                writes.append(self._range(int(item["dst"]), 4 * int(item["elements"])))
                first, count = int(item["first_source"]), int(item["sources"])
                for source in array(int(step["sources"]), SOURCE, first + count)[first:]:
                    reads.append(self._range(int(source["src"]), 4 * int(item["elements"])))
        return tuple(reads), tuple(writes)

    # collectives

    def _collective(self, name: str, args: tuple, made: Any) -> None:
        scripted = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.ScriptObject)]
        group = next(
            dist.ProcessGroup.unbox(leaf)
            for leaf in scripted
            if "ProcessGroup" in str(leaf._type())
        )
        self._sent[group.group_name] += 1
        ranks = frozenset(dist.get_process_group_ranks(group))
        key = f"{name} {self._sent[group.group_name]} of {group.group_name}"
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        touched = tuple(found for tensor in tensors for found in self._place(tensor))
        stream = _stream_of(group.group_name)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fields = dict(
                blocks=COLLECTIVE_BLOCKS, meets=(key, ranks), reads=touched, writes=touched
            )
            self._note(name.removeprefix("c10d::"), COLLECTIVE, **fields)
        for work in (leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.ScriptObject)):
            python = torch._C._distributed_c10d.Work.unbox(work)
            self._ended[id(python)] = stream.record_event(), python

    def _waited(self, work: Any) -> None:
        if self._on and id(work) in self._ended:
            torch.cuda.current_stream().wait_event(self._ended.pop(id(work))[0])
        elif self._on:
            raise AssertionError("a wait for a collective that was not seen")


@functools.cache
def _stream_of(group: str) -> Any:
    return torch.cuda.Stream()


def _after(owner: Any, name: str, note: Any) -> None:
    """Call ``note`` with the arguments of every call of ``owner.name``, before it returns."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def noted(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        note(*args, **kwargs)
        return made

    setattr(
        owner,
        name,
        staticmethod(noted) if isinstance(owner.__dict__.get(name), staticmethod) else noted,
    )


def _written(op: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    found: list[Any] = []
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tree_leaves(args[index] if index < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in found if isinstance(leaf, Tensor)]
