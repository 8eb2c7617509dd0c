"""The checker of plans against plans that are wrong in one known way.

Its oracle is the violation we planted: every rule has a plan that breaks it and, as far as possible, no other, and the
error must name the expert, rank and values. Random valid plans, made without the planner, must pass; one random wrong
token must not. If a rule were dropped, a plan that sends tokens to a rank without their expert would reach the
dispatcher.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hecate.plan import Placement, Quotas
from megatron_hecate.plan.valid import assert_valid, fingerprint

PROPERTY = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def _unchecked(home: list, table: list) -> Placement:
    """A placement that its own constructor would refuse."""
    placement = object.__new__(Placement)
    placement.__dict__.update(home=np.array(home), table=np.array(table))
    return placement


def _placement() -> Placement:
    """Four experts on two ranks, expert 0 lent to rank 1."""
    return Placement(home=np.array([0, 0, 1, 1]), table=np.array([[0, 1, -1], [2, 3, 0]]))


LOAD = np.array([[9, 2, 3, 4], [5, 6, 7, 8]])  # [N, E]
EXPERT, RANK = [0, 0, 1, 2, 3], [0, 1, 0, 1, 1]
TOKENS = [[9, 0, 2, 3, 4], [1, 4, 6, 7, 8]]  # [N, C]


def _quotas(expert: object = EXPERT, rank: object = RANK, tokens: object = TOKENS) -> Quotas:
    return Quotas(expert=np.array(expert), rank=np.array(rank), tokens=np.array(tokens))


def test_a_valid_plan_passes() -> None:
    assert_valid(_placement())
    assert_valid(_placement(), num_slots=1)
    assert_valid(_placement(), _quotas())
    assert_valid(_placement(), _quotas(), load=LOAD, num_slots=1)


# placement: what its constructor refuses must be seen here again, whoever made it


@pytest.mark.parametrize(
    ("home", "table", "message"),
    [
        ([0, 1.5], [[0], [1]], "home must be integers, got dtype float64"),
        ([0, 1], [[0.0], [1.0]], "table must be integers, got dtype float64"),
        ([0, 2], [[0], [1]], "expert 1 has its home on rank 2 of 2"),
        ([-1, 1], [[0], [1]], "expert 0 has its home on rank -1 of 2"),
        ([0, 1], [[0, 2], [1, -1]], "slot 1 of rank 0 holds expert 2 of 2"),
        ([0, 1], [[0, -1], [-2, 1]], "slot 0 of rank 1 holds expert -2 of 2"),
        ([0, 1], [[0, 1], [-1, -1]], r"expert 1 has its home on rank 1, whose slots are \[-1, -1\]"),
        ([0, 1], [[0, -1, 0], [1, -1, -1]], r"rank 0 holds a guest of its own expert 0: slots \[0, -1, 0\]"),
        ([0, 1], [[0, 1, 1], [1, -1, -1]], r"rank 0 holds expert 1 twice: slots \[0, 1, 1\]"),
    ],
)
def test_a_placement_that_breaks_a_rule(home: list, table: list, message: str) -> None:
    with pytest.raises(AssertionError, match=f"^{message}$"):
        assert_valid(_unchecked(home, table))


def test_more_guests_than_slots() -> None:
    placement = Placement(home=np.array([0, 0, 1, 1]), table=np.array([[0, 1, 3, 2], [2, 3, 0, -1]]))
    assert_valid(placement, num_slots=2)
    with pytest.raises(AssertionError, match=r"^rank 0 hosts 2 guests, num_slots=1: slots \[0, 1, 3, 2\]$"):
        assert_valid(placement, num_slots=1)


def test_homes_do_not_count_as_guests() -> None:
    assert_valid(Placement(home=np.array([0, 0, 0, 0]), table=np.array([[0, 1, 2, 3], [2, -1, -1, -1]])), num_slots=1)


def test_stale_holders() -> None:
    placement = _placement()
    placement.__dict__["holders"] = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], dtype=bool)
    with pytest.raises(AssertionError, match=r"^holders\[0, 1\] is False, but rank 1 has slots \[2, 3, 0\]$"):
        assert_valid(placement)


def test_stale_guests() -> None:
    placement = _placement()
    placement.__dict__["guests"] = ((0, 1, 1),)
    with pytest.raises(AssertionError, match=r"^guests are \(\(0, 1, 1\),\), the table says \(\(0, 1, 2\),\)$"):
        assert_valid(placement)


# quotas


@pytest.mark.parametrize(
    ("quotas", "message"),
    [
        (_quotas(rank=RANK[:4]), r"shapes \(5,\), \(4,\) and \(2, 5\), expected \[C\], \[C\] and \[N, C\]"),
        (_quotas(tokens=TOKENS[0]), r"shapes \(5,\), \(5,\) and \(5,\), expected"),
        (_quotas(tokens=[row[:4] for row in TOKENS]), r"shapes \(5,\), \(5,\) and \(2, 4\), expected"),
        (_quotas(expert=np.array(EXPERT, dtype=float)), "quotas.expert must be integers, got dtype float64"),
        (_quotas(rank=np.array(RANK, dtype=bool)), "quotas.rank must be integers, got dtype bool"),
        (_quotas(tokens=np.array(TOKENS, dtype=float)), "quotas.tokens must be integers, got dtype float64"),
        (_quotas(expert=[0, 0, 1, 2, 4]), "column 4 names expert 4 and rank 1: there are 4 and 2"),
        (_quotas(expert=[-1, 0, 1, 2, 3]), "column 0 names expert -1 and rank 0: there are 4 and 2"),
        (_quotas(rank=[0, 2, 0, 1, 1]), "column 1 names expert 0 and rank 2: there are 4 and 2"),
        (_quotas(rank=[0, 1, 0, 1, -1]), "column 4 names expert 3 and rank -1: there are 4 and 2"),
        (_quotas(rank=[0, 1, 1, 1, 1]), r"column 2 names rank 1 for expert 1, which is held by \[0\]"),
        (_quotas(rank=[1, 0, 0, 1, 1]), r"ordered by expert, then rank: 0 is \(0, 1\), 1 is \(0, 0\)"),
        (_quotas([0, 0, 2, 1, 3], [0, 1, 1, 0, 1]), r"ordered by expert, then rank: 2 is \(2, 1\), 3 is \(1, 0\)"),
        (_quotas([0, 0, 1, 1, 3], [0, 1, 0, 0, 1]), r"ordered by expert, then rank: 2 is \(1, 0\), 3 is \(1, 0\)"),
        (_quotas(EXPERT[:4], RANK[:4], [row[:4] for row in TOKENS]), "no column for expert 3 on rank 1, which holds"),
        (_quotas(tokens=[[10, -1, 2, 3, 4], TOKENS[1]]), "source 0 sends -1 tokens of expert 0 to rank 1"),
        (_quotas(tokens=[TOKENS[0], [1, 3, 6, 7, 8]]), "source 1 has 5 tokens for expert 0, its quotas sum to 4"),
        (_quotas(tokens=[[9, 0, 2, 3, 5], TOKENS[1]]), "source 0 has 4 tokens for expert 3, its quotas sum to 5"),
        # the sums over sources are right, the sources' own are not
        (_quotas(tokens=[[8, 0, 2, 3, 4], [2, 4, 6, 7, 8]]), "source 0 has 9 tokens for expert 0, its quotas sum to 8"),
        (_quotas(tokens=TOKENS[:1]), r"load has shape \(2, 4\), the quotas are for \(1, 4\)"),
    ],
)
def test_quotas_that_break_a_rule(quotas: Quotas, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_valid(_placement(), quotas, load=LOAD)


def test_without_the_load_sums_are_not_known() -> None:
    assert_valid(_placement(), _quotas(tokens=np.zeros((2, 5), dtype=int)))


def test_a_load_needs_quotas() -> None:
    with pytest.raises(ValueError, match="quotas=None"):
        assert_valid(_placement(), load=LOAD)


def test_narrow_tokens_do_not_wrap() -> None:
    tokens = np.array([[200, 200, 0, 0, 0]], dtype=np.uint8)
    assert_valid(_placement(), _quotas(tokens=tokens), load=np.array([[400, 0, 0, 0]]))


# any plan


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Arguments of one `assert_valid`."""

    placement: Placement
    quotas: Quotas
    load: np.ndarray
    num_slots: int


@st.composite
def _plans(draw: st.DrawFn) -> Plan:
    """Any homes, slots and guests; every source's tokens thrown at random holders."""
    num_ranks, num_experts = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    num_sources, num_slots = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    home = rng.integers(0, num_ranks, num_experts)
    table = []
    for r in range(num_ranks):
        guests = [e for e in rng.permutation(num_experts).tolist() if home[e] != r]
        held = np.flatnonzero(home == r).tolist() + guests[: rng.integers(0, num_slots + 1)]
        table.append(rng.permutation(held + [-1] * (num_experts + 1 - len(held))).tolist())
    load = rng.integers(0, 20, (num_sources, num_experts))
    columns = [(e, r) for e in range(num_experts) for r in range(num_ranks) if e in table[r]]
    tokens = np.zeros((num_sources, len(columns)), dtype=np.int64)
    for e in range(num_experts):
        own = [c for c, (expert, _) in enumerate(columns) if expert == e]
        tokens[:, own] = rng.multinomial(load[:, e], [1 / len(own)] * len(own))
    expert, rank = np.array(columns).T
    return Plan(Placement(home=home, table=np.array(table)), Quotas(expert, rank, tokens), load, num_slots)


@PROPERTY
@given(_plans())
def test_random_valid_plans_pass(plan: Plan) -> None:
    assert_valid(plan.placement, plan.quotas, load=plan.load, num_slots=plan.num_slots)
    assert_valid(plan.placement, plan.quotas, load=plan.load)


@PROPERTY
@given(_plans(), st.data())
def test_one_wrong_token_is_found(plan: Plan, data: st.DataObject) -> None:
    tokens = plan.quotas.tokens.copy()
    n, c = (data.draw(st.integers(0, size - 1)) for size in tokens.shape)
    tokens[n, c] += data.draw(st.sampled_from([-1, 1]))
    with pytest.raises(AssertionError, match=f"source {n} "):
        assert_valid(plan.placement, dataclasses.replace(plan.quotas, tokens=tokens), load=plan.load)


@PROPERTY
@given(_plans(), st.data())
def test_one_wrong_slot_is_found(plan: Plan, data: st.DataObject) -> None:
    """An expert that appears, vanishes or changes: the quotas' columns no longer fit, if no rule broke before."""
    table = plan.placement.table.copy()
    rank, slot = (data.draw(st.integers(0, size - 1)) for size in table.shape)
    others = [e for e in range(-1, plan.placement.num_experts) if e != table[rank, slot]]
    table[rank, slot] = data.draw(st.sampled_from(others))
    with pytest.raises(AssertionError):
        assert_valid(_unchecked(plan.placement.home.tolist(), table.tolist()), plan.quotas, load=plan.load)


# fingerprint


@PROPERTY
@given(_plans(), st.data())
def test_any_other_value_is_another_fingerprint(plan: Plan, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["home", "table", "expert", "rank", "tokens"]))
    part = "placement" if name in ("home", "table") else "quotas"
    array = getattr(getattr(plan, part), name).copy()
    array[tuple(data.draw(st.integers(0, size - 1)) for size in array.shape)] += 1
    placement, quotas = plan.placement, plan.quotas
    if part == "quotas":
        quotas = dataclasses.replace(quotas, **{name: array})
    else:
        placement = _unchecked(**({"home": placement.home, "table": placement.table} | {name: array}))
    assert fingerprint(placement, quotas) != fingerprint(plan.placement, plan.quotas)


@pytest.mark.parametrize("dtype", ["i4", "u2", "u8", ">i8", "i1"])
def test_width_byte_order_and_memory_layout_do_not_matter(dtype: str) -> None:
    placement = _placement()
    table = np.asfortranarray(placement.table.astype("i2"))
    other = Placement(home=placement.home.astype(dtype), table=table)
    quotas = Quotas(*(np.array(x).astype(dtype, order="F") for x in (EXPERT, RANK, TOKENS)))
    assert fingerprint(other, quotas) == fingerprint(placement, _quotas())


def test_no_quotas_are_not_empty_quotas() -> None:
    empty = Quotas(*(np.zeros(shape, dtype=int) for shape in (0, 0, (2, 0))))
    assert len({fingerprint(_placement()), fingerprint(_placement(), empty), fingerprint(_placement(), _quotas())}) == 3


def test_shape_counts() -> None:
    two, three = ([[0, 1], [-1, -1], [-1, -1]], [[0, 1, -1], [-1, -1, -1]])  # the same bytes
    assert fingerprint(_unchecked([0, 0], two)) != fingerprint(_unchecked([0, 0], three))


def test_the_fingerprint_is_the_same_everywhere_and_fits_int64() -> None:
    # literals from the documented bytes, packed by hand: another Python, numpy or machine must get the same
    assert fingerprint(_placement()) == -5153952438187840267
    assert fingerprint(_placement(), _quotas()) == 5103116855920014787
    assert all(-(2**63) <= fingerprint(_placement(), _quotas(tokens=np.full((2, 5), k))) < 2**63 for k in range(64))


def test_fractions_have_no_fingerprint() -> None:
    with pytest.raises(TypeError, match="float64"):
        fingerprint(_placement(), _quotas(tokens=np.array(TOKENS) / 2))
