"""Compare single kernels, as `tools/presets.py` predicts them, with published measurements."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import numpy as np
from loads import DATA
from rivals.report import Row

from megatron_hecate.plan import World
from megatron_hecate.tools.presets import CLUSTERS, Cluster, Model
from megatron_hecate.tools.work import Group

PUBLISHED: dict = json.loads((DATA / "published" / "parts.json").read_text())
# bytes of the all-to-all to which the presets' bandwidth inside nodes was fitted
BANDWIDTH_FROM: int = 512 << 20
# experts per token in all measured dispatches
TOP_K: int = 8
# bytes per element, with an fp32 scale for every 128 elements
FP8: float = 1 + 4 / 128


def trip(cluster: Cluster, ranks: int, pairs: float, token_bytes: float, *, once: int = 0) -> float:
    """Predict the seconds of one balanced all-to-all in which every rank sends ``pairs``.

    Args:
        cluster: speeds and node size.
        ranks: ranks of the group.
        pairs: (token, expert) pairs sent per rank.
        token_bytes: bytes of a pair.
        once: experts per token if a token is sent once per rank or node, else 0.
    """
    world = World(tuple(rank // cluster.per_node for rank in range(ranks)), cluster.speeds)
    shape = dataclasses.replace(Model.named("olmoe").shape(), token_bytes=token_bytes)
    balanced = np.full((1, 1, ranks), pairs)
    return float(Group(world=world, shape=shape, once=once).work_of_ranks(balanced).trip[0, 0])


def rows() -> Iterator[Row]:
    """Yield one row per measurement; ``off``: predicted over published, less 1."""
    for cluster, ranks, size, ms in PUBLISHED["all_to_all"]["rows"]:
        use = "fitted" if size == BANDWIDTH_FROM else "held back"
        label = f"all-to-all of {size >> 20} MiB, bus GB/s"
        moved = size * (ranks - 1) / ranks / 1e9
        seconds = trip(CLUSTERS[cluster], ranks, 1, size)
        about = dict(source="NCCL", what=label, cluster=cluster, use=use, ranks=ranks)
        yield _row(about, moved / ms * 1e3, moved / seconds)
    on_h100 = dict(cluster="h100x8", use="held back")
    for source, part in (("DeepEP V1", "deepep"), ("DeepSeek-V3's trace", "trace")):
        for kernel, ranks, hidden, tokens, ms in PUBLISHED[part]["rows"]:
            size = hidden * (FP8 if kernel == "dispatch" else 2)
            seconds = trip(CLUSTERS["h100x8"], ranks, tokens * TOP_K, size, once=TOP_K)
            label = f"{kernel} of {tokens} x {hidden}, ms"
            about = dict(source=source, what=label, **on_h100, ranks=ranks)
            yield _row(about, ms, seconds * 1e3)
    for model, ep, tflops in PUBLISHED["experts"]["rows"]:
        predicted = CLUSTERS["h100x8"].speeds.flops / 1e12
        about = dict(source="experts' GEMMs", what=f"{model}, TFLOP/s", **on_h100, ranks=ep)
        yield _row(about, tflops, predicted)


def _row(about: dict[str, str | int], published: float, predicted: float) -> Row:
    numbers = dict(published=published, predicted=predicted, off=predicted / published - 1)
    return about | numbers
