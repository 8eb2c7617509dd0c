"""A tiny MoE GPT on the CPU, made of Megatron-Core's own classes and trained by its own schedules.

`train` builds one model and trains it; tests call it with and without `fssdp_hook` and compare. Import this module
inside the ranks only: it puts the CPU behind ``torch.cuda``. Where ranks have a GPU (`test_on_shared_gpu`), the
model trains there, and all its layers are TransformerEngine's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_on_cpu
import torch

ON_GPU = torch.cuda.is_available() and not hasattr(torch.cuda, "_hecate_stand_in")
if not ON_GPU:
    megatron_on_cpu.install()

import torch.distributed as dist  # noqa: E402
from cpu_spec import for_cpu  # noqa: E402
from megatron.core import num_microbatches_calculator as microbatches  # noqa: E402
from megatron.core import parallel_state, tensor_parallel, utils  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from plain_wgrad import use_plain_wgrad  # noqa: E402

from megatron_hecate import HecateConfig, fssdp  # noqa: E402
from megatron_hecate.comm.transfer import Transfer  # noqa: E402
from megatron_hecate.comm.transport import TransferPlan  # noqa: E402

if not ON_GPU:
    megatron_on_cpu.after_import()

VOCAB = 64
# speeds at which even a tiny model's copies pay
FREE = str(Path(__file__).parents[2] / "data" / "free_copies.json")


@dataclasses.dataclass(frozen=True)
class Case:
    """A parallel layout and the settings that matter to FSSDP."""

    ep: int = 2
    tp: int = 1
    etp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    accumulate: int = 1  # microbatches per step
    distributed_optimizer: bool = False
    # gradient reduction and, with the distributed optimizer, parameter gathering
    overlap: bool = False
    bucket_size: int = 4000  # elements of a bucket, with overlap
    bf16: bool = False
    fp16: bool = False
    experts: int = 8
    seq: int = 16
    micro_batch: int = 2  # sequences
    skew: float = 1.5  # added to the router's logits of the first experts: see `add_skew`
    one_expert: bool = False  # every token goes to expert 0
    # experts are a TEGroupedMLP, over TransformerEngine, which must be there first
    grouped: bool = False
    grad_reduce_in_fp32: bool = True
    # further fields of DistributedDataParallelConfig, TransformerConfig and OptimizerConfig, also as dicts
    ddp: tuple[tuple[str, Any], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    optimizer: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for name in ("ddp", "settings", "optimizer"):
            value = getattr(self, name)
            object.__setattr__(
                self, name, tuple(value.items()) if isinstance(value, dict) else value
            )

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32

    @property
    def layers(self) -> int:
        return 4 if self.vpp else 2


def initialize(case: Case) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
    )
    set_num_microbatches(case, case.accumulate)


def initialized(**fields: Any) -> Case:
    """A case, for which this process is initialized."""
    case = Case(**fields)
    initialize(case)
    return case


def set_num_microbatches(case: Case, count: int) -> None:
    """What Megatron's calculator says from now on."""
    width = parallel_state.get_data_parallel_world_size()
    microbatches.unset_num_microbatches_calculator()
    microbatches.init_num_microbatches_calculator(
        dist.get_rank(), None, case.micro_batch * count * width, case.micro_batch, width
    )


def transformer_config(case: Case) -> TransformerConfig:
    fields: dict[str, Any] = dict(
        num_layers=case.layers,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        moe_ffn_hidden_size=64,
        num_moe_experts=case.experts,
        moe_router_topk=1 if case.one_expert else 2,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
        tensor_model_parallel_size=case.tp,
        sequence_parallel=case.tp > 1,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        params_dtype=case.dtype,
        pipeline_dtype=case.dtype,
        bf16=case.bf16,
        fp16=case.fp16,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        attention_softmax_in_fp32=True,
        moe_grouped_gemm=case.grouped,
    )
    if case.vpp:  # interleaving over two stages needs it, as Megatron's own arguments set it
        fields.update(overlap_p2p_comm=True, batch_p2p_comm=False)
    if case.cp > 1:
        fields.update(cp_comm_type="p2p")
    if case.one_expert:  # Megatron's rule for top-1
        fields.update(moe_router_pre_softmax=True)
    fields.update(case.settings)
    # Megatron allows the combined schedule in bf16 only; fp32 takes it too, and tells right from nearly right. It wants
    # HybridEP's budget with fused operators only.
    late = {"overlap_moe_expert_parallel_comm", "delay_wgrad_compute"}
    is_fused = fields.get("use_transformer_engine_op_fuser")
    if fields.get("moe_flex_dispatcher_backend") == "hybridep" and not is_fused:
        late.add("moe_expert_rank_capacity_factor")
    unchecked = {name: fields.pop(name) for name in late & fields.keys()}
    config = TransformerConfig(**fields)
    for name, value in unchecked.items():
        setattr(config, name, value)
    return config


def build(
    case: Case, hook: Callable[[list], list] | None = None, config: TransformerConfig | None = None
) -> tuple[list, TransformerConfig]:
    """The model chunks of this rank, converted by ``hook``, before DDP; ``config`` may be another model's."""
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)
    config = config or transformer_config(case)
    chunks = []
    for stage in range(case.vpp or 1):
        where = {"vp_stage": stage} if case.vpp else {}
        with _grouped_experts(case.grouped and not ON_GPU):
            spec = get_gpt_decoder_block_spec(
                config, use_transformer_engine=ON_GPU, normalization="RMSNorm", **where
            )
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, **where)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, **where)
        spec = spec if ON_GPU else for_cpu(spec)
        extra = dict(where)
        if config.mtp_num_layers:
            mtp_spec = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=ON_GPU, **where)
            extra["mtp_block_spec"] = mtp_spec if ON_GPU else for_cpu(mtp_spec)
        chunk = GPTModel(
            config,
            spec,
            vocab_size=VOCAB,
            max_sequence_length=case.seq,
            pre_process=first,
            post_process=last,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            **extra,
        )
        chunks.append(chunk.cuda())
    for layer in moe_layers(chunks):
        add_skew(layer, case)
    if hook is not None:
        chunks = hook(chunks)
    return chunks, config


@contextlib.contextmanager
def _grouped_experts(wanted: bool) -> Iterator[None]:
    """Layer specs made in this block have TransformerEngine's experts; all else stays Megatron's own."""
    if not wanted:
        yield
        return
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.backends import LocalSpecProvider

    with mock.patch.object(
        LocalSpecProvider, "grouped_mlp_modules", TESpecProvider.grouped_mlp_modules
    ):
        yield


def install_fused_wgrad() -> None:
    """Gradient-accumulation fusion without apex; Megatron looked for it when it was imported."""
    layers = tensor_parallel.layers
    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = utils.fused_weight_gradient_mlp_cuda = use_plain_wgrad()


def fssdp_hook(**settings: Any) -> Callable[[list], list]:
    """FSSDP with two slots, where copies cost nothing."""
    return fssdp(HecateConfig(**{"slots": 2, "speeds": FREE, "timeout": 60, **settings}))


def moe_layers(chunks: list) -> list[MoELayer]:
    return [m for chunk in chunks for m in chunk.modules() if isinstance(m, MoELayer)]


def num_replicas(chunks: list) -> int:
    """The most that any layer of a model has, on all ranks of its group."""
    states = [layer.fssdp for layer in moe_layers(chunks) if hasattr(layer, "fssdp")]
    return max((state.placement.num_replicas for state in states), default=0)


def add_skew(layer: MoELayer, case: Case) -> None:
    """Make some experts hot, other ones in every layer, so that replicas are worth having."""
    bias = torch.zeros(case.experts, device="cuda")
    if case.one_expert:
        bias[0] = 1e4
    else:
        hot = 5 * (layer.layer_number - 1) % case.experts
        bias[hot], bias[(hot + 1) % case.experts] = case.skew, case.skew / 2
    gating = layer.router.gating
    layer.router.gating = lambda hidden: gating(hidden) + bias
    layer.skew = bias


def move_skew(chunks: list, _: int) -> None:
    """Let other experts be hot from now on."""
    for layer in moe_layers(chunks):
        layer.skew.copy_(layer.skew.roll(3))


def move_skew_sometimes(chunks: list, step: int) -> None:
    """Let other experts be hot after every second step. Replicas are those of the experts that were hot in the step
    before: if these changed in each step, replicas would be placed and get no tokens."""
    if step % 2:
        move_skew(chunks, step)


def counting_hook(hook: Callable[[list], list], computed: torch.Tensor) -> Callable[[list], list]:
    """``hook``, which also has ``computed`` [1] count the tokens that replicas of this rank compute in training."""

    def count(experts: Any, forward: Callable) -> Callable:
        def forward_and_count(
            tokens: torch.Tensor, counts: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            running = experts.physical.running
            if experts.training and running is not None and running.replicas is not None:
                computed.add_(int(counts.reshape(-1)[experts.num_local_experts :].sum()))
            return forward(tokens, counts, *args, **kwargs)

        return forward_and_count

    def convert(chunks: list) -> list:
        chunks = hook(chunks)
        for layer in moe_layers(chunks):
            # no hook of the module: Megatron's graphs refuse these
            layer.experts.forward = count(layer.experts, layer.experts.forward)
        return chunks

    return convert


def wrap(case: Case, chunks: list, config: TransformerConfig) -> tuple[list, Any]:
    """DDP and the optimizer, as ``megatron.training`` sets them up."""
    if case.bf16 or case.fp16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=case.grad_reduce_in_fp32,
        delay_wgrad_compute=config.delay_wgrad_compute,
        overlap_grad_reduce=case.overlap,
        overlap_param_gather=case.overlap and case.distributed_optimizer,
        use_distributed_optimizer=case.distributed_optimizer,
        bucket_size=case.bucket_size if case.overlap else None,
        check_for_nan_in_grad=case.dtype is torch.float32,
        **dict(case.ddp),
    )
    chunks = [
        DistributedDataParallel(config, ddp_config, c, disable_bucketing=i > 0)
        for i, c in enumerate(chunks)
    ]
    for chunk in chunks:
        chunk.broadcast_params()
    if case.overlap:
        config.no_sync_func = [c.no_sync for c in chunks] if len(chunks) > 1 else chunks[0].no_sync
        if case.distributed_optimizer and ddp_config.align_param_gather:
            starts = [c.start_param_sync for c in chunks]
            config.param_sync_func = starts if len(chunks) > 1 else starts[0]
    config.finalize_model_grads_func = finalize_model_grads
    fields: dict[str, Any] = dict(
        optimizer="adam",
        lr=3e-3,
        weight_decay=0.01,
        clip_grad=1.0,
        bf16=case.bf16,
        fp16=case.fp16,
        initial_loss_scale=2.0**10,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=case.distributed_optimizer,
        overlap_param_gather=case.overlap and case.distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**{**fields, **dict(case.optimizer)}), chunks
    )
    config.grad_scale_func = optimizer.scale_loss
    return chunks, optimizer


def batch(case: Case, step: int, index: int) -> torch.Tensor:
    """[micro_batch, seq + 1] tokens of this data-parallel rank's microbatch: t' = 5 t + 7 with some noise."""
    rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(1_000_000 * step + 1_000 * index + rank)
    shape = (case.micro_batch, 1)
    tokens = torch.randint(VOCAB, shape, generator=generator)
    text = [tokens]
    for _ in range(case.seq):
        noise = torch.rand(shape, generator=generator) < 0.1
        tokens = torch.where(
            noise, torch.randint(VOCAB, shape, generator=generator), (5 * tokens + 7) % VOCAB
        )
        text.append(tokens)
    return torch.cat(text, dim=1).cuda()


def forward_step(
    iterator: Any, model: Any, return_schedule_plan: bool = False, *, case: Case
) -> tuple[Any, Callable]:
    data = next(iterator)
    tokens, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    positions = torch.arange(case.seq, device="cuda").expand(case.micro_batch, -1)
    mask = None
    if case.cp > 1:  # rank r takes slices r and 2 * cp - 1 - r
        rank, slices = parallel_state.get_context_parallel_rank(), case.seq // (2 * case.cp)

        def own(x: torch.Tensor) -> torch.Tensor:
            parts = x.reshape(case.micro_batch, 2 * case.cp, slices)
            return torch.cat([parts[:, rank], parts[:, 2 * case.cp - 1 - rank]], dim=1).contiguous()

        tokens, labels, positions = own(tokens), own(labels), own(positions)
    else:
        mask = torch.ones(1, 1, case.seq, case.seq, dtype=torch.bool, device="cuda").triu(1)

    def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
        loss = output.float().sum()
        # filled on the device: a CUDA graph may hold this, and no copy from the host
        count = torch.full((), output.numel(), dtype=torch.int, device="cuda")
        report = torch.stack([loss.detach(), count.float()])
        dist.all_reduce(
            report, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        return loss, count, {"lm loss": report}

    # overlap_moe_expert_parallel_comm: the schedule runs the layers' parts itself
    if return_schedule_plan:
        while not hasattr(model, "build_schedule_plan"):
            model = model.module
        return model.build_schedule_plan(tokens, positions, mask, labels=labels), loss_func
    loss_mask = torch.ones(labels.shape, device="cuda")  # multi-token prediction wants one
    return model(tokens, positions, mask, labels=labels, loss_mask=loss_mask), loss_func


def run(
    case: Case, chunks: list, step: int, *, num_microbatches: int, forward_only: bool = False
) -> float:
    """One pass of Megatron's schedule; the mean loss, on every rank."""
    iterators = [iter([batch(case, step, i) for i in range(num_microbatches)]) for _ in chunks]
    reports = get_forward_backward_func()(
        forward_step_func=partial(forward_step, case=case),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=num_microbatches,
        seq_length=case.seq,
        micro_batch_size=case.micro_batch,
        forward_only=forward_only,
    )
    total = torch.zeros(2, device="cuda")
    for report in reports:
        total += report["lm loss"]
    dist.all_reduce(total)
    return float(total[0] / total[1])


@dataclasses.dataclass(eq=False)
class Model:
    """The chunks of this rank with their optimizer, and the operations that loops are made of.

    Args:
        case: for which `initialize` has run.
        hook: converts the chunks before DDP wraps them.
        config: of another model, where two share it.
    """

    case: Case
    hook: Callable[[list], list] | None = None
    config: Any = None
    chunks: list = dataclasses.field(init=False)
    optimizer: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        chunks, config = build(self.case, self.hook, self.config)
        self.chunks, self.optimizer = wrap(self.case, chunks, config)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self.chunks for p in chunk.parameters()]

    def zero(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def call(self, step: int, microbatches: int, *, forward_only: bool = False) -> float:
        """One call of Megatron's schedule; returns the mean loss."""
        return run(
            self.case, self.chunks, step, num_microbatches=microbatches, forward_only=forward_only
        )

    def forward(self, step: int, index: int) -> torch.Tensor:
        """One forward outside of any schedule; returns the mean loss of this rank."""
        data = iter([batch(self.case, step, index)])
        output, loss_func = forward_step(data, self.chunks[0], case=self.case)
        loss, count, _ = loss_func(output)
        return loss / count

    def finish(self) -> None:
        for chunk in self.chunks:
            chunk.finish_grad_sync()

    def update(self) -> None:
        assert self.optimizer.step()[0]

    def evaluate(self, step: int, microbatches: int = 2) -> float:
        """The mean loss on other data than that of the step."""
        with evaluating(self.chunks):
            return self.call(100 + step, microbatches, forward_only=True)

    def gather(self) -> None:
        """Gather parameters that the next forward would gather."""
        if self.case.overlap and self.case.distributed_optimizer:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)


@dataclasses.dataclass(eq=False)
class Trained(Model):
    """A model, and what its steps leave behind on this rank, by parameter name."""

    before_step: Callable[[list, int], None] | None = None
    losses: list[float] = dataclasses.field(default_factory=list)
    grad_norms: list[float] = dataclasses.field(default_factory=list)
    grads: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    params: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    # the most that any layer had in any step, on all ranks of its group
    replicas: int = 0

    def step(self, index: int, microbatches: int = 0) -> float:
        """Train a step, of other than the case's ``microbatches`` if there are any; returns the loss."""
        self.zero()
        loss = self.call(index, microbatches or self.case.accumulate)
        for name, p in named_parameters(self.chunks):
            if p.requires_grad:
                self.grads[name] = p.main_grad.detach().clone()
        if self.before_step is not None:
            self.before_step(self.chunks, index)
        updated, norm, _ = self.optimizer.step()
        assert updated
        self.replicas = max(self.replicas, num_replicas(self.chunks))
        self.losses.append(loss)
        self.grad_norms.append(float(norm))
        return loss

    def gather_params(self) -> None:
        """Note the parameters after the last step, also where they are gathered in the next forward."""
        self.gather()
        self.read_params()

    def read_params(self) -> None:
        """Note the parameters as they are now."""
        self.params = {name: p.detach().clone() for name, p in named_parameters(self.chunks)}


def train(
    case: Case,
    *,
    steps: int = 3,
    hook: Callable[[list], list] | None = None,
    before_step: Callable[[list, int], None] | None = None,
) -> Trained:
    """Build, convert and train. `initialize` must have run."""
    trained = Trained(case, hook, before_step=before_step)
    for index in range(steps):
        trained.step(index)
    trained.gather_params()
    return trained


@contextlib.contextmanager
def evaluating(chunks: list) -> Iterator[None]:
    """The block evaluates, as Megatron does: in ``eval()`` and without gradients."""
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        yield
    for chunk in chunks:
        chunk.train()


def before_transfers(chunks: list, act: Callable[[str, TransferPlan, list, str], None]) -> list:
    """Have ``act(what, plan, slots, label)`` called before a converted model begins a transfer: ``what`` is "fetch" or
    "return", ``slots`` are the chunks of this rank's replicas."""

    def acting(what: str, begin: Callable) -> Callable:
        def act_and_begin(plan: TransferPlan, *buffers: Any, **settings: Any) -> Transfer:
            homes_and_slots = buffers if what == "fetch" else buffers[::-1]
            act(what, plan, homes_and_slots[1], settings["label"])
            return begin(plan, *buffers, **settings)

        return act_and_begin

    for transport in {layer.fssdp.transport for layer in moe_layers(chunks)}:
        transport.fetch = acting("fetch", transport.fetch)
        transport.return_gradients = acting("return", transport.return_gradients)
    return chunks


SAME = {"loss": 0.0, "grad": 0.0, "param": 0.0}
# activations are rounded to 8 bits, and GEMMs over fewer tokens may round differently
BF16_TOLERANCE = 1e-2


def difference(a: Trained, b: Trained) -> dict[str, float]:
    """How far two runs are apart on this rank: losses relatively, gradients relative to the largest."""
    assert a.grads.keys() == b.grads.keys() and a.params.keys() == b.params.keys()
    largest = max(float(g.abs().max()) for g in a.grads.values())
    assert largest > 0
    return {
        "loss": max(abs(x - y) / abs(x) for x, y in zip(a.losses, b.losses, strict=True)),
        "grad": max(float((a.grads[n].double() - b.grads[n].double()).abs().max()) for n in a.grads)
        / largest,
        "param": max(
            float((a.params[n].double() - b.params[n].double()).abs().max()) for n in a.params
        ),
    }


def assert_trained_alike(
    stock: Trained, ours: Trained, what: str = "", *, tolerance: float = 1e-5
) -> dict[str, float]:
    """``ours`` had replicas, and differs from ``stock`` by summation order at most."""
    assert ours.replicas > 0, f"{what}: no replica was placed, so nothing was tested"
    worst = difference(stock, ours)
    assert worst["loss"] <= tolerance and worst["grad"] <= tolerance, (what, worst)
    return worst


def named_parameters(chunks: list) -> list[tuple[str, torch.nn.Parameter]]:
    return [
        (f"{i}.{name}", p) for i, chunk in enumerate(chunks) for name, p in chunk.named_parameters()
    ]
