"""Replayed routes (Megatron's own router replay) are the forecast. They jump with every step and microbatch.

Oracle: stock Megatron that replays the same routes, for losses, gradients and parameters; loads counted token by token
in Python from the routes of all ranks.
"""

from __future__ import annotations

import os
import types
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from ranks import ranks

EXPERTS, TOKENS = 8, 32  # of a microbatch and rank, as `tiny_gpt.Case` has them
REPLAY = ("moe_enable_routing_replay", True)
RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def routes_of(step: int, microbatch: int, layer: int, rank: int) -> torch.Tensor:
    """[T, 2] experts of each token; two of three tokens choose the same one."""
    generator = torch.Generator().manual_seed(1_000 * step + 100 * microbatch + 10 * layer + rank)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    scores[::3] += 0.5
    scores[torch.arange(TOKENS) % 3 > 0, (5 * step + 3 * microbatch + layer) % EXPERTS] += 1
    return scores.topk(2).indices


def count(step: int, microbatches: range, layer: int, num_ranks: int) -> np.ndarray:
    """[E] tokens, one by one."""
    load = np.zeros(EXPERTS, dtype=np.int64)
    for microbatch in microbatches:
        for rank in range(num_ranks):
            for token in routes_of(step, microbatch, layer, rank).tolist():
                for expert in token:
                    load[expert] += 1
    return load


def replay(accumulate: int, *, then_backward: bool = True) -> None:
    """Have every forward of `tiny_gpt` replay routes as training loops for RL do: set right before the forward of each
    microbatch, and replayed once more where the backward computes it again."""
    import tiny_gpt
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    original, seen = tiny_gpt.forward_step, {}

    def forward_step(iterator: Any, model: Any, *args: Any, **settings: Any) -> Any:
        number = seen[model] = seen.get(model, -1) + 1
        for layer in tiny_gpt.moe_layers([model]):
            routes = routes_of(
                number // accumulate,
                number % accumulate,
                layer.layer_number - 1,
                parallel_state.get_data_parallel_rank(),
            )
            layer.router.router_replay.set_target_indices(routes)
            layer.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        result = original(iterator, model, *args, **settings)
        for layer in tiny_gpt.moe_layers([model]) if then_backward else []:
            layer.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        return result

    tiny_gpt.forward_step = forward_step


def note_forecasts(found: list[np.ndarray]) -> None:
    from megatron_hecate.runtime.early_plans import EarlyPlans

    plan = EarlyPlans.plan

    def noted(early: EarlyPlans, index: int, inputs: Any) -> Any:
        found.append(np.array(inputs.forecast))
        return plan(early, index, inputs)

    EarlyPlans.plan = noted


def _train(
    case: Any, steps: int, *, before: Callable[[list, int], None] | None = None, **settings: Any
) -> Any:
    """Train step by step; the first step as all others."""
    import tiny_gpt

    run = tiny_gpt.train(case, steps=0, hook=tiny_gpt.fssdp_hook(**settings) if settings else None)
    for step in range(steps):
        if before is not None:
            before(run.chunks, step)
        run.step(step)
    if case.overlap and case.distributed_optimizer:
        for chunk in run.chunks:
            chunk.start_param_sync(force_sync=True)
    run.read_params()
    return run


@pytest.mark.newest
@pytest.mark.parametrize(
    ("lifetime", "fields", "megatron"),
    [
        pytest.param("iteration", {}, {}, marks=pytest.mark.slow),
        ("microbatch", dict(accumulate=3), {}),
        ("layer", dict(accumulate=2, distributed_optimizer=True, overlap=True), RECOMPUTE),
        pytest.param(
            "microbatch",
            dict(accumulate=2),
            dict(overlap_moe_expert_parallel_comm=True),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["iteration", "microbatch", "layer-recompute-overlap", "ep-comm-overlap"],
)
@ranks(2)
def test_plans_are_made_for_the_replayed_routes(
    lifetime: str, fields: dict, megatron: dict
) -> None:
    """From the first step on, every plan is made for the loads that come; no replica comes after the gate, though it
    might."""
    import tiny_gpt

    from megatron_hecate.record.metrics import layer_metrics

    case = tiny_gpt.Case(**fields, settings=(REPLAY, *megatron.items()))
    tiny_gpt.initialize(case)
    replay(case.accumulate, then_backward=not megatron or megatron is RECOMPUTE)
    stock = _train(case, 3)
    found: list[np.ndarray] = []
    note_forecasts(found)
    ours = _train(case, 3, lifetime=lifetime, slots=2, late_replicas=2)
    tiny_gpt.assert_trained_alike(stock, ours, lifetime)
    true = [
        count(step, range(microbatch, microbatch + 1), layer, 2)
        for step in range(3)
        for microbatch in range(case.accumulate)
        for layer in range(case.layers)
    ]
    assert len(found) == len(true)
    assert all(
        np.array_equal(forecast, load) for forecast, load in zip(found, true, strict=True)
    ), (found, true)
    assert [m.late for m in layer_metrics(ours.chunks)] == [0, 0]


def own_routes(case: Any, step: int, microbatches: Iterable[int]) -> torch.Tensor:
    """[T, L, 2] experts of this rank's tokens."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    layers = range(case.layers)
    return torch.cat(
        [torch.stack([routes_of(step, m, n, rank) for n in layers], dim=1) for m in microbatches]
    )


def announce(case: Any, chunks: list, step: int) -> None:
    """Give the routes of a step in three forms, by its number: by layer, in a file, and by microbatch."""
    from megatron_hecate.runtime.known_routes import expect_routes

    routes = own_routes(case, step, range(case.accumulate))
    if step == 0:
        by_layer = list(routes.unbind(dim=1))
        seen = [weakref.ref(of_layer) for of_layer in by_layer]
        expect_routes(chunks, by_layer)
        del by_layer
        assert [ref() for ref in seen] == [None] * case.layers, "something holds the routes"
    elif step == 1:
        file = Path(os.environ["TEST_FOLDER"]) / f"routes{torch.distributed.get_rank()}.npy"
        np.save(file, routes.to(torch.int16).numpy())
        expect_routes(chunks, np.load(file, mmap_mode="r"))
    else:
        expect_routes(chunks, own_routes(case, 0, [0]))  # replaced by the next call
        expect_routes(chunks, own_routes(case, step, [0]).byte())
        expect_routes(chunks, own_routes(case, step, [1]).int(), add=True)


@pytest.mark.newest
@ranks(2)
def test_an_iteration_of_several_microbatches_is_planned_for_the_sum_of_announced_routes() -> None:
    import tiny_gpt
    from host_memory import peak_growth

    from megatron_hecate.runtime.known_routes import expect_routes

    case = tiny_gpt.Case(accumulate=2, settings=(REPLAY,))
    tiny_gpt.initialize(case)
    replay(case.accumulate)
    stock = _train(case, 3)
    found: list[np.ndarray] = []
    note_forecasts(found)
    ours = _train(case, 3, before=partial(announce, case), slots=2, late_replicas=2)
    tiny_gpt.assert_trained_alike(stock, ours)
    true = [count(step, range(2), layer, 2) for step in range(3) for layer in range(2)]
    assert len(found) == len(true)
    assert all(
        np.array_equal(forecast, load) for forecast, load in zip(found, true, strict=True)
    ), (found, true)
    layers = [torch.zeros(1, 2, dtype=torch.int32)] * 2
    for wrong, message in [
        (layers[:1], "routes of 1 layers, but this rank has 2 MoE layers"),
        (torch.zeros(4, 3, 2).int(), "routes of 3 layers, but this rank has 2 MoE layers"),
        (torch.zeros(4, 2).int(), r"routes of shape \(4, 2\); give \[tokens, layers, k\]"),
        ([layers[0], layers[0] + 8], "1 announced routes of .* name no expert from 0 to 7"),
        ([layers[0], torch.zeros(1, 2)], "MoE layer 1 are torch.float32; give the numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            expect_routes(ours.chunks, wrong)
    large = torch.randint(0, EXPERTS, (1 << 18, 4, 8), dtype=torch.int16)  # 16 MiB
    assert peak_growth(lambda: expect_routes(ours.chunks, large[:, ::2])) < 12 << 20


@pytest.mark.newest
@ranks(2)
def test_when_a_layer_has_been_planned_only_the_router_holds_its_routes() -> None:
    """The router is made to forget them while the plan of its layer is made."""
    import tiny_gpt

    from megatron_hecate.runtime.early_plans import EarlyPlans

    case = tiny_gpt.Case(accumulate=2, settings=(REPLAY,))
    tiny_gpt.initialize(case)
    replay(case.accumulate)
    run = tiny_gpt.train(case, steps=0, hook=tiny_gpt.fssdp_hook(lifetime="microbatch", slots=2))
    # a local variable of the loop holds the routes of the last layer
    router = tiny_gpt.moe_layers(run.chunks)[0].router.router_replay
    plan, alive = EarlyPlans.plan, []

    def planned(early: EarlyPlans, index: int, inputs: Any) -> Any:
        result = plan(early, index, inputs)
        if index == 0:
            routes, earlier = router.target_topk_idx, router.replay_backward_list[:-1]
            copied, seen = routes.clone(), weakref.ref(routes)
            router.clear_indices()
            del routes
            alive.append(seen())
            router.replay_backward_list = earlier
            router.set_target_indices(copied)
        return result

    EarlyPlans.plan = planned
    run.step(0)
    assert alive == [None] * case.accumulate


@pytest.mark.newest
@ranks(2)
def test_of_an_iteration_the_first_microbatch_is_known_and_the_rest_expected() -> None:
    """Where nobody tells: the first microbatch's loads, plus those of each further one, which are taken to be alike in
    the first step, and later half of those of the last step with two microbatches (with two steps the forecast is the
    last step's loads, see `LoadHistory`)."""
    import tiny_gpt

    case = tiny_gpt.Case(accumulate=2, settings=(REPLAY,))
    tiny_gpt.initialize(case)
    replay(case.accumulate)
    found: list[np.ndarray] = []
    note_forecasts(found)
    _train(case, 2, slots=2)
    first = [count(step, range(1), layer, 2) for step in range(2) for layer in range(2)]
    before = [count(0, range(2), layer, 2) for layer in range(2)]
    expected = [2 * first[0], 2 * first[1], first[2] + before[0] / 2, first[3] + before[1] / 2]
    for forecast, load in zip(found, expected, strict=True):
        np.testing.assert_allclose(forecast, load, rtol=1e-12)


@pytest.mark.newest
@pytest.mark.slow
@ranks(4)
def test_a_pipeline_replays_alike() -> None:
    """Two stages of two chunks, with recomputation: each chunk's layers are planned for its own microbatch."""
    import tiny_gpt

    fields = dict(pp=2, vpp=2, accumulate=4, distributed_optimizer=True, overlap=True)
    case = tiny_gpt.Case(**fields, settings=(REPLAY, *RECOMPUTE.items()))
    tiny_gpt.initialize(case)
    replay(case.accumulate)
    stock = _train(case, 2)
    found: list[np.ndarray] = []
    note_forecasts(found)
    ours = _train(case, 2, lifetime="layer", slots=2)
    tiny_gpt.assert_trained_alike(stock, ours)
    own = [layer.layer_number - 1 for layer in tiny_gpt.moe_layers(ours.chunks)]
    true = [
        count(step, range(microbatch, microbatch + 1), layer, 2)
        for step in range(2)
        for microbatch in range(4)
        for layer in own
    ]
    assert sorted(map(tuple, found)) == sorted(map(tuple, true))


@pytest.mark.newest
@ranks(2)
def test_tokens_that_their_router_chooses_itself_are_not_counted() -> None:
    """verl's `RouterReplay` (verl/utils/megatron/router_replay_patch.py, 1dda039b) masks tokens without a route, whose
    rows of the routes are zeros. Oracle: loads of the other tokens, one by one; stock with the same routers."""
    import tiny_gpt
    from megatron.core.transformer.moe.router_replay import RouterReplay

    replay_routes, set_routes = RouterReplay.get_replay_topk, RouterReplay.set_target_indices
    masked = torch.arange(TOKENS) % 4 == 3

    def set_masked(router: RouterReplay, routes: torch.Tensor) -> None:
        set_routes(router, routes.masked_fill(masked.unsqueeze(1), 0))
        router.target_replay_mask = ~masked

    def chosen(router: RouterReplay, scores: torch.Tensor, topk: int, *args: Any) -> tuple:
        own = args[-1](scores, topk)[1]
        replayed = replay_routes(router, scores, topk, *args)[1]
        routes = torch.where(router.target_replay_mask.unsqueeze(1), replayed, own)
        return scores.gather(1, routes), routes

    RouterReplay.set_target_indices, RouterReplay.get_replay_topk = set_masked, chosen
    case = tiny_gpt.Case(settings=(REPLAY,))
    tiny_gpt.initialize(case)
    replay(case.accumulate, then_backward=False)
    stock = _train(case, 2)
    found: list[np.ndarray] = []
    note_forecasts(found)
    ours = _train(case, 2, lifetime="microbatch", slots=2)
    tiny_gpt.assert_trained_alike(stock, ours)
    true = []
    for step in range(2):
        for layer in range(2):
            load = np.zeros(EXPERTS, dtype=np.int64)
            for rank in range(2):
                routes = routes_of(step, 0, layer, rank)
                for expert in routes[~masked].flatten().tolist():
                    load[expert] += 1
            true.append(load)
    assert len(found) == len(true)
    assert all(map(np.array_equal, found, true)), (found, true)


@pytest.mark.newest
@ranks(4)
def test_the_busiest_rank_has_little_more_than_the_mean() -> None:
    """Four ranks with a single slot each. Oracle: largest rank load by the placement's holders for true loads, solved
    by scipy as a linear program; where the same run forecasts from the past, it is far from the mean."""
    import tiny_gpt

    from megatron_hecate.runtime import known_routes

    read_off = known_routes.replays
    case = tiny_gpt.Case(ep=4, settings=(REPLAY,))
    tiny_gpt.initialize(case)
    replay(case.accumulate)
    steps = range(4)

    def worst(known: Callable[[Any], bool]) -> float:
        known_routes.replays = known
        run = tiny_gpt.train(case, steps=0, hook=tiny_gpt.fssdp_hook(slots=1))
        found = []
        for step in steps:
            run.step(step)
            for index, layer in enumerate(tiny_gpt.moe_layers(run.chunks)):
                load = count(step, range(1), index, 4)
                found.append(
                    _least_largest_load(load, layer.fssdp.placement.holders) / load.sum() * 4
                )
        return float(np.mean(found[4:]))  # from the third step on the past has something to say

    routed = np.mean(
        [_home_load(count(step, range(1), layer, 4)) for step in steps[2:] for layer in range(2)]
    )
    by_routes, by_past = worst(read_off), worst(lambda layer: False)
    assert by_routes < 1.05 < 1.25 < by_past < routed, (by_routes, by_past, routed)


@pytest.mark.newest
@ranks(4)
def test_metrics_of_a_plan_for_each_microbatch() -> None:
    """Two experts get the tokens of the first microbatch, all those of the last one, and no record is kept. Oracle:
    tokens that the experts of every rank are given, and the replicas that are there then."""
    import tiny_gpt
    import torch.distributed as dist

    def routes(step: int, microbatch: int, layer: int, rank: int) -> torch.Tensor:
        return torch.tensor(
            [[2 * (t % 4), 2 * (t % 4) + 1] if microbatch else [0, 1] for t in range(TOKENS)]
        )

    globals()["routes_of"] = routes
    case = tiny_gpt.Case(ep=4, accumulate=2, settings=(REPLAY,))
    tiny_gpt.initialize(case)
    replay(case.accumulate)
    computed, held = torch.zeros(case.layers, 4, dtype=torch.int64), [[], []]  # by layer

    def note(chunks: list, step: int) -> None:
        computed.zero_()
        for index, layer in enumerate(tiny_gpt.moe_layers(chunks) if not step else []):
            layer.experts.register_forward_pre_hook(
                lambda _, args, i=index: _add(computed, i, len(args[0]))
            )
            layer.experts.register_forward_pre_hook(
                lambda experts, _, i=index: held[i].append(_count_replicas(experts))
            )

    run = _train(case, 2, before=note, lifetime="microbatch", slots=1)
    dist.all_reduce(computed)
    recorder = tiny_gpt.moe_layers(run.chunks)[0].prefetcher.monitor.recorder.stage
    with mock.patch.object(recorder, "take") as take:
        recorder.close()
    iteration, _, values = take.call_args.args
    assert iteration == 2 and computed.sum(dim=1).tolist() == [2 * 2 * 4 * TOKENS] * 2
    fullest = computed.double().amax(dim=1) / computed.double().mean(dim=1)
    assert values()["overload_factor"].tolist() == pytest.approx(fullest.tolist())
    assert fullest.max() < 1.1
    assert len(held[0]) == 4 and held[0][2] > held[0][3] and held[1][2] > held[1][3]
    assert values()["replicas"].tolist() == [of_layer[2] for of_layer in held]


def _count_replicas(experts: Any) -> int:
    return 0 if experts.replicas is None else experts.replicas.placement.num_replicas


def _add(computed: torch.Tensor, layer: int, tokens: int) -> None:
    from torch.distributed import get_rank

    computed[layer, get_rank()] += tokens


def _home_load(load: np.ndarray) -> float:
    """Largest rank load over the mean without replicas: two experts per rank."""
    by_rank = load.reshape(4, 2).sum(axis=1)
    return float(by_rank.max() / by_rank.mean())


def _least_largest_load(load: np.ndarray, holders: np.ndarray) -> float:
    """Tokens of the busiest rank under the best split of ``load`` [E] over ``holders`` [E, R] bool."""
    from scipy.optimize import linprog

    pairs = np.argwhere(holders)
    cost = np.append(np.zeros(len(pairs)), 1.0)
    split = np.array([np.append(pairs[:, 0] == expert, 0.0) for expert in range(len(load))])
    most = np.array([np.append(pairs[:, 1] == rank, -1.0) for rank in range(holders.shape[1])])
    return linprog(cost, A_ub=most, b_ub=np.zeros(len(most)), A_eq=split, b_eq=load).fun


def _layer(action: Any) -> types.SimpleNamespace:
    """As much of a layer as decides whether its routes are known."""
    replay = types.SimpleNamespace(router_replay_action=action, target_topk_idx=None)
    return types.SimpleNamespace(
        router=types.SimpleNamespace(router_replay=replay),
        config=types.SimpleNamespace(moe_router_fusion=False),
    )


@pytest.mark.fast
@pytest.mark.newest
def test_only_the_replaying_forward_knows_its_routes() -> None:
    """Megatron's own actions; a fused router does not heed them."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    from megatron_hecate.megatron.router_replay import replays

    known = {action: replays(_layer(action)) for action in [None, *RouterReplayAction]}
    assert [action for action, is_known in known.items() if is_known] == [
        RouterReplayAction.REPLAY_FORWARD
    ]
    fused = _layer(RouterReplayAction.REPLAY_FORWARD)
    fused.config.moe_router_fusion = True
    assert not replays(fused)
    del fused.router.router_replay
    assert not replays(fused)
