"""Expert memory: the accounting against real runs, which lifetime is chosen or refused, and the bounded load.

Oracle of the accounting: the tensors of a trained model. Of choices and refusals: numbers worked out by hand.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from ranks import ranks

from megatron_hecate import report
from megatron_hecate.memory import Need
from megatron_hecate.report import Account, RankExperts, RankMemory

LIFETIMES = ("iteration", "microbatch", "layer")
MIB = 2**20


def _experts(*, layers: int = 4, slots: int = 2, homes: int = 3, in_flight: int = 4) -> RankExperts:
    """Experts of 1 Mi parameters in bf16: 2 MiB of weights, 4 of gradients, 12 of Adam's state."""
    return RankExperts.with_adam(
        (Need(slots=slots, elements=MIB, dtype=torch.bfloat16),) * layers, (homes,) * layers, in_flight=in_flight
    )


def test_accounts_worked_out_by_hand() -> None:
    stock = dict(weights=24 * MIB, grads=48 * MIB, optimizer=144 * MIB)  # 4 layers x 3 homes x 2, 4, 12 MiB
    staging = 5 * 4 * MIB
    by_hand = {
        "iteration": (4 * 2 * 2, 4 * 2 * 4),
        "microbatch": (4 * 2 * 2, 2 * 2 * 4),
        "layer": (2 * 2 * 2, 2 * 2 * 4),
    }
    for lifetime, (weights, grads) in by_hand.items():
        account = Account.of(_experts(), lifetime)
        assert account == Account(**stock, guest_weights=weights * MIB, guest_grads=grads * MIB, transport=staging)
        assert account.total == sum(dataclasses.astuple(account))
        assert account.added == pytest.approx((weights + grads + 20) / 216)
    fp32 = RankExperts.with_adam((Need(slots=2, elements=100, dtype=torch.float32),), (1,), in_flight=1)
    assert (fp32.grad_bytes, fp32.optimizer_bytes) == (4, 8), "no master copy"
    none = Account.of(_experts(slots=0), "iteration")
    assert none.guests == 0 and none.total == none.homes


def test_48_layers_of_128_experts_on_64_ranks() -> None:
    """The target: lifetime layer with 2 slots adds at most 5 %."""
    import memory

    qwen = next(model for model in memory.MODELS if model.name == "Qwen3-30B-A3B")
    chunk = 3 * 2048 * 768
    account = qwen.account("layer", 2)
    assert account.homes == 48 * 2 * chunk * 18
    assert account.guests == 2 * 2 * chunk * (2 + 4) + 5 * chunk * 4
    assert account.added <= memory.TARGET == 0.05


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@ranks(2)
def test_accounts_are_what_a_run_holds(bf16: bool) -> None:
    import tiny_gpt

    tiny_gpt.initialize(_case(bf16=bf16))
    for lifetime in LIFETIMES:
        _same_as_real(_case(bf16=bf16), lifetime)


@pytest.mark.newest
@ranks(4)
def test_accounts_are_what_a_pipeline_holds() -> None:
    import tiny_gpt

    case = _case(pp=2, accumulate=4)
    tiny_gpt.initialize(case)
    for lifetime in LIFETIMES:
        _same_as_real(case, lifetime)


def _case(**fields: Any):
    import tiny_gpt

    settings = (("num_layers", 4), ("hidden_size", 64), ("moe_ffn_hidden_size", 208))
    return tiny_gpt.Case(**{"accumulate": 2, "skew": 3.0, "seq": 4, "micro_batch": 1, **fields}, settings=settings)


def _same_as_real(case, lifetime: str) -> None:
    import tiny_gpt

    from megatron_hecate import HecateConfig, fssdp, layer

    notes = []
    original = layer._memory
    layer._memory = lambda *args: notes.append(original(*args)) or notes[-1]
    run = tiny_gpt.train(
        case, steps=2, hook=fssdp(HecateConfig(costs=tiny_gpt.FREE, slots=2, lifetime=lifetime, timeout=60))
    )
    layer._memory = original
    account = RankMemory.parse(json.loads(json.dumps(notes[0]))).accounts[lifetime]

    experts = [p for chunk in run.chunks for p in chunk.parameters() if not getattr(p, "allreduce", True)]
    model = tiny_gpt.moe_layers(run.chunks)[0].fssdp.model
    assert len(experts) == 2 * 4 * len(model.states), "both matrices of four experts"
    assert account.weights == _bytes(experts)
    assert account.grads == _bytes(b.grad_data for chunk in run.chunks for b in chunk.expert_parallel_buffers)
    owned = {id(p) for p in experts} | {id(p.main_param) for p in experts if hasattr(p, "main_param")}
    state = [p.main_param for p in experts if getattr(p, "main_param", p) is not p and p.main_param is not None]
    for optimizer in getattr(run.optimizer, "chained_optimizers", [run.optimizer]):
        for p, tensors in optimizer.optimizer.state.items():
            if id(p) in owned:
                state += [t for t in tensors.values() if torch.is_tensor(t) and t.numel() > 1]
    assert account.optimizer == _bytes(state)
    assert model._memory is not None and run.guests > 0, "no guest was placed: nothing was tested"
    assert account.guests == model._memory._arena.numel() == model._memory.frames.total
    assert model._memory.lifetime == lifetime


def _bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@ranks(2)
def test_beyond_the_account_are_one_layers_gradients() -> None:
    """At the worst moment of a step as many expert-sized tensors live outside the arena as a layer has homes and
    slots: their gradients, until they are added to main_grad. (Stock's experts, one by one: a matrix.)"""
    import tiny_gpt
    from activation_memory import allocations, peak

    from megatron_hecate import HecateConfig, fssdp

    case = _case()
    tiny_gpt.initialize(case)
    chunk, smaller = 3 * 208 * 64 * 4, 208 * 64 * 4  # bytes of an expert, and of its second matrix
    for lifetime in (None, *LIFETIMES):
        settings = dict(costs=tiny_gpt.FREE, slots=2, timeout=60)
        hook = lifetime and fssdp(HecateConfig(**settings, lifetime=lifetime))
        run = tiny_gpt.train(case, steps=2, hook=hook)

        def forward_backward(run=run) -> None:
            for part in run.chunks:
                part.zero_grad_buffer()
            tiny_gpt.run(case, run.chunks, 2, num_microbatches=case.accumulate)

        most = peak([size for size in allocations(forward_backward) if abs(size) >= smaller])
        assert most <= ((4 + 2) * chunk if lifetime else chunk), (lifetime, most / chunk)
        assert lifetime is None or run.guests > 0


# _experts(): to come with the homes: 48 of gradients, 144 of optimizer; guests 68, 52, 44 MiB; gradients at least 24
FREE = {"iteration": 48 + 144 + 16 + 32 + 20, "microbatch": 48 + 144 + 16 + 16 + 20, "layer": 48 + 144 + 8 + 16 + 20}


def _ranks(*free: int, **fields: Any) -> dict[int, RankMemory]:
    return {rank: RankMemory.of(_experts(**fields), mib * MIB) for rank, mib in enumerate(free)}


@pytest.mark.parametrize("lifetime", LIFETIMES)
def test_auto_takes_the_first_that_fits_on_every_rank(lifetime: str) -> None:
    enough = FREE[lifetime]
    assert report.choose(_ranks(enough), "auto") == lifetime
    assert report.choose(_ranks(10**6, enough, 10**6), "auto") == lifetime, "the rank with least decides"
    assert report.choose({}, "auto") == "iteration"
    less = {"iteration": "microbatch", "microbatch": "layer", "layer": "layer"}
    assert report.choose(_ranks(enough - 1), "auto") == less[lifetime]
    for asked in LIFETIMES:
        assert report.choose(_ranks(enough - 1), asked) == asked


def test_auto_passes_over_microbatch_where_a_pipeline_makes_it_the_largest() -> None:
    ranks_ = _ranks(FREE["iteration"] - 1, in_flight=16)
    assert ranks_[0].accounts["microbatch"].guests > ranks_[0].accounts["iteration"].guests
    assert report.choose(ranks_, "auto") == "layer"


@pytest.mark.parametrize(
    ("lifetime", "free", "message"),
    [
        ("iteration", (92,), None),
        ("iteration", (91,), "68.0 MiB for guests on rank 0, 67.0 MiB are free beside its homes' gradients; "
         "lifetime='microbatch' needs 52.0 MiB, or lifetime='layer' needs 44.0 MiB, or use slots=1"),
        ("iteration", (200, 70), "68.0 MiB for guests on rank 1, 46.0 MiB are free beside its homes' gradients; "
         "lifetime='layer' needs 44.0 MiB, or use slots=1"),
        ("microbatch", (200, 61, 60), "52.0 MiB for guests on rank 2, 36.0 MiB are free beside its homes' gradients; "
         "use slots=1"),
        ("iteration", (57,), "68.0 MiB for guests on rank 0, 33.0 MiB are free beside its homes' gradients; "
         "use slots=1 with lifetime='layer'"),
        ("layer", (20,), "44.0 MiB for guests on rank 0, 0.0 KiB are free beside its homes' gradients; "
         "no other lifetime and no other slots fit: spread the experts over more ranks"),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused(lifetime: str, free: tuple[int, ...], message: str | None) -> None:
    text = report.refusal(_ranks(*free), lifetime, slots=2)
    assert text == (message and f"slots=2 with lifetime={lifetime!r} needs {message}")
    assert report.refusal(_ranks(0, slots=0), lifetime, slots=0) is None, "without slots nothing is added"


def test_the_table() -> None:
    assert report.table(_ranks(100_000)[0], "layer", ranks=[0, 1, 2, 5]) == (
        "expert memory of rank 0-2, 5: homes 216.0 MiB (Adam, state not sharded: weights 24.0 MiB, "
        "gradients 48.0 MiB, optimizer 144.0 MiB); 97.7 GiB free now\n"
        "  lifetime      guests, weights   gradients   transport  with homes\n"
        "> layer                 8.0 MiB    16.0 MiB    20.0 MiB   260.0 MiB (+20.4%)\n"
        "  iteration            16.0 MiB    32.0 MiB    20.0 MiB   284.0 MiB (+31.5%)\n"
        "  microbatch           16.0 MiB    16.0 MiB    20.0 MiB   268.0 MiB (+24.1%)"
    )
    tight = report.table(_ranks(FREE["layer"] - 1)[0], "layer", ranks=[0]).splitlines()
    assert len(tight) == 6
    assert tight[-1] == "  236.0 MiB of this are to come, more than is free: it may run out of memory"


def test_free_memory_of_a_cpu_is_shared() -> None:
    one, four = (report.free_memory(gpu=False, ranks_on_node=count) for count in (1, 4))
    assert one > 10 * MIB and four == pytest.approx(one / 4, rel=0.2)


@ranks(2)
def test_switching_on_with_little_memory() -> None:
    """Ranks with different free memory choose alike, and train with what they chose; what cannot fit is refused."""
    import tiny_gpt
    import torch.distributed as dist
    from test_hook import snapshot

    from megatron_hecate import HecateConfig, fssdp

    case = _case()
    tiny_gpt.initialize(case)
    chunks, _ = tiny_gpt.build(case)
    chunk = 3 * 208 * 64 * 4  # bytes of an expert, and of its gradients
    homes = 4 * 4 * chunk
    guests = {"iteration": (16 + 5) * chunk, "microbatch": (8 + 4 + 5) * chunk, "layer": (8 + 5) * chunk}

    def free(*by_rank: int) -> None:
        report.free_memory = lambda **_: by_rank[dist.get_rank()]

    def settings(lifetime: str) -> HecateConfig:
        return HecateConfig(costs=tiny_gpt.FREE, slots=2, timeout=30, lifetime=lifetime)

    for asked, least, chosen in (
        ("auto", 3 * homes + guests["iteration"], "iteration"),
        ("auto", 3 * homes + guests["layer"], "layer"),
        ("auto", homes + guests["layer"], "layer"),  # not expected to fit, with the optimizer, but it may
        ("iteration", homes + guests["iteration"], "iteration"),
    ):
        free(10**12, least)
        run = tiny_gpt.train(case, steps=2, hook=fssdp(settings(asked)))
        layers = tiny_gpt.moe_layers(run.chunks)
        assert {(layer.fssdp.config.lifetime, layer.fssdp.config.transport) for layer in layers} == {(chosen, "p2p")}
        assert layers[0].fssdp.model._memory.lifetime == chosen
        fssdp(settings(asked))(run.chunks)  # the same again changes nothing
        fssdp(settings(chosen))(run.chunks)
        other = "layer" if chosen == "iteration" else "iteration"
        with pytest.raises(ValueError, match=f"runs FSSDP already, with .*{chosen}.* asked for .*{other}"):
            fssdp(settings(other))(run.chunks)

    before = snapshot(chunks)
    free(10**12, homes + guests["iteration"] - 1)
    message = r"cannot be switched on:\n  - slots=2 with lifetime='iteration' needs .* for guests on rank 1, .*"
    ways = r"; lifetime='microbatch' needs .*, or lifetime='layer' needs .*, or use slots=1$"
    with pytest.raises(ValueError, match=message + ways):
        fssdp(settings("iteration"))(chunks)
    free(homes + guests["layer"] - 1, 10**12)
    with pytest.raises(ValueError, match=r"slots=2 with lifetime='layer' needs .* on rank 0, .*; use slots=1$"):
        fssdp(settings("auto"))(chunks)
    assert snapshot(chunks) == before


@ranks(2)
def test_a_skewed_run_stays_inside_its_budget() -> None:
    """Every token goes to one rank in stock Megatron. Oracle: stock with forced balance, the rank load in tokens."""
    import tiny_gpt
    import torch.distributed as dist
    from activation_memory import peaks, skewed

    from megatron_hecate import HecateConfig, fssdp
    from megatron_hecate.metrics import layer_metrics

    sizes = dict(experts=8, seq=64, micro_batch=8, skew=0.0)
    case = tiny_gpt.Case(**sizes)
    tiny_gpt.initialize(case)
    hook = fssdp(HecateConfig(costs=tiny_gpt.FREE, slots=2, late=4, timeout=60))
    runs = {
        "balanced": (tiny_gpt.Case(**sizes, settings=(("moe_router_force_load_balancing", True),)), None),
        "stock": (case, skewed),
        "ours": (case, lambda chunks: hook(skewed(chunks))),
    }
    most = {}
    for name, (this, with_hook) in runs.items():
        own, run = peaks(this, with_hook, 3)
        largest = torch.tensor(max(own))
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        most[name] = int(largest)
    assert most["ours"] < 1.25 * most["balanced"] < 1.5 * most["balanced"] < most["stock"], most
    tokens = 2 * 2 * 64 * 8  # ranks x top-k x tokens of a rank
    for metrics in layer_metrics(run.chunks):
        assert metrics.routed_tokens > 0.95 * tokens
        assert tokens / 2 <= metrics.most_tokens < 1.02 * tokens / 2
        assert metrics.computed == pytest.approx(metrics.most_tokens / (tokens / 2))
