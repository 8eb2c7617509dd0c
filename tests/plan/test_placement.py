"""Worlds, measured speeds and placements against tables worked out by hand.

Oracle: what a reader of the docstrings would write down. If ranks of one machine were taken apart, a damaged file of
speeds were used, a slot were given twice or a home moved, these fail.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_hecate.plan import CPU, H100, Link, Placement, Speeds, World

pytestmark = pytest.mark.fast

# Three ranks, homes 0 / 3 / 1, as when homes have moved
UNEVEN_HOME = [1, 1, 2, 1]
UNEVEN_TABLE = [[-1, -1, -1, -1], [0, 1, 3, -1], [2, -1, -1, -1]]


def _uneven() -> Placement:
    return Placement(home=np.array(UNEVEN_HOME), table=np.array(UNEVEN_TABLE))


# world


@pytest.mark.parametrize(
    ("names", "node"),
    [
        (["a"] * 4 + ["b"] * 4, (0, 0, 0, 0, 1, 1, 1, 1)),
        (["b", "a", "b"], (0, 1, 0)),
        (["x"], (0,)),
    ],
)
def test_ranks_of_one_machine_share_a_node(names: list[str], node: tuple[int, ...]) -> None:
    world = World.from_names(names)
    assert world.node == node
    assert world.num_ranks == len(node)


def test_a_world_has_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match=r"node=\(\)"):
        World.from_names([])


def test_a_world_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        World((0, 0)).node = (0, 1)


# speeds


def test_a_world_is_an_h100s_unless_told_otherwise() -> None:
    assert World(node=(0, 0)).speeds == H100
    assert World.from_names(["a", "b"], CPU).speeds == CPU


def test_ranks_in_the_order_of_their_nodes() -> None:
    world = World(node=(7, -2, 7, 0, -2))
    assert world.num_nodes == 3
    assert world.node_index.tolist() == [2, 0, 2, 1, 0]


@pytest.mark.parametrize(
    ("bandwidth", "latency", "message"),
    [
        (0.0, 0.0, "bandwidth=0.0 bytes/s must be finite, from 1e-09"),
        (-1.0, 0.0, "bandwidth=-1.0 bytes/s"),
        (float("nan"), 0.0, "bandwidth=nan bytes/s"),
        (float("inf"), 0.0, "bandwidth=inf bytes/s"),
        (1.0, -1e-9, "latency=-1e-09 s must be finite, from 0"),
        (1.0, float("nan"), "latency=nan s"),
        (1.0, float("inf"), "latency=inf s"),
    ],
)
def test_links_that_cannot_be(bandwidth: float, latency: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Link(bandwidth=bandwidth, latency=latency)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("flops", 0.0, "flops=0.0 FLOP/s must be finite, from 1e-09"),
        ("flops", -1.0, "flops=-1.0 FLOP/s"),
        ("flops", float("nan"), "flops=nan FLOP/s"),
        ("flops", float("inf"), "flops=inf FLOP/s"),
        ("routing", -1.0, "routing=-1.0 s must be finite, from 0"),
        ("routing", float("nan"), "routing=nan s"),
        ("routing", float("inf"), "routing=inf s"),
        ("memory", 0.0, "memory=0.0 bytes/s must be finite, from 1e-09"),
        ("memory", float("nan"), "memory=nan bytes/s"),
        ("launch", -1.0, "launch=-1.0 s must be finite, from 0"),
        ("contention", -0.1, "contention=-0.1 must be between 0 and 1"),
        ("contention", float("nan"), "contention=nan"),
    ],
)
def test_speeds_that_cannot_be(name: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        dataclasses.replace(H100, **{name: value})


@pytest.mark.parametrize(
    "speeds",
    [
        H100,
        CPU,
        Speeds(Link(1 / 3, 0.0), Link(7e11, 1e-9), flops=1e15 / 7, routing=0.0, contention=0.5),
        dataclasses.replace(CPU, memory=1e12 / 7, launch=1e-3 / 7),
    ],
)
def test_speeds_come_back_from_their_file(speeds: Speeds, tmp_path: Path) -> None:
    file = tmp_path / "speeds.json"
    speeds.save(file, origin="two ranks of a test")
    assert Speeds.load(file) == Speeds.load(str(file)) == speeds
    text = json.loads(file.read_text())
    assert text["origin"] == "two ranks of a test"
    units = dict(unit.split(": ") for unit in text["units"].split(", "))
    assert {*units} == {"bandwidth", "latency", *text} - {"origin", "units", "intra", "inter"}


def test_a_file_that_is_older_than_memory_and_launch_has_those_of_an_h100(tmp_path: Path) -> None:
    file = tmp_path / "speeds.json"
    dataclasses.replace(CPU, memory=5.0, launch=6.0).save(file, origin="a test")
    text = json.loads(file.read_text())
    for names in (("memory",), ("launch",), ("memory", "launch")):
        file.write_text(json.dumps({key: text[key] for key in text if key not in names}))
        given = {name: getattr(H100, name) for name in names}
        assert Speeds.load(file) == dataclasses.replace(
            CPU, **{"memory": 5.0, "launch": 6.0, **given}
        )


GOOD = dict(
    intra=dict(bandwidth=2.0, latency=1.0),
    inter=dict(bandwidth=1.0, latency=3.0),
    flops=5,
    routing=0,
    contention=1,
)


def _without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "JSONDecodeError"),
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("3", "TypeError"),
        ("null", "TypeError"),
        *((json.dumps(_without(name)), f"KeyError: '{name}'") for name in GOOD),
        (json.dumps(GOOD | dict(intra=3)), "TypeError"),
        (json.dumps(GOOD | dict(intra=dict(bandwidth=1.0))), "TypeError.*latency"),
        (
            json.dumps(GOOD | dict(intra=dict(bandwidth=1.0, latency=0.0, width=2))),
            "TypeError.*width",
        ),
        (
            json.dumps(GOOD | dict(inter=dict(bandwidth=0.0, latency=0.0))),
            "ValueError: bandwidth=0.0",
        ),
        (json.dumps(GOOD | dict(inter=dict(bandwidth="fast", latency=0.0))), "TypeError"),
        (json.dumps(GOOD | dict(flops="many")), "ValueError.*many"),
        (json.dumps(GOOD | dict(flops=None)), "TypeError"),
        (json.dumps(GOOD | dict(flops=-5)), "ValueError: flops=-5"),
        (json.dumps(GOOD | dict(routing=float("nan"))), "ValueError: routing=nan"),
        (json.dumps(GOOD | dict(memory=0)), "ValueError: memory=0"),
        (json.dumps(GOOD | dict(launch=None)), "TypeError"),
        (json.dumps(GOOD | dict(launch="soon")), "ValueError.*soon"),
        ("\xff\xfe", "ValueError|Error"),
    ],
)
def test_a_bad_file_of_speeds_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "speeds.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message) as error:
        Speeds.load(file)
    assert str(error.value).startswith(f"{file} does not hold measured speeds (")
    assert str(error.value).endswith(
        "); write it with torchrun ... -m megatron_hecate measure FILE"
    )


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_no_file_of_speeds_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not hold measured speeds") as error:
        Speeds.load(tmp_path / name)
    assert str(error.value).startswith(str(tmp_path / name))


# placement


def test_initial_is_megatrons_partition() -> None:
    placement = Placement.initial(6, 3, num_slots=2)
    assert placement.home.tolist() == [0, 0, 1, 1, 2, 2]
    assert placement.table.tolist() == [[0, 1, -1, -1], [2, 3, -1, -1], [4, 5, -1, -1]]
    assert (placement.num_experts, placement.num_ranks, placement.slots_per_rank) == (6, 3, 4)
    assert placement.holders.astype(int).tolist() == [
        [1, 0, 0],
        [1, 0, 0],
        [0, 1, 0],
        [0, 1, 0],
        [0, 0, 1],
        [0, 0, 1],
    ]
    assert placement.replicas == ()
    assert placement.num_replicas == 0
    assert not placement.is_replica.any()


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_slots"), [(4, 4, 0), (4, 4, 3), (8, 1, 0), (64, 8, 56)]
)
def test_slots_from_none_to_every_expert_elsewhere(
    num_experts: int, num_ranks: int, num_slots: int
) -> None:
    placement = Placement.initial(num_experts, num_ranks, num_slots=num_slots)
    assert placement.table.shape == (num_ranks, num_experts // num_ranks + num_slots)


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_slots", "message"),
    [
        (10, 4, 0, "num_experts=10 is not divisible by 4 ranks; use 8 or 12"),
        (3, 4, 0, "num_experts=3 is not divisible by 4 ranks; use 4"),
        (
            8,
            4,
            7,
            "slots=7 is out of range: a rank that is home to 2 of 8 experts can host 0 to 6 replicas",
        ),
        (
            8,
            4,
            -1,
            "slots=-1 is out of range: a rank that is home to 2 of 8 experts can host 0 to 6 replicas",
        ),
        (
            8,
            1,
            1,
            "slots=1 is out of range: a rank that is home to 8 of 8 experts can host 0 to 0 replicas",
        ),
    ],
)
def test_impossible_partitions_say_what_is_possible(
    num_experts: int, num_ranks: int, num_slots: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Placement.initial(num_experts, num_ranks, num_slots=num_slots)


def test_replicas_take_the_lowest_free_slot_in_the_given_order() -> None:
    placement = Placement.initial(6, 3, num_slots=2).with_replicas([(5, 0), (0, 2), (3, 0), (0, 1)])
    assert placement.table.tolist() == [[0, 1, 5, 3], [2, 3, 0, -1], [4, 5, 0, -1]]
    assert placement.replicas == (
        (0, 1, 2),
        (0, 2, 2),
        (3, 0, 3),
        (5, 0, 2),
    )  # by expert, then rank
    assert placement.num_replicas == 4
    assert placement.is_replica.astype(int).tolist() == [[0, 0, 1, 1], [0, 0, 1, 0], [0, 0, 1, 0]]
    assert placement.holders.astype(int).tolist() == [
        [1, 1, 1],
        [1, 0, 0],
        [0, 1, 0],
        [1, 1, 0],
        [0, 0, 1],
        [1, 0, 1],
    ]


def test_with_replicas_replaces_the_replicas_and_leaves_the_original() -> None:
    bare = Placement.initial(4, 2, num_slots=1)
    first = bare.with_replicas([(0, 1), (3, 0)])
    second = first.with_replicas([(1, 1)])
    assert bare.table.tolist() == [[0, 1, -1], [2, 3, -1]]
    assert first.table.tolist() == [[0, 1, 3], [2, 3, 0]]
    assert second.table.tolist() == [[0, 1, -1], [2, 3, 1]]
    assert second.with_replicas(()).table.tolist() == bare.table.tolist()
    assert [p.home.tolist() for p in (bare, first, second)] == [[0, 0, 1, 1]] * 3


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ([(0, 1), (1, 1)], r"no slot left on rank 1 for a replica of expert 1: \[2, 3, 0\]"),
        ([(2, 1)], r"rank 1 holds an expert twice: slots \[2, 3, 2\]"),  # its own expert
        ([(9, 1)], r"no expert 9 or no rank 1: there are 4 and 2"),
        (
            [(-1, 1)],
            r"no expert -1 or no rank 1: there are 4 and 2",
        ),  # -1 means an empty slot in the table
        ([(0, 2)], r"no expert 0 or no rank 2: there are 4 and 2"),
        ([(0, -1)], r"no expert 0 or no rank -1: there are 4 and 2"),
    ],
)
def test_replicas_that_cannot_be_placed(replicas: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement.initial(4, 2, num_slots=1).with_replicas(replicas)


def test_a_replica_twice_on_one_rank() -> None:
    with pytest.raises(ValueError, match=r"rank 1 holds an expert twice: slots \[2, 3, 0, 0\]"):
        Placement.initial(4, 2, num_slots=2).with_replicas([(0, 1), (0, 1)])


def test_without_slots_there_are_no_replicas() -> None:
    with pytest.raises(
        ValueError, match=r"no slot left on rank 1 for a replica of expert 0: \[2, 3\]"
    ):
        Placement.initial(4, 2, num_slots=0).with_replicas([(0, 1)])


def test_homes_may_be_uneven() -> None:
    placement = _uneven().with_replicas([(2, 0), (0, 2), (0, 0), (2, 1)])
    assert placement.table.tolist() == [[2, 0, -1, -1], [0, 1, 3, 2], [2, 0, -1, -1]]
    assert placement.home.tolist() == UNEVEN_HOME
    assert placement.replicas == ((0, 0, 1), (0, 2, 1), (2, 0, 0), (2, 1, 3))
    assert placement.is_replica.astype(int).tolist() == [[1, 1, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]]
    assert placement.with_replicas(()).table.tolist() == UNEVEN_TABLE


def test_a_replica_slot_may_lie_below_a_home_slot() -> None:
    placement = Placement(home=np.array([0, 1]), table=np.array([[1, 0], [-1, 1]]))
    assert placement.replicas == ((1, 0, 0),)
    assert placement.with_replicas([(0, 1)]).table.tolist() == [[-1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("home", "table", "message"),
    [
        ([0, 0], [[0], [1]], r"expert 1 has its home on rank 0, whose slots are \[0\]"),
        ([0, 1], [[0, 0], [1, -1]], r"rank 0 holds an expert twice: slots \[0, 0\]"),
        (
            [0, 1],
            [[0, -1], [-1, -1]],
            r"expert 1 has its home on rank 1, whose slots are \[-1, -1\]",
        ),
        ([0, 2], [[0], [1]], r"home must name ranks 0 to 1, got \[0, 2\]"),
        ([0, -1], [[0], [1]], r"home must name ranks 0 to 1, got \[0, -1\]"),
        (
            [0, 1],
            [[0, 2], [1, -1]],
            r"table must name experts 0 to 1 or -1, got \[\[0, 2\], \[1, -1\]\]",
        ),
        (
            [0, 1],
            [[0, -2], [1, -1]],
            r"table must name experts 0 to 1 or -1, got \[\[0, -2\], \[1, -1\]\]",
        ),
    ],
)
def test_tables_that_contradict_the_homes(
    home: list[int], table: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(home=np.array(home), table=np.array(table))


def test_a_placement_is_immutable() -> None:
    placement = Placement.initial(4, 2, num_slots=1).with_replicas([(0, 1)])
    with pytest.raises(dataclasses.FrozenInstanceError):
        placement.home = np.zeros(4, dtype=int)
    for array in (placement.home, placement.table, placement.holders, placement.is_replica):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
