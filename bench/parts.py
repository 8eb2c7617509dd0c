"""Compare single kernels, as `offline/presets.py` predicts them, with published measurements."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from loads import DATA
from rivals.report import Row

from megatron_hecate.offline.presets import CLUSTERS, Cluster, Model
from megatron_hecate.offline.step_model import Work
from megatron_hecate.plan import World

PUBLISHED: dict = json.loads((DATA / "published" / "parts.json").read_text())
BANDWIDTH_FROM: int = (
    512 << 20
)  # bytes of the all-to-all that the presets' bandwidth inside nodes was read from
TOP_K: int = 8  # of all measured dispatches
FP8: float = 1 + 4 / 128  # bytes per element with a scale for every 128


def trip(cluster: Cluster, ranks: int, pairs: float, token_bytes: float, *, once: int = 0) -> float:
    """Seconds of one all-to-all in which every rank sends ``pairs``, balanced."""
    world = World(tuple(rank // cluster.per_node for rank in range(ranks)), cluster.speeds)
    shape = dataclasses.replace(Model.named("olmoe").shape(), token_bytes=token_bytes)
    return float(Work.balanced(pairs, world, shape, once=once).trip[0, 0])


def rows() -> Iterator[Row]:
    """A row per measurement; ``off``: predicted over published, less 1."""
    for cluster, ranks, size, ms in PUBLISHED["all_to_all"]["rows"]:
        use = "fitted" if size == BANDWIDTH_FROM else "held back"
        what = f"all-to-all of {size >> 20} MiB, bus GB/s"
        moved = size * (ranks - 1) / ranks / 1e9
        seconds = trip(CLUSTERS[cluster], ranks, 1, size)
        yield _row("NCCL", what, cluster, ranks, moved / ms * 1e3, moved / seconds, use)
    for source, part in (("DeepEP V1", "deepep"), ("DeepSeek-V3's trace", "trace")):
        for kernel, ranks, hidden, tokens, ms in PUBLISHED[part]["rows"]:
            size = hidden * (FP8 if kernel == "dispatch" else 2)
            seconds = trip(CLUSTERS["h100x8"], ranks, tokens * TOP_K, size, once=TOP_K)
            what = f"{kernel} of {tokens} x {hidden}, ms"
            yield _row(source, what, "h100x8", ranks, ms, seconds * 1e3, "held back")
    for model, ep, tflops in PUBLISHED["experts"]["rows"]:
        predicted = CLUSTERS["h100x8"].speeds.flops / 1e12
        yield _row(
            "experts' GEMMs", f"{model}, TFLOP/s", "h100x8", ep, tflops, predicted, "held back"
        )


def _row(
    source: str, what: str, cluster: str, ranks: int, published: float, predicted: float, use: str
) -> Row:
    numbers = dict(
        ranks=ranks, published=published, predicted=predicted, off=predicted / published - 1
    )
    return dict(source=source, what=what, cluster=cluster, use=use) | numbers
