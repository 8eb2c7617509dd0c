"""Compute the expert memory that FSSDP adds to a rank, for published models and all lifetimes.

    python bench/memory.py

The figures are arithmetic only (`megatron_hecate.replicas.memory_estimate`, which tests compare
with real runs): bf16 weights, fp32 main gradients, Adam with an fp32 master copy and two fp32
moments, not sharded. Sizes are from the models' published configs; layouts are ours or the
authors'. If pipeline stages differ, the table shows the rank with the largest expert memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_hecate.comm.p2p import P2P  # noqa: E402
from megatron_hecate.comm.transport import LayerBuffer, Transport  # noqa: E402
from megatron_hecate.nvlink.transport import NVLink  # noqa: E402
from megatron_hecate.replicas.buffers import LIFETIMES  # noqa: E402
from megatron_hecate.replicas.memory_estimate import ExpertMemory  # noqa: E402

# upper bound of the share that lifetime "layer" adds with 2 slots, on 64 ranks, to 48 layers of 128
# experts
TARGET = 0.05


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a model's experts, and its parallel layout.

    Args:
        name: name in the table.
        hidden, ffn: sizes of an expert, which has three matrices [ffn, hidden].
        experts: experts of a layer, E.
        stages: number of MoE layers of every pipeline stage.
        ranks: expert-parallel size, R.
        note: description of the layout, printed below the table.
    """

    name: str
    hidden: int
    ffn: int
    experts: int
    stages: tuple[int, ...]
    ranks: int
    note: str

    def estimate(self, lifetime: str, slots: int, transport: str = "p2p") -> ExpertMemory:
        """Estimate the expert memory of a rank of the largest stage."""
        buffer = LayerBuffer(
            slots=slots,
            elements=3 * self.hidden * self.ffn,
            dtype=torch.bfloat16,
            homes=self.experts // self.ranks,
        )
        extra = _transport(transport, self.ranks).extra_bytes([buffer])
        layers = [buffer] * max(self.stages)
        return ExpertMemory.estimate(layers, lifetime, transport_bytes=extra)


def _transport(name: str, ranks: int) -> Transport:
    """Build a transport for its memory estimate only; 8 GPUs share an NVLink domain."""
    group = SimpleNamespace(rank=lambda: 0, size=lambda: ranks)
    if name == P2P.name:
        return P2P(group, timeout=1.0)
    domains = [range(first, min(first + 8, ranks)) for first in range(0, ranks, 8)]
    return NVLink(group, group, domains=domains, timeout=1.0)


MODELS = (
    Model(
        "Mixtral-8x7B",
        hidden=4096,
        ffn=14336,
        experts=8,
        stages=(4,) * 8,
        ranks=8,
        note="64 ranks: EP 8 (there are 8 experts, so EP can be no larger) x PP 8, "
        "4 layers per stage",
    ),
    Model(
        "Qwen3-30B-A3B",
        hidden=2048,
        ffn=768,
        experts=128,
        stages=(48,),
        ranks=64,
        note="64 ranks: EP 64, no pipeline",
    ),
    Model(
        "DeepSeek-V3",
        hidden=7168,
        ffn=2048,
        experts=256,
        stages=(1, *(4,) * 14, 1),
        ranks=64,
        note="1024 ranks: EP 64 x PP 16, its authors' degrees, but with 1F1B in place of their own "
        "schedule; 58 MoE layers, 4 per stage and 1 in the first and the last; without multi-token "
        "prediction. On 64 ranks in all, its experts' homes alone would take 171 GiB per rank",
    ),
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=2, help="per rank and layer")
    parser.add_argument("--transport", choices=("p2p", "nvlink"), default="p2p")
    options = parser.parse_args()
    slots = options.slots
    # A rank hosts replicas of experts of other ranks only.
    most = min(model.experts - model.experts // model.ranks for model in MODELS)
    if not 0 <= slots <= most:
        parser.error(
            f"--slots {slots} is out of range: 0 to {most}, the smallest number of experts that a "
            "model has on other ranks"
        )
    command = f"python bench/memory.py --slots {slots} --transport {options.transport}"
    print(f"`{command}`. GiB on the rank that holds most:\n")
    names = [
        "model",
        "lifetime",
        "homes (weights + gradients + optimizer)",
        "replicas' weights",
        "gradients",
    ]
    names += ["transport", "total", "over stock EP"]
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for model in MODELS:
        for lifetime in LIFETIMES:
            m = model.estimate(lifetime, slots, options.transport)
            homes = f"{_gib(m.homes)} ({_gib(m.weights)} + {_gib(m.grads)} + {_gib(m.optimizer)})"
            parts = (m.replica_weights, m.replica_grads, m.transport, m.total)
            cells = " | ".join(_gib(part) for part in parts)
            print(f"| {model.name} | `{lifetime}` | {homes} | {cells} | +{m.added:.1%} |")
    print()
    for model in MODELS:
        print(f"- {model.name}: {model.note}.")
    target = next(model for model in MODELS if len(model.stages) == 1 and model.stages[0] == 48)
    added = target.estimate("layer", 2, options.transport).added
    verdict = "met" if added <= TARGET else "MISSED"
    print(
        "\nTarget, 48 layers of 128 experts on 64 ranks, lifetime `layer`, 2 slots: "
        f"at most +{TARGET:.0%}; it is +{added:.1%}: {verdict}."
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f}"


if __name__ == "__main__":
    main()
