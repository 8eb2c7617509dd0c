"""Expert memory of a rank for published models: what FSSDP adds to stock expert parallelism, by lifetime of guests.

    python bench/memory.py

Arithmetic only (`megatron_hecate.report`, which tests compare with real runs): bf16 weights, fp32 main gradients, Adam
with an fp32 master copy and two fp32 moments, not sharded. Sizes are those of the models' published configs, layouts
are ours or their authors'; where pipeline stages differ, the rank with the largest expert memory is shown.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_hecate.memory import LIFETIMES, Need  # noqa: E402
from megatron_hecate.report import Account, RankExperts  # noqa: E402

TARGET = 0.05  # what lifetime "layer" may add with 2 slots, on 64 ranks, to 48 layers of 128 experts


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
        homes = self.experts // self.ranks
        machines = (8,) * max(1, self.ranks // 8)  # 8 GPUs share NVLink
        elements = 3 * self.hidden * self.ffn
        need = Need(slots=slots, elements=elements, dtype=torch.bfloat16, homes=homes, domains=machines)
        in_flight = layers * microbatches
        return RankExperts.with_adam((need,) * layers, (homes,) * layers, in_flight=in_flight, transport=transport)

    def account(self, lifetime: str, slots: int, transport: str = "p2p") -> Account:
        """Of the rank that holds most."""
        accounts = [Account.of(self.rank(stage, slots, transport), lifetime) for stage in range(len(self.stages))]
        return max(accounts, key=lambda account: account.total)


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
    parser.add_argument("--transport", choices=("p2p", "sm", "ce"), default="p2p")
    options = parser.parse_args()
    slots, most = options.slots, min(model.experts - model.experts // model.ranks for model in MODELS)
    if not 0 <= slots <= most:
        parser.error(f"--slots {slots} is out of range: 0 to {most}, the experts that every model has elsewhere")
    command = f"python bench/memory.py --slots {slots} --transport {options.transport}"
    print(f"`{command}`. GiB on the rank that holds most:\n")
    columns = "model, lifetime, homes (weights + gradients + optimizer), guests' weights, gradients, transport, total, "
    columns += "over stock EP"
    names = columns.split(", ")
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for model in MODELS:
        for lifetime in LIFETIMES:
            a = model.account(lifetime, slots, options.transport)
            homes = f"{_gib(a.homes)} ({_gib(a.weights)} + {_gib(a.grads)} + {_gib(a.optimizer)})"
            parts = " | ".join(_gib(part) for part in (a.guest_weights, a.guest_grads, a.transport, a.total))
            print(f"| {model.name} | `{lifetime}` | {homes} | {parts} | +{a.added:.1%} |")
    print()
    for model in MODELS:
        print(f"- {model.name}: {model.note}.")
    target = next(model for model in MODELS if len(model.stages) == 1 and model.stages[0] == 48)
    added = target.account("layer", 2, options.transport).added
    print(
        f"\nTarget, 48 layers of 128 experts on 64 ranks, lifetime `layer`, 2 slots: at most +{TARGET:.0%}; "
        f"it is +{added:.1%}: {'met' if added <= TARGET else 'MISSED'}."
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f}"


if __name__ == "__main__":
    main()
