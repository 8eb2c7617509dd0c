"""Sizes of layers, and speeds of one rank: of a node of H100, and of a rank of a shared GPU."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from parts import PUBLISHED  # noqa: E402

from megatron_hecate.config import HecateConfig  # noqa: E402
from megatron_hecate.nvlink import launch  # noqa: E402
from megatron_hecate.plan import H100, Link  # noqa: E402

HEAD: int = 128
# bytes of a parameter: bf16 weight, fp32 gradient, fp32 master weight and two moments
BYTES_OF_TRAINING: int = 18


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a layer. In the search the sizes are arrays.

    Args:
        name: name of the model, see `MODELS`.
        hidden, ffn: sizes of an expert.
        experts, top_k: experts of the layer on all ranks, and experts per token.
        tokens: tokens of a rank and microbatch.
        sequences: sequences that these tokens are.
        heads, kv_heads: heads of attention, `HEAD` wide.
    """

    name: str
    hidden: int
    ffn: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    tokens: int = 4096
    sequences: int = 1

    @property
    def expert(self) -> int:
        """Parameters of an expert, three matrices."""
        return 3 * self.hidden * self.ffn

    @property
    def pairs(self) -> int:
        """(token, expert) pairs that a rank sends, and computes when balanced."""
        return self.tokens * self.top_k

    @property
    def attention_flops(self) -> float:
        """FLOPs of attention, forward and backward, with causal scores."""
        projections = 2 * HEAD * self.hidden * (self.heads + self.kv_heads)
        # Half of all scores: 2 FLOPs instead of 4 in forward, and 2.5 times as many in backward.
        scores = 7.0 * self.tokens / self.sequences * HEAD * self.heads
        return self.tokens * (6.0 * projections + scores)

    @property
    def training_bytes(self) -> int:
        """Bytes of a layer's experts on all ranks, with gradients and Adam, of one model."""
        return BYTES_OF_TRAINING * self.experts * self.expert


# Sequences of 4,096 tokens, as many as keep a GPU busier than its host.
MODELS: Mapping[str, Shape] = {
    "qwen3": Shape(
        name="qwen3",
        hidden=2048,
        ffn=768,
        experts=128,
        top_k=8,
        heads=32,
        kv_heads=4,
        tokens=16384,
        sequences=4,
    ),
    # A rank's part of the 256 experts at EP 64, as in DeepSeek's own training: on 8 ranks, 4
    # experts with the tokens that they get there. 64 plain heads have as many FLOPs as the latent
    # attention, at 4096 tokens.
    "dsv3": Shape(
        name="dsv3",
        hidden=7168,
        ffn=2048,
        experts=32,
        top_k=8,
        heads=64,
        kv_heads=64,
        tokens=8192,
        sequences=2,
    ),
    "mixtral": Shape(
        name="mixtral",
        hidden=4096,
        ffn=14336,
        experts=8,
        top_k=2,
        heads=32,
        kv_heads=8,
        tokens=8192,
        sequences=2,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Speeds of one rank while all ranks do the same.

    Args:
        source: origin of the speeds, for tables.
        ranks: number of ranks.
        experts: FLOP/s of grouped GEMMs with activation, forward and backward, by model.
        dense: FLOP/s of large GEMMs.
        memory: bytes/s read and written.
        fetch: link of a fetch in one direction; every rank sends and receives one replica.
        back: the same for a return of gradients.
        exchange: the buffer of an all-to-all over its seconds, a rank's part for itself included.
        host: seconds of the host, a layer and microbatch.
    """

    source: str
    ranks: int
    experts: Mapping[str, float]
    dense: float
    memory: float
    fetch: Link
    back: Link
    exchange: Link
    # Stock Megatron over TransformerEngine on the H200's machine, 8 experts a rank
    # (docs/gpu-results.md, "Host time over TransformerEngine").
    host: float = 14.9e-3


def h100_node(ranks: int) -> Machine:
    """Return the speeds of ``ranks`` GPUs of a node of 8 H100."""
    return Machine(
        source="one node of H100: data sheets, published measurements",
        ranks=ranks,
        # An H200 has an H100's multiprocessors. TransformerEngine, 16,384 pairs a rank: 1.12, 6.67
        # and 25.7 ms (docs/gpu-results.md, "Grouped GEMMs with replicas"). NVIDIA's inference
        # kernels, forward on H100, have 387, 553 and 797 (`experts` in parts.json).
        experts={"qwen3": 414e12, "dsv3": 649e12, "mixtral": 674e12},
        # 8 GEMMs of 8192^3 in 12.7 ms at the power limit (docs/gpu-results.md, "Overlap").
        dense=692e12,
        # Data sheet: 3.35 TB/s. An H200 reaches 4.3 of its 4.8.
        memory=3.35e12 * 4.3 / 4.8,
        fetch=H100.intra,
        back=H100.intra,
        exchange=_published_exchange(4 if ranks <= 4 else 8),
    )


def _published_exchange(ranks: int) -> Link:
    """Return the line through NCCL's published all-to-alls of 64 and 512 MiB on H100."""
    table = [*PUBLISHED["all_to_all"]["rows"], *PUBLISHED["all_to_all_further"]["rows"]]
    seconds = {row[2]: row[3] / 1e3 for row in table if row[:2] == ["h100x8", ranks]}
    return line(*((mib << 20, seconds[mib << 20]) for mib in (64, 512)))


def line(small: tuple[float, float], large: tuple[float, float]) -> Link:
    """Return the link through two (bytes, seconds); latency is 0 where noise makes it negative."""
    bandwidth = (large[0] - small[0]) / max(large[1] - small[1], 1e-9)
    latency = small[1] - small[0] / bandwidth
    if latency < 0 or large[1] <= small[1]:
        return Link(large[0] / large[1], 0.0)
    return Link(bandwidth, latency)


class ThreadBlocks(NamedTuple):
    """Thread blocks of transfers on a rank of one GPU.

    Args:
        nccl: of Megatron's collectives, ``NCCL_MAX_CTAS``.
        p2p: of replicas by p2p, ``HecateConfig.nccl_ctas``.
        nvlink: of a fetch, and of a return, by nvlink. One block copies 47 GB/s, an eighth of a
            link's rate.
    """

    nccl: int
    p2p: int
    nvlink: int

    @classmethod
    def of(cls, ranks: int) -> ThreadBlocks:
        """Return the blocks of one of ``ranks`` that share a GPU."""
        return cls(*(max(1, blocks // ranks) for blocks in (16, HecateConfig().nccl_ctas, 8)))

    def use(self) -> None:
        """Set the blocks of `nccl`, unless the user has, and `nvlink` in this process.

        Call it before NCCL starts and transports are connected.
        """
        os.environ.setdefault("NCCL_MAX_CTAS", str(self.nccl))
        launch._blocks_on = lambda device: dict.fromkeys(launch.UNDER_WAY, self.nvlink)


def _h200_share(ranks: int, exchange: float) -> Machine:
    """Return the speeds of one of 4 or 8 ranks that share an H200 under MPS."""
    blocks = ThreadBlocks.of(ranks).nvlink
    return Machine(
        source=f"assumed from measurements of one H200 and of its quarters, {ranks} ranks",
        ranks=ranks,
        # 4 ranks together reach 674 TFLOP/s in large GEMMs, a single one 692 at the power limit: a
        # rank is assumed to have its part of the GPU's grouped rate.
        experts={name: rate / ranks for name, rate in H100_NODE.experts.items()},
        # 10 GEMMs of 8192 x 4096 x 4096 on each of 4 ranks in 16.3 ms
        dense=4 * 10 * 2 * 8192 * 4096 * 4096 / 16.3e-3 / ranks,
        memory=4.3e12 / ranks,
        # A block copies 47 GB/s; 8 blocks sum 366 (docs/gpu-results.md, "Rates").
        fetch=Link(blocks * 47e9, H100.intra.latency),
        back=Link(blocks * 366e9 / 8, H100.intra.latency),
        exchange=Link(exchange, 0.0),
    )


H100_NODE: Machine = h100_node(8)
# 64 MiB a rank in 0.83 ms with 4 ranks and NCCL_MAX_CTAS=4
H200_QUARTER: Machine = _h200_share(4, (64 << 20) / 0.83e-3)
# 60 GB/s leave a rank, as of the quarters; 7 of 8 parts of the buffer leave
H200_EIGHTH: Machine = _h200_share(8, 60e9 * 8 / 7)
RECORDED: Mapping[int, Machine] = {4: H200_QUARTER, 8: H200_EIGHTH}
