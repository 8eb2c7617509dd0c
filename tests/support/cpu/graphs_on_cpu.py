"""CUDA graphs on a CPU: Megatron's and TransformerEngine's own capture code runs, over `graph_capture`.

How a test uses it, on a rank::

    te_on_cpu.install()                     # only for cuda_graph_impl "transformer_engine"; @ranks(n, preload="te")
    import graphs_on_cpu
    graphs_on_cpu.install()                 # before the model is built
    import tiny_gpt
    case = tiny_gpt.Case(settings=graphs_on_cpu.local("attn", "moe_router"))  # or transformer_engine, full_iteration
    trained = tiny_gpt.train(case, ...)     # for transformer_engine: graphs_on_cpu.train(case, ...), which captures;
                                            # for full_iteration: after graphs_on_cpu.whole_iterations()
    graphs_on_cpu.assert_replayed(at_least=4)
    graphs_on_cpu.delete_graphs()           # before another model

A kernel in Python is a function under `graph_capture.one_kernel`. `graph_calls.first_difference` compares two captures,
``Graph.made[0]`` and ``[1]``.

`graph_capture.not_in_graphs(owner, "name")` declares Python that must run for every microbatch, so never inside a
capture. `graph_capture` says what else fails, and what cannot be seen here. Streams are told apart, and run in program
order; a generator's state is one of the CPU's.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import megatron_on_cpu
import streams_on_cpu
import torch
import torch.distributed as dist
from graph_capture import Capture, Graph, not_in_graphs
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def install() -> None:
    """Put the emulator behind ``torch.cuda``; after ``te_on_cpu.install()``, before a model is built."""
    megatron_on_cpu.install()
    install_graphs()
    cuda = torch.cuda
    cuda.synchronize = lambda *_: streams_on_cpu.host_waits("torch.cuda.synchronize")
    cuda.default_generators = _Generators()
    cuda.memory_stats = lambda *_: {
        f"{kind}_bytes.all.current": 0 for kind in ("allocated", "reserved")
    }
    torch._C._cuda_beginAllocateCurrentThreadToPool = lambda device, pool: _Pooled(pool).__enter__()
    torch._C._cuda_endAllocateToPool = lambda device, pool: _pooled[-1].__exit__(None, None, None)
    collectives_end()
    _graphable_generators()
    _samples_of_the_model()


def install_graphs() -> None:
    """Put graphs and streams behind ``torch.cuda``, and note what reaches a graph from the host."""
    cuda = torch.cuda
    cuda.CUDAGraph, cuda.graph = Graph, Capture
    cuda.is_current_stream_capturing = lambda: Graph.current is not None
    streams_on_cpu.install()
    not_in_graphs(torch.Tensor, "pin_memory")
    torch.from_numpy = _of_the_host(torch.from_numpy)
    torch.frombuffer = _of_the_host(torch.frombuffer)
    _note_addresses()
    _note_launches()


def _settings(implementation: str, warmup: int, *scopes: str, **fields: Any) -> tuple:
    """Fields of TransformerConfig for graphs of ``scopes``, and further ones."""
    graphs = dict(cuda_graph_impl=implementation, cuda_graph_modules=list(scopes))
    return tuple((graphs | dict(cuda_graph_warmup_steps=warmup) | fields).items())


# Megatron's own implementation captures at the end of the first step; TransformerEngine's warms up twice with two
# microbatches; the last one is one graph of all microbatches, forward and backward, see `whole_iterations`
local = functools.partial(_settings, "local", 1)
transformer_engine = functools.partial(_settings, "transformer_engine", 4)
full_iteration = functools.partial(_settings, "full_iteration", 3)


def whole_iterations(warmup: int = 1) -> None:
    """From now on `tiny_gpt` trains as ``megatron.training`` does for `full_iteration`, and captures after ``warmup`` steps.

    The wrapper wants batches that are dictionaries.
    """
    import tiny_gpt
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    batch, forward_step = tiny_gpt.batch, tiny_gpt.forward_step
    wrapper = FullCudaGraphWrapper(tiny_gpt.get_forward_backward_func(), warmup)
    tiny_gpt.get_forward_backward_func = lambda: wrapper
    tiny_gpt.batch = lambda *arguments: {"text": batch(*arguments)}

    def of_dictionaries(iterator: Any, model: Any, *arguments: Any, **settings: Any) -> Any:
        return forward_step((data["text"] for data in iterator), model, *arguments, **settings)

    tiny_gpt.forward_step = of_dictionaries


def train(case: Any, *, steps: int = 4, eager_steps: int = 1, **hooks: Any) -> Any:
    """`tiny_gpt.train` with what ``megatron.training`` does for TransformerEngine's graphs after ``eager_steps``."""
    import tiny_gpt
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    trained = tiny_gpt.train(case, steps=eager_steps, **hooks)
    # chunks that gather parameters in hooks
    gathering = trained.chunks if case.overlap and case.distributed_optimizer else ()
    config = tiny_gpt.moe_layers(trained.chunks)[0].config
    sizes = case.seq, case.micro_batch
    helper = TECudaGraphHelper(trained.chunks, config, *sizes, [trained.optimizer])
    for chunk in gathering:
        chunk.disable_forward_pre_hook(param_sync=False)
    helper.create_cudagraphs()
    for chunk in gathering:
        chunk.enable_forward_pre_hook()
    if gathering:
        helper.cuda_graph_set_manual_hooks()
    for index in range(eager_steps, steps):
        trained.step(index)
    for chunk in gathering:
        chunk.start_param_sync(force_sync=True)
    trained.read_params()
    return trained


def delete_graphs() -> None:
    """Forget all graphs, before another model is trained with Megatron's own."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

    delete_cuda_graphs()
    for stage in ("training", "validation"):
        FullCudaGraphWrapper.cuda_graph[stage] = None
        FullCudaGraphWrapper.curr_iteration[stage] = 0
    Graph.made.clear()


def assert_replayed(at_least: int) -> None:
    """So many graphs were captured, and all were replayed."""
    captured = len(Graph.made)
    assert captured >= at_least, f"{captured} graphs were captured, {at_least} expected"
    idle = [graph for graph in Graph.made if graph.calls and not graph.replays]
    assert not idle, f"{len(idle)} of {captured} graphs were never replayed"


_pooled: list[_Pooled] = []


class _Pooled(TorchDispatchMode):
    """What is allocated in this mode belongs to a graph's pool."""

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.pool = Graph.pools.setdefault(pool, {})
        _pooled.append(self)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        made = op(*args, **(kwargs or {}))
        self.pool |= {t.untyped_storage()._cdata: t.untyped_storage() for t in tree_leaves(made)}
        return made

    def __exit__(self, *error: Any) -> None:
        _pooled.pop()
        super().__exit__(*error)


class _Generator:
    """A state that torch's generator of the CPU takes on while it is this one's turn."""

    def __init__(self, state: torch.Tensor) -> None:
        self.state = state

    def manual_seed(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()

    def graphsafe_get_state(self) -> _Generator:
        return self

    def graphsafe_set_state(self, generator: _Generator) -> None:
        self.state = generator.state

    def get_state(self) -> torch.Tensor:
        return self.state

    def set_state(self, state: torch.Tensor) -> None:
        self.state = state


class _Generators(megatron_on_cpu._OneGenerator):
    """``torch.cuda.default_generators``, with what graphs ask of a generator."""

    active = _Generator(torch.empty(0))
    get_state = staticmethod(torch.default_generator.get_state)
    set_state = staticmethod(torch.default_generator.set_state)

    def __getitem__(self, index: Any) -> Any:
        return self

    def clone_state(self) -> _Generator:
        return _Generator(self.get_state())

    def graphsafe_get_state(self) -> _Generator:
        self.active.state = self.get_state()
        return self.active

    def graphsafe_set_state(self, generator: _Generator) -> None:
        self.active = generator
        self.set_state(generator.state)


def _graphable_generators() -> None:
    """Megatron captures only where its tracker of generators says that it can be captured."""
    from megatron.core import tensor_parallel

    make = tensor_parallel.model_parallel_cuda_manual_seed

    def seed(seed: int, *trackers: bool, **settings: Any) -> None:
        settings |= dict(use_cudagraphable_rng=True, force_reset_rng=True)
        # what comes third says whether they can be captured
        make(seed, *trackers[:2], **settings)

    tensor_parallel.model_parallel_cuda_manual_seed = seed


def _samples_of_the_model() -> None:
    """Megatron's samples for TransformerEngine are bf16; fp32 tells right from nearly right."""
    from megatron.core.transformer.module import GraphableMegatronModule

    samples = GraphableMegatronModule.get_layer_static_inputs

    def in_params_dtype(layer: Any, *args: Any) -> dict[str, torch.Tensor]:
        made = samples(layer, *args)
        hidden = made["hidden_states"].detach().to(layer.config.params_dtype)
        return {**made, "hidden_states": hidden.requires_grad_()}

    GraphableMegatronModule.get_layer_static_inputs = in_params_dtype


def _of_the_host(factory: Any) -> Any:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = factory(*args, **kwargs)
        return Graph.current.keep_on_host(tensor) if Graph.current is not None else tensor

    return made


def _note_addresses() -> None:
    data_ptr = torch.Tensor.data_ptr

    def noted(tensor: torch.Tensor) -> int:
        address = data_ptr(tensor)
        Graph.addresses[address] = StorageWeakRef(tensor.untyped_storage())
        return address

    torch.Tensor.data_ptr = noted


def collectives_end() -> None:
    """gloo copies a result to its place when somebody waits, which a replay makes it do as well."""
    wait = dist.Work.wait

    def quietly(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        with Graph.current.quiet() if Graph.current is not None else contextlib.nullcontext():
            return wait(work, *args, **kwargs)

    dist.Work.wait = quietly


def _note_launches() -> None:
    from megatron_hecate.device.launch import Kernels

    launch = Kernels.launch

    @functools.wraps(launch)
    def noted(kernels: Kernels, *args: Any, **kwargs: Any) -> None:
        if Graph.current is not None:
            Graph.current.launch(functools.partial(launch, kernels), args, kwargs)
        else:
            launch(kernels, *args, **kwargs)

    Kernels.launch = noted
