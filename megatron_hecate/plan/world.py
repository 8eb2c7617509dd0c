"""The machine as planning sees it: where ranks sit, what links and cores do per second.

Speeds are an H100 node's unless said otherwise; ``python -m megatron_hecate --measure FILE`` writes measured ones.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class Link:
    """What one rank can send, and at the same time receive.

    Args:
        bandwidth: bytes/s in each direction, more than 0.
        latency: seconds from posting a message to its first byte, 0 or more.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ValueError(f"bandwidth={self.bandwidth} bytes/s must be finite and more than 0")
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"latency={self.latency} s must be finite and 0 or more")

    def seconds(self, num_bytes: float) -> float:
        """How long one message of ``num_bytes`` takes; nothing is not sent."""
        return num_bytes / self.bandwidth + self.latency if num_bytes else 0.0


@dataclasses.dataclass(frozen=True)
class Speeds:
    """What links and cores do.

    Args:
        intra: the link between ranks of one node.
        inter: a rank's share of its node's network.
        flops: FLOP/s one rank reaches in expert GEMMs.
        routing: seconds that routing to replicas adds to one microbatch of a layer, whatever it wins: the exchange of
            loads, quotas, more physical experts.
        contention: what a copy takes from the compute it hides behind, as a part of the time it lasts: 0 with copy
            engines, 1 where cores do both.

    Raises:
        ValueError: when a rank computes nothing, routing takes negative time, or contention is not between 0 and 1.
    """

    intra: Link
    inter: Link
    flops: float
    routing: float
    contention: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.flops) and self.flops > 0):
            raise ValueError(f"flops={self.flops} FLOP/s must be finite and more than 0")
        if not (math.isfinite(self.routing) and self.routing >= 0):
            raise ValueError(f"routing={self.routing} s must be finite and 0 or more")
        if not 0 <= self.contention <= 1:
            raise ValueError(f"contention={self.contention} must be between 0 and 1")

    @classmethod
    def load(cls, path: Path | str) -> Speeds:
        """Read a file that `save` wrote.

        Raises:
            ValueError: for a file that is no such file, naming it and what is wrong.
        """
        try:
            values = json.loads(Path(path).read_text())
            return cls(
                intra=Link(**values["intra"]),
                inter=Link(**values["inter"]),
                flops=float(values["flops"]),
                routing=float(values["routing"]),
                contention=float(values["contention"]),
            )
        except (OSError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{path} does not hold measured speeds ({type(error).__name__}: {error}); write it with "
                "torchrun ... -m megatron_hecate --measure FILE"
            ) from error

    def save(self, path: Path | str, *, origin: str) -> None:
        """Write JSON; ``origin`` says what was measured, where and how."""
        units = "bandwidth: bytes/s, latency: s, flops: FLOP/s, routing: s, contention: 1"
        text = json.dumps(dict(origin=origin, units=units, **dataclasses.asdict(self)), indent=2)
        Path(path).write_text(text + "\n")


H100 = Speeds(
    # NVLink 4 does 900 GB/s both ways (H100 SXM datasheet); NCCL reaches 460-480 GB/s bus bandwidth on 8 GPUs, so 80 %
    # of one way is a cautious point-to-point rate. Latency: that of one small NCCL kernel.
    intra=Link(bandwidth=0.8 * 450e9, latency=5e-6),
    # One ConnectX-7 of 400 Gbit/s per rank (DGX H100), 90 % of it; latency as above plus the fabric's.
    inter=Link(bandwidth=0.9 * 50e9, latency=10e-6),
    # 989 TFLOP/s dense bf16 (datasheet), of which grouped expert GEMMs reach 42 % (Qwen3-30B-A3B) to 60 %
    # (DeepSeek-V3), forward and backward, measured on an H200 (docs/gpu-results.md).
    flops=0.45 * 989e12,
    # On an H200 (docs/gpu-results.md): 14 us to count, 20 (8 ranks) to 120 (64 ranks) for quotas, 13 to reroute and 18
    # in its backward. Estimates: 30 for the all-gather of loads, 40 for more physical experts in the grouped GEMMs.
    routing=0.15e-3,
    # GEMMs on an H200 took 1.4 % longer beside a fetch of 16 blocks, 10 % beside a return of 32; NCCL is not measured.
    contention=0.12,
)
# Two CPU ranks of one thread each under gloo, fp32, as `--measure` found them on the machine of docs/results.md.
CPU = Speeds(
    intra=Link(bandwidth=0.9e9, latency=350e-6),
    inter=Link(bandwidth=0.9e9, latency=350e-6),
    flops=90e9,
    routing=0.5e-3,
    contention=1.0,
)


@dataclasses.dataclass(frozen=True)
class World:
    """The ranks of one FSSDP group, the node each of them runs on, and how fast they are.

    Args:
        node: [R] node index of each rank; ranks of one node share a fast link. Any integers, any order; nodes may hold
            different numbers of ranks.
        speeds: of links and cores.

    Raises:
        ValueError: if there is no rank.
    """

    node: tuple[int, ...]
    speeds: Speeds = H100

    def __post_init__(self) -> None:
        if not self.node:
            raise ValueError("an FSSDP group needs at least one rank, got node=()")

    @classmethod
    def from_names(cls, names: Sequence[str], speeds: Speeds = H100) -> World:
        """[R] the name of the machine each rank runs on."""
        order = list(dict.fromkeys(names))
        return cls(node=tuple(order.index(name) for name in names), speeds=speeds)

    @property
    def num_ranks(self) -> int:
        return len(self.node)

    @property
    def num_nodes(self) -> int:
        return len(set(self.node))

    @property
    def slowest_link(self) -> Link:
        """Between nodes, if there are several."""
        return self.speeds.inter if self.num_nodes > 1 else self.speeds.intra

    @cached_property
    def node_index(self) -> np.ndarray:
        """[R] the nodes, numbered from 0."""
        return np.unique(self.node, return_inverse=True)[1].astype(np.int64)
