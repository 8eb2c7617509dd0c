"""Expert memory of a rank for published models: what FSSDP adds to stock expert parallelism, by lifetime of replicas.

    python bench/memory.py

Arithmetic only (`megatron_hecate.replicas.memory_estimate`, which tests compare with real runs): bf16 weights, fp32
main gradients, Adam with an fp32 master copy and two fp32 moments, not sharded. Sizes are those of the models'
published configs, layouts are ours or their authors'; where pipeline stages differ, the rank with the largest expert
memory is shown.
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

from megatron_hecate.comm.nvlink.transport import NVLink  # noqa: E402
from megatron_hecate.comm.p2p import P2P  # noqa: E402
from megatron_hecate.comm.transport import LayerBuffer, Transport  # noqa: E402
from megatron_hecate.replicas.buffers import LIFETIMES  # noqa: E402
from megatron_hecate.replicas.memory_estimate import ExpertMemory, RankExperts  # noqa: E402

TARGET = (
    0.05  # what lifetime "layer" may add with 2 slots, on 64 ranks, to 48 layers of 128 experts
)


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a model's experts, and how it is spread.

    Args:
        hidden, ffn: an expert has three matrices of [ffn, hidden].
        stages: MoE layers of every pipeline stage; one microbatch is in flight on the last, one more on each before.
        ranks: EP, over which the experts of a stage are spread.
    """

    name: str
    hidden: int
    ffn: int
    experts: int
    stages: tuple[int, ...]
    ranks: int
    note: str

    def rank(self, stage: int, slots: int, transport: str) -> RankExperts:
        """One rank of ``stage``, under the 1F1B schedule."""
        layers, microbatches = self.stages[stage], len(self.stages) - stage
        elements = 3 * self.hidden * self.ffn
        buffer = LayerBuffer(
            slots=slots, elements=elements, dtype=torch.bfloat16, homes=self.experts // self.ranks
        )
        extra = _transport(transport, self.ranks).extra_bytes([buffer])
        return RankExperts.with_adam(
            (buffer,) * layers, in_flight=layers * microbatches, transport_bytes=extra
        )

    def estimate(self, lifetime: str, slots: int, transport: str = "p2p") -> ExpertMemory:
        """Of the rank that holds most."""
        stages = (self.rank(stage, slots, transport) for stage in range(len(self.stages)))
        return max(
            (ExpertMemory.estimate(rank, lifetime) for rank in stages),
            key=lambda memory: memory.total,
        )


def _transport(name: str, ranks: int) -> Transport:
    """One that is never used, for a group of so many ranks; 8 GPUs share NVLink."""
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
        note="64 ranks: EP 8 (there are 8 experts, so EP can be no larger) x PP 8, 4 layers per stage",
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
        note="1024 ranks: EP 64 x PP 16, its authors' degrees, but with 1F1B in place of their own schedule; 58 "
        "MoE layers, 4 per stage and 1 in the first and the last; without multi-token prediction. On 64 ranks in all, "
        "its experts' homes alone would take 171 GiB per rank",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=2, help="per rank and layer")
    parser.add_argument("--transport", choices=("p2p", "nvlink"), default="p2p")
    options = parser.parse_args()
    slots, most = (
        options.slots,
        min(model.experts - model.experts // model.ranks for model in MODELS),
    )
    if not 0 <= slots <= most:
        parser.error(
            f"--slots {slots} is out of range: 0 to {most}, the experts that every model has elsewhere"
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
            a = model.estimate(lifetime, slots, options.transport)
            homes = f"{_gib(a.homes)} ({_gib(a.weights)} + {_gib(a.grads)} + {_gib(a.optimizer)})"
            parts = " | ".join(
                _gib(part) for part in (a.replica_weights, a.replica_grads, a.transport, a.total)
            )
            print(f"| {model.name} | `{lifetime}` | {homes} | {parts} | +{a.added:.1%} |")
    print()
    for model in MODELS:
        print(f"- {model.name}: {model.note}.")
    target = next(model for model in MODELS if len(model.stages) == 1 and model.stages[0] == 48)
    added = target.estimate("layer", 2, options.transport).added
    print(
        f"\nTarget, 48 layers of 128 experts on 64 ranks, lifetime `layer`, 2 slots: at most +{TARGET:.0%}; "
        f"it is +{added:.1%}: {'met' if added <= TARGET else 'MISSED'}."
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f}"


if __name__ == "__main__":
    main()
