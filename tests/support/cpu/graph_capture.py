"""What a CUDA graph records and replays, for tensors on a CPU: the mechanism behind `graphs_on_cpu`.

While a `Graph` captures, every ATen operation, every collective of torch.distributed and every launch of our kernels is
noted with the very memory it reads and writes, in the backward too. As on a GPU, the capture itself leaves nothing
behind: kernels whose addresses are in tables do not run, memory of before gets its contents back, and what the capture allocated holds NaN until the first replay.
`Graph.replay` runs what was noted, on the same memory, and no Python.

A capture raises `streams_on_cpu.CaptureError`, which names the operation and the line that called it, for

* a wait of the host: ``.item()``, ``if tensor``, ``.cpu()``, ``.tolist()``, ``.numpy()``, synchronize and query;
* a shape that depends on data: nonzero, a mask as an index, unique, bincount, repeat_interleave without a size;
* a tensor made of Python data that meets a device's tensor: that is a copy from pageable memory;
* memory that is read and freed before the capture ends, for instance the indices of ``x[[0, 2]]``;
* memory pinned, by which CUDA waits for the device;
* work on a stream that has not joined the capture (its memory is not the graph's), a stream that waits for work of
  before the capture, a stream that joined and is not waited for in the end;
* a function that a test declared to be the host's work, see `not_in_graphs`.

A replay raises it when memory that the graph reads or writes was freed, moved or resized since the capture, and when a
result has another shape. A query or a wait of a captured event raises it afterwards.

What it cannot see: a tensor that was on the host before the capture (all are CPU tensors); addresses that kernels read
from tables in memory; a buffer that was replaced while the old one lives on (the results differ then); a tensor of the
graph's pool that somebody still reads after the pool gave its memory to another graph; Python that nobody declared.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from graph_calls import Call, Place, bytes_of, key_of, place_of
from streams_on_cpu import StreamOrder, calling_line, refuse
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

Tensor = torch.Tensor
_WAITS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"}
_DATA_DEPENDENT = {
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::bincount",
}  # fmt: skip
# kernels that take all addresses from tables in memory, which need not be right before a replay
_BY_TABLE = {
    "fssdp_synchronize", "fssdp_gather",
    *(f"fssdp_reduce_{grad}_{main}" for grad in (16, 32) for main in (16, 32)),
}  # fmt: skip
_NO_LOADS = torch.zeros(1 << 16, dtype=torch.int32)
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_OF_PYTHON_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
_TO_HOST = (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


def not_in_graphs(owner: Any, name: str) -> None:
    """From now on ``owner.name`` is the host's work: no graph may capture a call of it, as replays make none."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if Graph.current is not None:
            refuse(f"{getattr(owner, '__name__', owner)}.{name} ran inside a capture")
        return original(*args, **kwargs)

    setattr(owner, name, checked)


class Graph:
    """Stands in for ``torch.cuda.CUDAGraph``."""

    # the one that captures now
    current: ClassVar[Graph | None] = None
    # what graphs allocated, which stays theirs
    pools: ClassVar[dict[Any, dict[int, torch.UntypedStorage]]] = {}
    # whose address was asked for, for our kernels
    addresses: ClassVar[dict[int, StorageWeakRef]] = {}
    # made of Python data inside a capture
    on_host: ClassVar[dict[int, Tensor]] = {}
    # all that were captured
    made: ClassVar[list[Graph]] = []

    def __init__(self, keep_graph: bool = False) -> None:
        self.replays = 0
        self.calls: list[Call] = []
        self._pool: Any = None

    def register_generator_state(self, state: Any) -> None: ...

    def pool(self) -> Any:
        return self._pool

    def reset(self) -> None:
        self.calls = []

    def capture_begin(self, pool: Any = None, **_: Any) -> None:
        if Graph.current is not None:
            refuse("a capture began inside another one")
        self._pool = pool if pool is not None else object()
        self.mine = Graph.pools.setdefault(self._pool, {})
        # memory of others: alive, address, first use
        self.outside: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self._new: dict[int, torch.dtype] = {}  # what this capture allocates
        self._contents: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}  # what to put back
        self._generator = torch.default_generator.get_state()
        self.streams = StreamOrder()
        self.is_quiet = False
        self._modes = (_Python(self), _Operations(self))
        Graph.current, StreamOrder.current = self, self.streams
        for mode in self._modes:
            mode.__enter__()

    def capture_end(self, failed: bool = False) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)
        Graph.current = StreamOrder.current = None
        for storage, contents in self._contents.values():
            bytes_of(storage).copy_(contents)
        for key, dtype in self._new.items():
            if dtype.is_floating_point:
                bytes_of(self.mine[key]).fill_(255)
        torch.default_generator.set_state(self._generator)
        del self._contents, self._generator, self._modes
        if failed:
            return
        self.streams.assert_joined()
        self._sizes: dict[int, int] = {}
        for call in self.calls:
            inputs = [leaf for leaf in call.arguments if isinstance(leaf, Place)]
            for place in (*inputs, *(place for _, place in call.results)):
                self._sizes[place.key] = max(place.end, self._sizes.get(place.key, 0))
        for key in self._resized():  # freed inside the capture: the pool keeps the memory
            self.mine[key].resize_(self._sizes[key])
        self._find_outside()
        Graph.made.append(self)

    def replay(self) -> None:
        if Graph.current is not None:
            refuse("a graph was replayed inside a capture")
        storages = self._find_outside()
        tensors: dict[Place, Tensor] = {}
        works: list[Any] = []

        def tensor(place: Place) -> Tensor:
            if place not in tensors:
                storage = storages.get(place.key)
                tensors[place] = place.of(self.mine[place.key] if storage is None else storage)
            return tensors[place]

        with torch.no_grad(), torch._C.DisableTorchFunction():
            for call in self.calls:
                if not call.is_collective:
                    _wait(works)
                leaves = [
                    tensor(leaf) if isinstance(leaf, Place) else leaf for leaf in call.arguments
                ]
                args, kwargs = tree_unflatten(leaves, call.spec)
                results = tree_leaves(call.run(*args, **kwargs))
                works += [result for result in results if isinstance(result, torch.ScriptObject)]
                for index, place in call.results:
                    if tuple(results[index].shape) != place.size:
                        refuse(f"another shape than in the capture, {place.size}", call.what)
                    tensor(place).copy_(results[index])
            _wait(works)
        self.replays += 1

    def _find_outside(self) -> dict[int, torch.UntypedStorage]:
        """The memory of others that the graph uses, which must be where it was; and so must the graph's own."""
        storages = {}
        for key, (reference, address, what) in self.outside.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                refuse("memory that a graph uses was freed", what)
            if storage.data_ptr() != address:
                refuse("memory that a graph uses moved", what)
            storages[key] = storage
        for key in self._resized():
            users = (c.what for c in self.calls if any(place.key == key for _, place in c.results))
            refuse("a result of a graph was resized after the capture", next(users, ""))
        return storages

    def _resized(self) -> list[int]:
        """The graph's memory that is smaller than what the graph uses of it."""
        keys = self._sizes.keys() & self.mine.keys()
        return [key for key in keys if self.mine[key].nbytes() < self._sizes[key]]

    # recording

    def operation(self, op: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation, and note it unless it only makes a view."""
        name, collective = op._schema.name, op._schema.name.startswith("c10d::")
        # a tensor that is set to other memory allocates none
        if self.is_quiet or name == "aten::set_":
            return op(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        host = [t for t in inputs if key_of(t) in Graph.on_host]
        if host and len(host) == len(inputs):
            return self.keep_on_host(op(*args, **kwargs))
        if _fills(name, args):
            host += [self.keep_on_host(args[2])]
        else:
            _check(name, op, args, kwargs)
        if any(t.dim() for t in host):
            refuse(f"{op} copies a tensor made of Python data to the device")
        for t in host:  # a number: a GPU takes it into the kernel's arguments
            self.mine[key_of(t)] = t.untyped_storage()
        for t in inputs if collective else written(op, args, kwargs):
            self.save(t.untyped_storage())
        may_alias = not collective and not op._schema.is_mutable
        return self.run(op, args, kwargs, name=str(op), may_alias=may_alias)

    def run(
        self, function: Callable, args: tuple, kwargs: dict, *, name: str, may_alias: bool = False
    ) -> Any:
        """Run a call, and note it; one that ``may_alias`` its arguments only if it makes something new."""
        self.streams.work()
        inputs = _tensors((args, kwargs))
        before = {key_of(t) for t in inputs}
        leaves, spec = tree_flatten((args, kwargs))
        arguments = [place_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        results = function(*args, **kwargs)
        flat = enumerate(tree_leaves(results))
        new = [(i, t) for i, t in flat if isinstance(t, Tensor) and key_of(t) not in before]
        for _, t in new:
            self.mine[key_of(t)], self._new[key_of(t)] = t.untyped_storage(), t.dtype
        if not may_alias or (new and "empty" not in name):
            what = f"{name} called at {calling_line()}"
            for t in inputs:
                self._note(t.untyped_storage(), what)
            places = tuple((i, place_of(t)) for i, t in new)
            self.calls.append(Call(function, arguments, spec, places, name, what))
        return results

    def launch(self, launch: Callable, args: tuple, kwargs: dict) -> None:
        """Note one of our kernels, which may write wherever its pointers lead, and run it if these are all known."""
        self.streams.work()
        leaves, spec = tree_flatten((args, kwargs))
        what = f"kernel {args[0]} called at {calling_line()}"
        # a replay launches on the stream of the capture, as a graph's branch
        replayed = torch.cuda.stream(torch.cuda.current_stream())(launch)
        self.calls.append(Call(replayed, leaves, spec, (), f"kernel {args[0]}", what))
        with self.quiet():
            for argument in args:
                reference = Graph.addresses.get(getattr(argument, "value", None) or -1)
                if reference is not None and not reference.expired():
                    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                    self.save(storage)
                    self._note(storage, what)
            if args[0] not in _BY_TABLE:
                launch(*_alone(args), **kwargs)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """What runs in this block belongs to something that is noted already."""
        before, self.is_quiet = self.is_quiet, True
        try:
            yield
        finally:
            self.is_quiet = before

    def keep_on_host(self, made: Any) -> Any:
        """What runs on the host alone is not part of the graph."""
        Graph.on_host.update({key_of(t): t for t in tree_leaves(made) if isinstance(t, Tensor)})
        return made

    def _note(self, storage: torch.UntypedStorage, what: str) -> None:
        if storage._cdata not in self.mine and storage._cdata not in self.outside:
            self.outside[storage._cdata] = StorageWeakRef(storage), storage.data_ptr(), what

    def save(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._new and storage._cdata not in self._contents:
            self._contents[storage._cdata] = storage, bytes_of(storage).clone()


def one_kernel(function: Callable) -> Callable:
    """Stand in for a kernel, which a capture notes as one call: ``function`` may read what it likes, and the shapes of
    its results depend on those of its arguments alone. A replay runs it again. An `autograd.Function` may call it."""

    @functools.wraps(function)
    def kernel(*args: Any) -> Any:
        graph = Graph.current
        if graph is None or graph.is_quiet:
            return function(*args)
        with graph.quiet():
            for t in _tensors(args):  # it may write any
                graph.save(t.untyped_storage())
            return graph.run(function, args, {}, name=function.__qualname__)

    return kernel


def _alone(args: tuple) -> tuple:
    """The arguments of a kernel without an exchange of loads, which a capture neither sends nor waits for."""
    if args[0] not in ("fssdp_count", "fssdp_count_choices", "fssdp_quotas") or not args[-2].value:
        return args
    none = ctypes.c_void_p()
    if args[0] == "fssdp_quotas":
        args = *args[:3], ctypes.c_void_p(_NO_LOADS.data_ptr()), *args[4:]
    return *args[:-2], none, args[-1]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _wait(works: list) -> None:
    for work in works:
        torch._C._distributed_c10d.Work.unbox(work).wait()
    works.clear()


def written(op: Any, args: tuple, kwargs: dict) -> Iterator[Tensor]:
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)


def _masked(name: str, args: tuple) -> bool:
    return name in _INDEXED and any(
        t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
    )


def _fills(name: str, args: tuple) -> bool:
    """Whether this is ``x[mask] = 0``, where the number comes from the host and nobody waits."""
    return name.startswith("aten::index_put") and _masked(name, args) and args[2].dim() == 0


def _check(name: str, op: Any, args: tuple, kwargs: dict) -> None:
    """`CaptureError` for an operation that makes the host wait for the device."""
    if name in _WAITS:
        refuse(f"{op} waits for the device")
    sized = kwargs.get("output_size") is not None
    if name in _DATA_DEPENDENT or (str(op) == "aten.repeat_interleave.Tensor" and not sized):
        refuse(f"{op} has a shape that depends on data, and waits for the device")
    if _masked(name, args):
        refuse(f"{op} with a mask has a shape that depends on data, and waits for the device")


class _Operations(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(t not in (Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented  # a tensor of several parts: its own operations come by
        return self.graph.operation(op, args, kwargs or {})


class _Python(TorchFunctionMode):
    """Sees what Python asks for before it becomes an operation."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.graph.is_quiet:
            return func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            refuse(f"{func.__name__} allocates pinned memory inside a capture")
        from_device = args and isinstance(args[0], Tensor) and key_of(args[0]) not in Graph.on_host
        if (from_device and func in _TO_HOST) or (
            func is torch.Tensor.to and "cpu" in (*args[1:], kwargs.get("device"))
        ):
            refuse(f"Tensor.{func.__name__} copies from the device and waits for it")
        made = func(*args, **kwargs)
        if func in _OF_PYTHON_DATA and not isinstance(args[0] if args else None, Tensor):
            if kwargs.get("device") not in (None, "cpu"):
                refuse(f"{func.__name__} copies Python data to the device")
            self.graph.keep_on_host(made)
        elif func is torch.Tensor.new_tensor:
            refuse("new_tensor copies Python data to the device")
        return made


class Capture:
    """Stands in for the context manager ``torch.cuda.graph``."""

    def __init__(self, cuda_graph: Graph, pool: Any = None, stream: Any = None, **_: Any) -> None:
        self.graph, self.pool = cuda_graph, pool
        self.stream = torch.cuda.stream(stream if stream is not None else torch.cuda.Stream())

    def __enter__(self) -> None:
        self.stream.__enter__()
        self.graph.capture_begin(self.pool)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.graph.capture_end(failed=error is not None)
        finally:
            self.stream.__exit__(kind, error, trace)
