"""Our tier-1 planner against limits counted by hand, every placement there is, and loads that drift.

Oracles: `assert_valid` and plain counting for what any plan must keep; for quality, the counting bound of all possible
placements of small layers (`random_plans`), and the imbalance that scipy-checked quotas (`test_route`) leave on loads
that the planner had to forecast. If a limit were overrun, ranks could disagree, copies were made that cannot pay, or
a change made plans worse than the project promises, these fail.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from random_plans import (
    PROPERTY,
    Layer,
    best_largest,
    counting_bound,
    drifting,
    guests_per_rank,
    homes_only,
    layers,
    one_node,
    pairs,
    some_total,
)

from megatron_hecate.observe import LoadHistory
from megatron_hecate.plan import Placement, World, algorithm1, assert_valid, largest_load, plan_guests

ROOT = Path(__file__).parents[1]


def _plan(layer: Layer, **limits: float | None) -> Placement:
    return plan_guests(layer.forecast, layer.placement, layer.world, overlap_degree=layer.overlap_degree, **limits)


# limits


@st.composite
def _limits(draw: st.DrawFn) -> dict[str, float | None]:
    count = st.one_of(st.none(), st.integers(0, 6))
    price = st.one_of(st.just(0.0), st.floats(0, 1e4), st.just(1e-300), st.just(float("inf")))
    return dict(copies=draw(count), egress=draw(count), copy_tokens=draw(price), routing_tokens=draw(price))


@PROPERTY
@given(layers(), _limits())
@example(Layer(np.ones(2), homes_only([0, 0], 2, room=0), one_node(2), None), dict(copies=None, egress=1))
def test_every_plan_is_valid_and_every_limit_is_kept(layer: Layer, limits: dict[str, float | None]) -> None:
    planned = _plan(layer, **limits)
    assert_valid(planned)
    assert planned.home.tolist() == layer.placement.home.tolist()
    own = np.where(layer.placement.table >= 0, layer.placement.table, planned.table)
    assert planned.table.tolist() == own.tolist()  # homes stay; guests fill empty slots only
    if layer.overlap_degree is not None:
        assert max(guests_per_rank(planned).values(), default=0) <= layer.overlap_degree
    if limits["copies"] is not None:
        assert planned.num_guests <= limits["copies"]
    if limits["egress"] is not None:
        leaving = np.bincount(planned.home[[e for e, _ in pairs(planned)]], minlength=planned.num_ranks)
        assert leaving.max(initial=0) <= limits["egress"]
    assert all(layer.forecast[e] > 0 for e, _ in pairs(planned))


@PROPERTY
@given(layers(), _limits())
def test_same_input_same_plan_and_the_input_is_left_alone(layer: Layer, limits: dict[str, float | None]) -> None:
    forecast, table = layer.forecast.copy(), layer.placement.table.copy()
    first = _plan(layer, **limits)
    layer.forecast.setflags(write=False)
    assert _plan(layer, **limits).table.tolist() == first.table.tolist()
    assert layer.forecast.tolist() == forecast.tolist()
    assert layer.placement.table.tolist() == table.tolist()


SCRIPT = """
import numpy as np
from megatron_hecate.plan import Placement, World, fingerprint, plan_guests
rng = np.random.default_rng(5)
for ranks in (4, 8, 16):
    forecast = rng.dirichlet(np.full(64, 0.3))
    world = World(tuple(r // 4 for r in range(ranks)))
    print(fingerprint(plan_guests(forecast, Placement.initial(64, ranks, num_slots=2), world)))
"""


def test_another_process_makes_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True)
    exec(SCRIPT, {})
    assert len(done.stdout.split()) == 3
    assert done.stdout == capsys.readouterr().out


@PROPERTY
@given(layers(), st.sampled_from([2.0**-20, 0.25, 2.0, 2.0**30]))
def test_only_proportions_matter(layer: Layer, factor: float) -> None:
    moderate = np.clip(layer.forecast, 0, 1e6) * (layer.forecast >= 1e-3)  # a power of two then scales exactly
    one = _plan(dataclasses.replace(layer, forecast=moderate))
    assert _plan(dataclasses.replace(layer, forecast=moderate * factor)).table.tolist() == one.table.tolist()


@pytest.mark.parametrize("total", [5e-324, 1e-300, 1.0, 1e300])
def test_forecasts_of_any_size(total: float) -> None:
    planned = plan_guests(np.array([0, 0, 0, total]), Placement.initial(4, 4, num_slots=1), one_node(4))
    assert pairs(planned) == [(3, 0), (3, 1), (3, 2)]


def test_guests_of_the_given_placement_do_not_matter() -> None:
    forecast, bare = np.array([40, 30, 5, 5]), Placement.initial(4, 4, num_slots=1)
    full = bare.with_guests([(2, 0), (3, 1), (2, 3)])
    assert pairs(plan_guests(forecast, full, one_node(4))) == pairs(plan_guests(forecast, bare, one_node(4)))
    assert pairs(full) == [(2, 0), (2, 3), (3, 1)]


@PROPERTY
@given(layers(), _limits(), st.integers(0, 3), st.randoms(use_true_random=False))
def test_with_scenarios_and_a_last_plan_every_limit_is_kept(
    layer: Layer, limits: dict[str, float | None], count: int, random: Random
) -> None:
    """The last plan was made for other loads and other limits; only where it keeps these may it be returned."""
    shuffled = layer.forecast[random.sample(range(len(layer.forecast)), len(layer.forecast))]
    last = plan_guests(shuffled, layer.placement, layer.world)
    scenarios = np.clip(layer.forecast, 0, 1e6) * (1 + np.arange(count)[:, None] * (shuffled > layer.forecast))
    planned = _plan(layer, scenarios=scenarios, previous=last, **limits)
    assert_valid(planned)
    assert planned.home.tolist() == layer.placement.home.tolist()
    leaving = np.bincount(planned.home[[e for e, _ in pairs(planned)]], minlength=planned.num_ranks)
    degree = len(layer.forecast) if layer.overlap_degree is None else layer.overlap_degree
    assert max(guests_per_rank(planned).values(), default=0) <= degree
    assert planned.num_guests <= (np.inf if limits["copies"] is None else limits["copies"])
    assert leaving.max(initial=0) <= (np.inf if limits["egress"] is None else limits["egress"])
    assert all(layer.forecast[e] > 0 for e, _ in pairs(planned))
    again = _plan(layer, scenarios=scenarios, previous=last, **limits)
    assert again is planned or again.table.tolist() == planned.table.tolist()


# what a last plan is kept for


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("copy_tokens", [0.0, 0.1])
def test_a_plan_that_is_still_good_is_returned_itself(slots: int, copy_tokens: float) -> None:
    forecast = np.array([100.0, 20, 20, 20, 20, 20, 20, 20])
    layer, world = Placement.initial(8, 4, num_slots=slots), one_node(4)
    known = dict(scenarios=forecast * np.array([[1.0], [1.01]]), copy_tokens=copy_tokens)
    first = plan_guests(forecast, layer, world, **known)
    assert first.num_guests
    assert plan_guests(forecast, layer, world, previous=first, **known) is first
    drifted = forecast + np.array([1, -1, 0, 1, 0, -1, 0, 0])
    assert plan_guests(drifted, layer, world, previous=first, **known) is first


@pytest.mark.parametrize("slots", [1, 2])
def test_a_plan_that_does_not_fit_any_more_is_not_kept(slots: int) -> None:
    forecast = np.array([100.0, 20, 20, 20, 20, 20, 20, 20])
    layer, world = Placement.initial(8, 4, num_slots=slots), one_node(4)
    known = dict(scenarios=forecast[None])
    last = plan_guests(forecast, layer, world, **known)
    jumped = np.roll(forecast, 4)
    assert _largest(jumped, plan_guests(jumped, layer, world, previous=last, scenarios=jumped[None])) <= 1.02
    assert plan_guests(forecast, layer, world, previous=last, copies=1, **known).num_guests <= 1
    assert plan_guests(np.array([100.0] * 8), layer, world, previous=layer, **known).num_guests  # without guests
    mirrored = Placement(home=layer.home[::-1].copy(), table=np.where(layer.table < 0, -1, 7 - layer.table))
    assert_valid(plan_guests(forecast, mirrored, world, previous=last, **known), num_slots=slots)
    wider = plan_guests(forecast, Placement.initial(8, 4, num_slots=slots + 1), world, previous=last, **known)
    assert_valid(wider, num_slots=slots + 1)


def _largest(load: np.ndarray, placement: Placement) -> float:
    """In mean rank loads."""
    return counting_bound(load.astype(np.int64), placement.holders) / (load.sum() / placement.num_ranks)


def test_nothing_allowed_or_nothing_to_do_nothing_copied() -> None:
    roomy = Placement.initial(4, 4, num_slots=3)
    for limit in ("overlap_degree", "copies", "egress"):
        assert plan_guests(np.array([9, 1, 1, 1]), roomy, one_node(4), **{limit: 0}).num_guests == 0
    assert plan_guests(np.zeros(4), roomy, one_node(4)).num_guests == 0
    assert plan_guests(np.ones(4), Placement.initial(4, 4, num_slots=0), one_node(4)).num_guests == 0
    assert plan_guests(np.ones(4), homes_only([0] * 4, 1, room=2), one_node(1)).num_guests == 0


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_forecast_whose_sum_overflows() -> None:
    planned = plan_guests(np.array([1e308, 1e308, 0, 0]), Placement.initial(4, 2, num_slots=1), one_node(2))
    assert planned.num_guests > 0


# prices


@PROPERTY
@given(layers())
def test_without_a_price_slots_are_filled(layer: Layer) -> None:
    planned = _plan(layer)
    loaded = np.flatnonzero(layer.forecast > 1e-9 * layer.forecast.sum()).tolist()  # less may round to nothing
    degree = len(layer.forecast) if layer.overlap_degree is None else layer.overlap_degree
    guests, free = guests_per_rank(planned), planned.free_slots
    for r in range(planned.num_ranks):
        missing = [e for e in loaded if not planned.holders[e, r]]
        assert not missing or not free[r] or guests[r] >= degree, f"rank {r} could host {missing}"


@PROPERTY
@given(layers(), st.floats(1.001, 1e9))
def test_a_price_that_perfect_balance_would_not_pay_copies_nothing(layer: Layer, factor: float) -> None:
    forecast = np.clip(layer.forecast, 0, 1e6)
    load = np.bincount(layer.placement.home, weights=forecast, minlength=layer.placement.num_ranks)
    price = (load.max() - load.mean()) * factor + 1e-6 * load.sum()
    planned = _plan(dataclasses.replace(layer, forecast=forecast), copy_tokens=max(price, 1e-9))
    assert planned.num_guests == 0


# 40 tokens on one of 4 ranks, whose home sends all copies: 3 cost 10 + 3c, 2 cost 13.3 + 2c, none 40
@pytest.mark.parametrize(
    ("copy_tokens", "guests"), [(0.0, 3), (1.0, 3), (8.0, 2), (13.0, 2), (14.0, 0), (31.0, 0), (float("inf"), 0)]
)
def test_copies_are_made_while_they_pay(copy_tokens: float, guests: int) -> None:
    placement = Placement.initial(4, 4, num_slots=1)
    assert plan_guests(np.array([0, 40, 0, 0]), placement, one_node(4), copy_tokens=copy_tokens).num_guests == guests


def test_a_second_copy_per_rank_must_pay_too() -> None:
    # rank 0 has two experts of 60: with one guest per rank each goes to one other rank, and that is perfect
    placement = Placement.initial(6, 3, num_slots=2)
    forecast = np.array([60, 60, 0, 0, 0, 0])
    assert guests_per_rank(plan_guests(forecast, placement, one_node(3), copy_tokens=1.0)) == {1: 1, 2: 1}
    assert guests_per_rank(plan_guests(forecast, placement, one_node(3))) == {1: 2, 2: 2}


@pytest.mark.parametrize("copy_tokens", [0.0, 1.0])
@pytest.mark.parametrize(("routing_tokens", "guests"), [(0.0, 3), (25.0, 3), (31.0, 0), (float("inf"), 0)])
def test_routing_must_be_paid_too(routing_tokens: float, copy_tokens: float, guests: int) -> None:
    prices = dict(copy_tokens=copy_tokens, routing_tokens=routing_tokens)
    planned = plan_guests(np.array([0, 40, 0, 0]), Placement.initial(4, 4, num_slots=1), one_node(4), **prices)
    assert planned.num_guests == guests


# quality

# What the hedge costs where the forecast comes true; the worst of 34,000 layers is 1.239, 99 % are optimal
WORST_FACTOR: float = 1.25


@pytest.mark.parametrize("seed", range(4))
def test_no_placement_of_a_small_layer_is_much_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    optimal = 0
    for _ in range(500):
        num_ranks, num_experts = int(rng.integers(2, 4)), int(rng.integers(1, 7))
        home = rng.integers(0, num_ranks, num_experts).tolist()
        total = some_total(rng, num_experts)
        layer = homes_only(home, num_ranks, room=1)
        planned = plan_guests(total, layer, one_node(num_ranks), overlap_degree=1)
        ours = counting_bound(total, planned.holders)
        best = best_largest(total, np.array(home), [1] * num_ranks)
        assert best <= ours <= best * (WORST_FACTOR if num_ranks > 2 else 1), f"{total.tolist()} home {home}"
        optimal += ours == best
    assert optimal >= 0.98 * 500


@pytest.mark.parametrize(
    ("total", "home", "ours", "best"),
    [
        ([221512, 315646, 140439, 151767, 18563, 152076], [2, 0, 0, 0, 0, 0], 423964, 342179),
        # both guests go to the hot expert: its tokens may be more or fewer, which the best plan could not follow
        ([661106, 195658, 143234], [1, 1, 1], 402170, 338892),
        ([84759, 74493, 184798, 655948], [2, 2, 2, 2], 407600, 344050),
    ],
)
def test_worst_cases_known(total: list[int], home: list[int], ours: int, best: int) -> None:
    planned = plan_guests(np.array(total), homes_only(home, 3, room=1), one_node(3), overlap_degree=1)
    assert best_largest(np.array(total), np.array(home), [1] * 3) == best
    assert best <= counting_bound(np.array(total), planned.holders) <= ours


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_with_a_slot_for_every_expert_balance_is_perfect(num_ranks: int) -> None:
    rng = np.random.default_rng(num_ranks)
    for _ in range(50):
        home = rng.integers(0, num_ranks, int(rng.integers(1, 12)))
        total = rng.integers(0, 1000, len(home))
        planned = plan_guests(total, homes_only(home.tolist(), num_ranks, room=len(home)), one_node(num_ranks))
        assert counting_bound(total, planned.holders) == -(-total.sum() // num_ranks)


def _left(loads: np.ndarray, num_ranks: int) -> np.ndarray:
    """Imbalance of every step >= 1 and layer of ``loads`` [T, L, E]: 2 slots, planned from the history alone."""
    world = World(tuple(rank // 8 for rank in range(num_ranks)))
    homes = Placement.initial(loads.shape[2], num_ranks, num_slots=2)
    history = LoadHistory()
    history.append(loads[0])
    left = []
    for load in loads[1:]:
        for forecast, total in zip(history.forecast(), load, strict=True):
            left.append(largest_load(total, plan_guests(forecast, homes, world), world) * num_ranks / total.sum())
        history.append(load)
    return np.array(left)


@pytest.mark.parametrize("num_ranks", [8, 32])
@pytest.mark.parametrize("seed", [1, 2])
def test_two_slots_balance_loads_that_drift(num_ranks: int, seed: int) -> None:
    left = _left(drifting(np.random.default_rng(seed), steps=60, num_layers=8, num_experts=64), num_ranks)
    assert left.mean() <= 1.002 and np.percentile(left, 99) <= 1.02, f"{left.mean()} {np.percentile(left, 99)}"


@pytest.mark.parametrize("num_ranks", [8, 32])
def test_two_slots_balance_a_recorded_training(num_ranks: int) -> None:
    file = ROOT / "bench" / "data" / "pysrc_e64k6_aux1e-2.npz"
    if not file.exists():
        pytest.skip(f"no {file}")
    left = _left(np.load(file)["counts"].sum(axis=2, dtype=np.int64), num_ranks)  # [T, L, sources, E]
    assert left.mean() <= 1.002 and np.percentile(left, 99) <= 1.02, f"{left.mean()} {np.percentile(left, 99)}"


# errors


@pytest.mark.parametrize(
    ("forecast", "message"),
    [
        ([1, 2, 3], r"shape \(3,\), expected \[4\]"),
        ([[1, 2, 3, 4]], r"shape \(1, 4\), expected \[4\]"),
        (7, r"shape \(\), expected \[4\]"),
        ([1, 2, float("nan"), 4], "finite and >= 0, got .*nan"),
        ([1, 2, float("inf"), 4], "finite and >= 0, got .*inf"),
        ([1, 2, -0.5, 4], "finite and >= 0, got .*-0.5"),
    ],
)
@pytest.mark.parametrize("plan", [plan_guests, algorithm1])
def test_bad_forecasts_say_what_they_are(plan, forecast: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(np.array(forecast), Placement.initial(4, 2, num_slots=1), one_node(2))


@pytest.mark.parametrize(
    ("name", "value"),
    [("overlap_degree", -1), ("copies", -1), ("egress", -2), ("copy_tokens", -1.0), ("copy_tokens", float("nan")),
     ("routing_tokens", -0.5), ("routing_tokens", float("nan"))],
)  # fmt: skip
def test_bad_limits_and_prices_say_what_they_are(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}.*must be 0 or more"):
        plan_guests(np.ones(4), Placement.initial(4, 2, num_slots=1), one_node(2), **{name: value})


@pytest.mark.parametrize(
    ("scenarios", "message"),
    [
        ([1, 2, 3, 4], r"shape \(4,\), expected \[any number, 4\]"),
        ([[1, 2, 3]], r"shape \(1, 3\), expected \[any number, 4\]"),
        ([[1, 2, 3, -4]], "finite and >= 0, got -4.0 to 3.0"),
        ([[1, 2, 3, float("nan")]], "finite and >= 0, got nan"),
    ],
)
def test_bad_scenarios_say_what_they_are(scenarios: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_guests(np.ones(4), Placement.initial(4, 2, num_slots=1), one_node(2), scenarios=np.array(scenarios))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_world_of_another_size_is_refused(num_ranks: int) -> None:
    with pytest.raises(ValueError, match=f"world has {num_ranks} ranks, the placement 2"):
        plan_guests(np.ones(4), Placement.initial(4, 2, num_slots=1), one_node(num_ranks))
