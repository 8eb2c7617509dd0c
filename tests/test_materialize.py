"""Our tier-1 planner against limits counted by hand.

Oracles: `assert_valid` and plain counting for what any plan must keep. If a limit were overrun or ranks could disagree,
these fail. What plans are worth: `test_prices`, `test_plan_quality`; what is kept of them: `test_last_plans`.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from random_plans import PROPERTY, Layer, guests_per_rank, homes_only, layers, one_node, pairs, plan_limits

from megatron_hecate.plan import Placement, algorithm1, assert_valid, plan_guests
from megatron_hecate.plan.best import plan_best

ROOT = Path(__file__).parents[1]


@PROPERTY
@given(layers(), plan_limits())
@example(Layer(np.ones(2), homes_only([0, 0], 2, room=0), one_node(2), None), dict(copies=None, egress=1))
def test_every_plan_is_valid_and_every_limit_is_kept(layer: Layer, limits: dict[str, float | None]) -> None:
    planned = layer.plan(**limits)
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
@given(layers(), plan_limits())
def test_same_input_same_plan_and_the_input_is_left_alone(layer: Layer, limits: dict[str, float | None]) -> None:
    forecast, table = layer.forecast.copy(), layer.placement.table.copy()
    first = layer.plan(**limits)
    layer.forecast.setflags(write=False)
    assert layer.plan(**limits).table.tolist() == first.table.tolist()
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
    one = dataclasses.replace(layer, forecast=moderate).plan()
    assert dataclasses.replace(layer, forecast=moderate * factor).plan().table.tolist() == one.table.tolist()


@pytest.mark.parametrize("total", [5e-324, 1e-300, 1.0, 1e300])
def test_forecasts_of_any_size(total: float) -> None:
    planned = plan_guests(np.array([0, 0, 0, total]), Placement.initial(4, 4, num_slots=1), one_node(4))
    assert pairs(planned) == [(3, 0), (3, 1), (3, 2)]


def test_guests_of_the_given_placement_do_not_matter() -> None:
    forecast, bare = np.array([40, 30, 5, 5]), Placement.initial(4, 4, num_slots=1)
    full = bare.with_guests([(2, 0), (3, 1), (2, 3)])
    assert pairs(plan_guests(forecast, full, one_node(4))) == pairs(plan_guests(forecast, bare, one_node(4)))
    assert pairs(full) == [(2, 0), (2, 3), (3, 1)]


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
        ([1, 2, 3, 4], r"shape \(4,\), expected \[up to 32, 4\]"),
        ([[1, 2, 3]], r"shape \(1, 3\), expected \[up to 32, 4\]"),
        ([[1, 2, 3, 4]] * 33, "33 scenarios are more than the planner looks at together; give up to 32"),
        ([[1, 2, 3, -4]], "finite and >= 0, got -4.0 to 3.0"),
        ([[1, 2, 3, -1e-300]], "finite and >= 0, got -1e-300 to 3.0"),
        ([[1, 2, 3, float("nan")]], "finite and >= 0, got nan"),
    ],
)
def test_bad_scenarios_say_what_they_are(scenarios: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_guests(np.ones(4), Placement.initial(4, 2, num_slots=1), one_node(2), scenarios=lambda: scenarios)


@pytest.mark.parametrize("unit", [2.0**-900, 2.0**-149, 1.0, 2.0**126, 2.0**900])
def test_scenarios_come_in_any_unit(unit: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        forecast, may_come = rng.pareto(1.0, 16), rng.integers(0, 1000, (5, 16))
        layer, world = Placement.initial(16, 8, num_slots=1), one_node(8)
        usual, ours = (
            plan_guests(forecast, layer, world, scenarios=lambda others=others: others)
            for others in (may_come.astype(np.float32), may_come * unit)
        )
        assert np.array_equal(usual.table, ours.table)


def test_scenarios_that_cannot_be_written_are_no_other_type_to_compile() -> None:
    scenarios = np.asfortranarray(np.random.default_rng(0).pareto(1.0, (5, 4)))
    plans, compiled = [], []
    for _ in range(2):
        plans.append(
            plan_guests(np.ones(4), Placement.initial(4, 2, num_slots=1), one_node(2), scenarios=lambda: scenarios)
        )
        compiled.append(len(plan_best.signatures))
        scenarios.flags.writeable = False
    assert compiled[0] == compiled[1] and np.array_equal(plans[0].table, plans[1].table)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_world_of_another_size_is_refused(num_ranks: int) -> None:
    with pytest.raises(ValueError, match=f"world has {num_ranks} ranks, the placement 2"):
        plan_guests(np.ones(4), Placement.initial(4, 2, num_slots=1), one_node(num_ranks))
