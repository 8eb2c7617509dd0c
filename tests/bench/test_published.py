"""Predictions beside published figures: `bench/what_if.py` and `bench/workloads.py`.

Oracles: the published figures, with the tolerance of each; a rival's plans against the same plans made another way.
What misses its tolerance stands in docs/what-if-checks.md and is not tested. No figure was fitted to a held-back row.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from parts import rows
from rivals import find_planners
from rivals.planner import Setting
from rivals.simulated import planned
from what_if import PUBLISHED, SYSTEMS, forced_step, laer_predictions, main
from workloads import NAMES, recount

from megatron_hecate.plan import H100, World
from megatron_hecate.tools.presets import CLUSTERS, MODELS, Model
from megatron_hecate.tools.simulated_job import SimulatedJob
from megatron_hecate.tools.step_model import PipelineSchedule, Timing

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("system", SYSTEMS)
def test_held_back_steps_of_laer(system: str) -> None:
    """Qwen within 5, 5, 10 %; 8x22b too, but for FSDP and FlexMoE, of which some rows miss: none by more than 12 %."""
    rows = [row for row in laer_predictions() if not row["model"].startswith("mixtral-8x7b")]
    assert len(rows) == 16
    for row in rows:
        strict = row["model"].startswith("qwen") or system == "LAER"
        assert abs(row[f"{system}_off"]) < (SYSTEMS[system] if strict else 0.12), row


def test_the_order_of_systems_is_the_measured_one() -> None:
    for row in laer_predictions():
        names = sorted(SYSTEMS)
        assert sorted(names, key=lambda s: row[s]) == sorted(names, key=lambda s: row[f"{s}_ms"]), (
            row
        )


@pytest.mark.parametrize(
    ("name", "cluster"), [("gpt-oss-120b", "h100x8"), ("qwen3-235b-a22b", "gb200x72")]
)
def test_held_back_steps_of_bridge(name: str, cluster: str) -> None:
    """Within 10 %."""
    for row in PUBLISHED["forced_balance"]["rows"]:
        if row[:2] == [name, cluster]:
            _, _, ranks, ep, pp, batch, micro, measured = row
            sizes = dict(ranks=ranks, ep=ep, pp=pp, batch=(batch, micro))
            assert forced_step(Model.named(name), CLUSTERS[cluster], **sizes) == pytest.approx(
                measured, rel=0.1
            )


@pytest.mark.parametrize(("name", "late"), [("hecate", 0), ("hecate-late-priced", 8)])
def test_rivals_and_the_command_simulate_alike(name: str, late: int) -> None:
    """Our planner as one of the rivals, and as ``--what-if`` calls it: the same work in every step and layer. Without
    measured speeds late replicas stay inside nodes, as in training."""
    world = World(node=(0, 0, 0, 0, 1, 1, 1, 1), speeds=H100)
    model = Model.named("qwen3-30b-a3b,experts=16,layers=2")
    share = np.random.default_rng(2).dirichlet(np.full(16, 0.5), size=2)
    counts = np.random.default_rng(3).multinomial(
        200_000, share[None, :, None].repeat(8, axis=2), size=(5, 2, 8)
    )
    counts[-1] = counts[-1, ..., ::-1]  # a jump
    timing = Timing(dense=1e-3, pair=1e-9)
    schedule = PipelineSchedule.even(2, 1, microbatches=1)
    job = SimulatedJob(
        model=model,
        layers=(0, 1),
        counts=counts,
        first=1,
        world=world,
        timing=timing,
        schedule=schedule,
        measured=True,
    )
    setting = Setting(16, world=world, shape=job.shape("iteration"), slots=2)
    placed = job.place(job.homes(2, "iteration", 0)[0], "iteration")
    ours, theirs = job.work(placed, late=late), planned(find_planners()[name], counts, setting)
    assert ours.out.any() and ours.late.any() == (late > 0)
    for field in ("peak", "trip", "fetch", "back", "late", "routing", "computing", "out", "home"):
        assert getattr(ours, field) == pytest.approx(getattr(theirs, field)[1:]), field
    node = np.array(world.node)
    near = dataclasses.replace(job, measured=False).add_late(placed, late)[-1]
    for before, after in zip(placed[-1], near, strict=True):
        expert, rank = np.nonzero(after.holders & ~before.holders)
        assert (node[rank] == node[after.home[expert]]).all() and (late > 0) <= len(rank) <= late
    homes = [[placement.homes_only for placement in step] for step in placed]
    few = dataclasses.replace(
        job, counts=counts // 40
    )  # so few that replicas would not win their price four times
    four = dataclasses.replace(
        few, counts=4 * few.counts, schedule=dataclasses.replace(schedule, microbatches=4)
    )
    once, often = few.add_late(homes, late), four.add_late(homes, late)
    assert [[p.fingerprint for p in step] for step in once] == [
        [p.fingerprint for p in step] for step in often
    ]
    assert any(p.num_replicas for step in once for p in step) == (late > 0)


def test_single_kernels() -> None:
    """No row of these was fitted: large all-to-alls in a node within 16 %; DeepEP's kernels on 4 nodes within 5 %; its
    combine in DeepSeek's own trace on 8 nodes within 5 %. All others within a factor of 2."""
    found = list(rows())
    held = [row for row in found if row["use"] == "held back"]
    assert len(found) - len(held) == 5 and {row["source"] for row in held} >= {
        "NCCL",
        "DeepEP V1",
        "experts' GEMMs",
    }
    for row in held:
        name, what = row["source"], row["what"]
        near = (
            0.16 if "64 MiB" in what else 0.05 if (name, row["ranks"]) == ("DeepEP V1", 32) else 0.6
        )
        near = 0.05 if "trace" in name and "combine" in what else near
        assert abs(row["off"]) < near, row


def test_the_workloads_are_the_published_ones() -> None:
    """14 of the 16 published pairs to the last digit; W3's are stale in its README. Ranks as recounted by others."""
    rows = recount()
    assert [row["workload"] for row in rows if row["same"] != "yes"] == [NAMES[3]] * 2
    for row in rows:
        ranks = PUBLISHED["w0_w7"]["corrected_rank_max_over_mean"][row["size"]]
        assert round(row["rank"], 3) == pytest.approx(
            ranks.get(row["workload"][:2], 1.0), abs=1.1e-3
        )


def test_the_command_prints_its_tables(capsys: pytest.CaptureFixture) -> None:
    main(["--only", "forced,marin"])
    text = capsys.readouterr().out
    assert (
        text.count("held back") == 6
        and text.count("not scored") == 2
        and text.count("| fitted ") == 2
        and "average overload 1.338" in text
    )
    with pytest.raises(SystemExit):
        main(["--only", "force"])
    assert "--only force: there are forced, parts, laer, marin" in capsys.readouterr().err
    assert set(MODELS) >= {row[0] for row in PUBLISHED["forced_balance"]["rows"]}
