"""Topology and speed of the machine: the node of every rank, links and cores.

Speeds default to an H100 node's; ``megatron-hecate measure FILE`` writes measured ones.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron_hecate import files

# Range of bytes/s and of FLOP/s: sums and quotients are finite.
SPEEDS_RANGE: tuple[float, float] = (1e-9, 1e18)
# Range of latencies and overheads, seconds.
SECONDS_RANGE: tuple[float, float] = (0.0, 1e6)


def _check(name: str, value: float, unit: str, limits: tuple[float, float]) -> None:
    lower, upper = limits
    if not lower <= value <= upper:
        raise ValueError(f"{name}={value} {unit} must be finite, from {lower:g} to {upper:g}")


@dataclasses.dataclass(frozen=True)
class Link:
    """Full-duplex link of one rank.

    Args:
        bandwidth: bytes/s in each direction, more than 0.
        latency: seconds from posting a message to its first byte, 0 or more.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        _check("bandwidth", self.bandwidth, "bytes/s", SPEEDS_RANGE)
        _check("latency", self.latency, "s", SECONDS_RANGE)

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of one message of ``num_bytes``; 0 for an empty one."""
        # empty messages are not sent
        if not num_bytes:
            return 0.0
        return num_bytes / self.bandwidth + self.latency


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Speeds of links and cores.

    Args:
        intra: link between ranks of one node.
        inter: a rank's share of its node's network.
        flops: FLOP/s of one rank in expert GEMMs.
        routing: fixed overhead of replicas in seconds per microbatch and layer: the exchange of
            loads, quotas.
        contention: time that a hidden copy takes from compute, as a fraction of the copy's
            duration: 0 if it takes none, 1 if cores do both.
        memory: bytes/s of one rank's memory.
        launch: seconds per microbatch of one more physical expert on a rank, forward and backward,
            beside its memory traffic.

    Raises:
        ValueError: if ``flops`` or ``memory`` is not above 0, ``routing`` or ``launch`` is
            negative, or ``contention`` is not between 0 and 1.
    """

    intra: Link
    inter: Link
    flops: float
    routing: float
    contention: float
    # An H100's, also where a file or a record is older than these numbers: right for GPUs, and on
    # CPU ranks next to nothing, as what planned there.
    # HBM3's peak (H100 SXM datasheet). Two more experts of a rank took 0.10 ms (Qwen3-30B-A3B),
    # 0.45 (DeepSeek-V3) and 0.6 (Mixtral-8x7B) longer on an H200 (docs/gpu-results.md). A line
    # through these points by three passes over weights has a slope of 4.9 TB/s; an H200's peak is
    # 4.8.
    memory: float = 3.35e12
    # Least relative error at 4.8 TB/s: 63 % above, 43 % below and 2 % below these three points.
    launch: float = 75e-6

    def __post_init__(self) -> None:
        for name, unit in (("flops", "FLOP/s"), ("memory", "bytes/s")):
            _check(name, getattr(self, name), unit, SPEEDS_RANGE)
        for name in ("routing", "launch"):
            _check(name, getattr(self, name), "s", SECONDS_RANGE)
        if not 0 <= self.contention <= 1:
            raise ValueError(f"contention={self.contention} must be between 0 and 1")

    @classmethod
    def load(cls, path: Path | str) -> Speeds:
        """Read a file written by `save`.

        Raises:
            ValueError: if the file is missing or malformed; the message names file and cause.
        """
        try:
            values = json.loads(files.read_file(path))
            speeds = {name: values[name] for name in values if name not in ("origin", "units")}
            for name in ("intra", "inter"):
                speeds[name] = Link(**values[name])
            return cls(**speeds)
        except (OSError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{path} does not hold measured speeds ({files.describe(error)}); "
                "write it with torchrun ... -m megatron_hecate measure FILE"
            ) from error

    def save(self, path: Path | str, *, origin: str) -> None:
        """Write the speeds as JSON; ``origin`` documents machine and method of the measurement."""
        units = (
            "bandwidth: bytes/s, latency: s, flops: FLOP/s, routing: s, contention: 1, "
            "memory: bytes/s, launch: s"
        )
        text = json.dumps(dict(origin=origin, units=units, **dataclasses.asdict(self)), indent=2)
        files.replace(path, text + "\n")


H100 = Speeds(
    # NVLink 4 has 900 GB/s in both directions together (H100 SXM datasheet). NCCL reaches 460-480
    # GB/s bus bandwidth on 8 GPUs, so 80 % of one direction is a cautious point-to-point rate.
    # The latency is that of one small NCCL kernel.
    intra=Link(bandwidth=0.8 * 450e9, latency=5e-6),
    # 90 % of one ConnectX-7 of 400 Gbit/s per rank (DGX H100); latency as above plus the fabric's.
    inter=Link(bandwidth=0.9 * 50e9, latency=10e-6),
    # 989 TFLOP/s dense bf16 (datasheet). Grouped expert GEMMs reach 42 % (Qwen3-30B-A3B) to 60 %
    # (DeepSeek-V3) of it, forward and backward, measured on an H200 (docs/gpu-results.md).
    flops=0.45 * 989e12,
    # Measured on an H200 (docs/gpu-results.md), in us: 14 to count, 20 (8 ranks) to 78 (64 ranks)
    # for quotas, 13 to reroute and 18 in its backward. Estimated: 30 for the all-gather of loads,
    # which Megatron's all-to-all dispatcher saves again.
    routing=0.11e-3,
    # GEMMs on an H200 took 1.4 % longer during a fetch of 16 thread blocks, and 10 % longer during
    # a return of 32. NCCL is not measured.
    contention=0.12,
)
# Two CPU ranks of one thread each, gloo, fp32; result of `measure` on the machine of
# docs/results.md.
CPU = Speeds(
    intra=Link(bandwidth=0.9e9, latency=350e-6),
    inter=Link(bandwidth=0.9e9, latency=350e-6),
    flops=90e9,
    routing=0.5e-3,
    contention=1.0,
    memory=19e9,
    launch=0.4e-3,
)


@dataclasses.dataclass(frozen=True)
class World:
    """Ranks of one FSSDP group: their nodes and speeds.

    Args:
        node: [R] node index of each rank; ranks of one node share a fast link. Any integers in any
            order; nodes may have different numbers of ranks.
        speeds: speeds of links and cores.
    """

    node: tuple[int, ...]
    speeds: Speeds = H100

    @classmethod
    def from_names(cls, names: Sequence[str], speeds: Speeds = H100) -> World:
        """Build a world from ``names`` [R], the host name of each rank."""
        order = list(dict.fromkeys(names))
        return cls(node=tuple(order.index(name) for name in names), speeds=speeds)

    @property
    def num_ranks(self) -> int:
        return len(self.node)

    @cached_property
    def num_nodes(self) -> int:
        return len(set(self.node))

    @property
    def slowest_link(self) -> Link:
        """The link between nodes if there are several, else the link inside the node."""
        if self.num_nodes > 1:
            return self.speeds.inter
        return self.speeds.intra

    @cached_property
    def node_index(self) -> np.ndarray:
        """[R] int64 node of each rank, numbered from 0 without gaps."""
        return np.unique(self.node, return_inverse=True)[1].astype(np.int64)
