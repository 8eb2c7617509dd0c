"""Steps of LAER-MoE's artifact, predicted by the model behind ``what-if``."""

from __future__ import annotations

import json

import numpy as np
from loads import DATA

from megatron_hecate.tools.step_model import StepModel
from megatron_hecate.tools.work import Work

PUBLISHED: dict = json.loads((DATA / "published" / "figures.json").read_text())
# FLOP/s outside experts: the share of the peak that `plan.H100` takes for experts
A100_DENSE: float = 0.45 * 312e12
# published systems, and the relative error allowed for a prediction
SYSTEMS = {"FSDP": 0.05, "FLEX": 0.05, "LAER": 0.10}


def laer_row(row: dict, system: str) -> tuple[float, float]:
    """Predict a step of LAER-MoE's artifact.

    Args:
        row: published configuration.
        system: name of the system in `SYSTEMS`.

    Returns:
        Milliseconds of the step without copies, and of all copies with nothing hidden.
    """
    setup = PUBLISHED["laer"]
    kind = row["model"].rpartition("-")[2]
    hidden = row["hidden"]
    ffn = row["ffn"]
    layers = row["layers"]
    peak = _laer_tokens(kind, system).max(axis=2)  # [I, L]
    # In the trace all tokens stay in their node.
    trip = peak * 2 * hidden * 7 / 8 / setup["intra_node_bytes_per_s"]
    tokens = setup["tokens_per_step"] / setup["ranks"] / setup["microbatches"]
    attention = 2 * hidden * 128 * (row["heads"] + row["kv_heads"])
    # profiled seconds per token and parameter of one matrix
    mlp = setup["mlp_ms_per_4096_tokens"] / 4096e3 / (4096 * 14336)
    model = StepModel(
        dense=tokens * (2 * attention + 2 * setup["seq"] * row["heads"] * 128) / A100_DENSE,
        pair=mlp * hidden * ffn,
        head=tokens * 2 * hidden * 32000 / A100_DENSE,
        recompute=True,
        stages=(tuple(layer * peak.shape[1] // layers for layer in range(layers)),),
        microbatches=setup["microbatches"],
    )
    step_seconds = model.step_seconds(Work(peak=peak, trip=trip))
    # bytes of a layer's experts from other nodes
    restored = setup["capacity"][kind] * 3 * hidden * ffn * 2 * 0.75
    # weights for forward and for backward, and gradients
    trips = 3 * layers * setup["microbatches"]
    copies = trips * restored / (setup["inter_node_bytes_per_s"] / 8)
    return float(step_seconds.mean()) * 1e3, copies * 1e3


def _laer_tokens(kind: str, system: str) -> np.ndarray:
    """Read the tokens [I, L, R] of a microbatch.

    The first iteration is left out: no system has a forecast in it.
    """
    with np.load(DATA / "published" / "laer_tokens.npz") as archive:
        return archive[f"{kind}_{system}"][1:].astype(np.float64)


def laer_predictions() -> list[dict]:
    """Predict the milliseconds of each system for every configuration.

    One number per system is fitted, on 8x7b: the share of the copies' time that is exposed.

    Returns:
        Published rows with the prediction, the fitted share and the relative error of each system.
    """
    setup = PUBLISHED["laer"]
    rows = [dict(zip(setup["columns"], row, strict=True)) for row in setup["rows"]]
    for system in SYSTEMS:
        parts = [laer_row(row, system) for row in rows]
        # least squares of: rest + share * copies = measured, all divided by the measured time
        fit = [
            (copies / row[f"{system}_ms"], 1 - rest / row[f"{system}_ms"])
            for row, (rest, copies) in zip(rows, parts, strict=True)
            if row["model"].startswith("mixtral-8x7b")
        ]
        share = sum(x * y for x, y in fit) / sum(x * x for x, _ in fit)
        for row, (rest, copies) in zip(rows, parts, strict=True):
            row[system] = rest + share * copies
            row[f"{system}_exposed"] = share
            row[f"{system}_off"] = row[system] / row[f"{system}_ms"] - 1
    return rows
