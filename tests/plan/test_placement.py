"""Worlds, measured speeds and placements against tables worked out by hand.

Oracle: what a reader of the docstrings would write down; of the checker, placements that are wrong in one known way. If
ranks of one machine were taken apart, a damaged file of speeds were used, a slot were given twice or a home moved, these
fail.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_hecate.plan import CPU, H100, Link, Placement, Speeds, World

pytestmark = pytest.mark.fast
INF, NAN = float("inf"), float("nan")


def test_ranks_of_one_machine_share_a_node() -> None:
    assert World.from_names(["a"] * 4 + ["b"] * 4).node == (0, 0, 0, 0, 1, 1, 1, 1)
    assert World.from_names(["b", "a", "b"]).node == (0, 1, 0)
    assert World.from_names(["x"], CPU).speeds == CPU and World((0, 0)).speeds == H100
    scattered = World(node=(7, -2, 7, 0, -2))
    assert scattered.num_nodes == 3 and scattered.node_index.tolist() == [2, 0, 2, 1, 0]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("bandwidth", (0.0, -1.0, NAN, INF), "{} bytes/s must be finite, from 1e-09"),
        ("latency", (-1e-9, NAN, INF), "{} s must be finite, from 0"),
        ("flops", (0.0, -1.0, NAN, INF), "{} FLOP/s must be finite, from 1e-09"),
        ("routing", (-1.0, NAN, INF), "{} s must be finite, from 0"),
        ("memory", (0.0, NAN), "{} bytes/s must be finite, from 1e-09"),
        ("launch", (-1.0,), "{} s must be finite, from 0"),
        ("contention", (-0.1, NAN), "{} must be between 0 and 1"),
    ],
)
def test_speeds_that_cannot_be(name: str, values: tuple[float, ...], message: str) -> None:
    of = Link(1.0, 1.0) if name in ("bandwidth", "latency") else H100
    for value in values:
        with pytest.raises(ValueError, match=f"^{name}={message.format(value)}"):
            dataclasses.replace(of, **{name: value})


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
    """A file that is older than memory and launch has those of an H100."""
    file = tmp_path / "speeds.json"
    speeds.save(file, origin="two ranks of a test")
    assert Speeds.load(file) == Speeds.load(str(file)) == speeds
    text = json.loads(file.read_text())
    assert text["origin"] == "two ranks of a test"
    file.write_text(json.dumps({key: text[key] for key in text if key != "memory"}))
    assert Speeds.load(file) == dataclasses.replace(speeds, memory=H100.memory)


GOOD = dict(
    intra=dict(bandwidth=2.0, latency=1.0),
    inter=dict(bandwidth=1.0, latency=3.0),
    flops=5,
    routing=0,
    contention=1,
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("null", "TypeError"),
        (json.dumps(GOOD | dict(intra=dict(bandwidth=1.0))), "TypeError.*latency"),
        (json.dumps(GOOD | dict(inter=dict(bandwidth=0.0, latency=0.0))), "bandwidth=0.0"),
        (json.dumps(GOOD | dict(flops="many")), "TypeError"),
        (json.dumps(GOOD | dict(routing=NAN)), "ValueError: routing=nan"),
        (json.dumps(GOOD | dict(launch=None)), "TypeError"),
        *((json.dumps({k: GOOD[k] for k in GOOD if k != name}), f"'{name}'") for name in GOOD),
        ("\xff\xfe", "ValueError|Error"),
        (None, "FileNotFoundError"),
    ],
)  # fmt: skip
def test_a_bad_file_of_speeds_is_named(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "speeds.json"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message) as error:
        Speeds.load(file)
    assert str(error.value).startswith(f"{file} does not hold measured speeds (")
    assert str(error.value).endswith(
        "); write it with torchrun ... -m megatron_hecate measure FILE"
    )


def test_initial_is_megatrons_partition() -> None:
    placement = Placement.initial(6, 3, num_slots=2)
    assert placement.home.tolist() == [0, 0, 1, 1, 2, 2]
    assert placement.table.tolist() == [[0, 1, -1, -1], [2, 3, -1, -1], [4, 5, -1, -1]]
    assert (placement.num_experts, placement.num_ranks, placement.slots_per_rank) == (6, 3, 4)
    assert placement.num_replicas == 0 and not placement.is_replica.any()
    for num_experts, num_ranks, num_slots in ((4, 4, 0), (4, 4, 3), (8, 1, 0), (64, 8, 56)):
        table = Placement.initial(num_experts, num_ranks, num_slots=num_slots).table
        assert table.shape == (num_ranks, num_experts // num_ranks + num_slots)


@pytest.mark.parametrize(
    ("experts", "ranks", "slots", "message"),
    [
        (10, 4, 0, "num_experts=10 is not divisible by 4 ranks; use 8 or 12"),
        (3, 4, 0, "num_experts=3 is not divisible by 4 ranks; use 4"),
        (8, 4, 7, "slots=7 is out of range: a rank that is home to 2 of 8 experts can host 0 to 6 replicas"),
        (8, 4, -1, "slots=-1 is out of range: a rank that is home to 2 of 8 experts can host 0 to 6 replicas"),
        (8, 1, 1, "slots=1 is out of range: a rank that is home to 8 of 8 experts can host 0 to 0 replicas"),
    ],
)  # fmt: skip
def test_impossible_partitions_say_what_is_possible(
    experts: int, ranks: int, slots: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Placement.initial(experts, ranks, num_slots=slots)


def test_replicas_take_the_lowest_free_slot_in_the_given_order() -> None:
    placement = Placement.initial(6, 3, num_slots=2).with_replicas([(5, 0), (0, 2), (3, 0), (0, 1)])
    assert placement.table.tolist() == [[0, 1, 5, 3], [2, 3, 0, -1], [4, 5, 0, -1]]
    assert placement.num_replicas == 4
    assert placement.is_replica.astype(int).tolist() == [[0, 0, 1, 1], [0, 0, 1, 0], [0, 0, 1, 0]]
    holders = [[1, 1, 1], [1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1], [1, 0, 1]]
    assert placement.holders.astype(int).tolist() == holders
    # other replicas replace these, and the original stays
    other = placement.with_replicas([(1, 1)])
    assert other.table.tolist() == [[0, 1, -1, -1], [2, 3, 1, -1], [4, 5, -1, -1]]
    assert placement.num_replicas == 4
    for array in (placement.home, placement.table, placement.holders, placement.is_replica):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_homes_may_be_uneven() -> None:
    """Three ranks, homes 0 / 3 / 1, as when homes have moved; and a replica's slot below a home's."""
    home, table = [1, 1, 2, 1], [[-1, -1, -1, -1], [0, 1, 3, -1], [2, -1, -1, -1]]
    moved = Placement(home=np.array(home), table=np.array(table))
    placement = moved.with_replicas([(2, 0), (0, 2), (0, 0), (2, 1)])
    assert placement.table.tolist() == [[2, 0, -1, -1], [0, 1, 3, 2], [2, 0, -1, -1]]
    assert placement.is_replica.tolist() == [
        [True, True, False, False],
        [False] * 3 + [True],
        [False, True, False, False],
    ]
    assert placement.with_replicas(()).table.tolist() == table
    below = Placement(home=np.array([0, 1]), table=np.array([[1, 0], [-1, 1]]))
    assert below.is_replica.tolist() == [[True, False], [False, False]]
    assert below.with_replicas([(0, 1)]).table.tolist() == [[-1, 0], [0, 1]]
