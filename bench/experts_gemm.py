"""TransformerEngine's grouped GEMM on one GPU: a rank's tokens on its homes alone, and split among more experts.

    python bench/experts_gemm.py

Two comparisons, forward and backward, for the linears of one expert layer in bf16. *Same tokens, more experts*: what
it costs that two replicas are further groups of a GEMM. *Hot rank*: the fullest rank of a skewed layer with stock
Megatron, against that rank after its hottest expert's tokens were split: it has replicas and the mean number of tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from gpu_clock import Clock  # noqa: E402
from rows import Table  # noqa: E402

LAYERS = {
    "DeepSeek-V3": (7168, 2048, 4),
    "Qwen3-30B-A3B": (2048, 768, 4),
    "Mixtral-8x7B": (4096, 14336, 1),
}  # homes
REPLICAS: int = 2
TOKENS: int = 16384  # of a rank, where loads are balanced
SKEW: float = 2.0  # tokens of the fullest rank, in means


class Experts:
    """The two grouped linears of ``num`` gated experts."""

    def __init__(self, num: int, hidden: int, ffn: int) -> None:
        import transformer_engine.pytorch as te

        settings: dict[str, Any] = dict(bias=False, params_dtype=torch.bfloat16, device="cuda")
        self.num, self.hidden = num, hidden
        self.first = te.GroupedLinear(num, hidden, 2 * ffn, **settings)
        self.second = te.GroupedLinear(num, ffn, hidden, **settings)

    def run(self, inputs: torch.Tensor, splits: list[int]) -> None:
        gate, up = self.first(inputs, splits).chunk(2, dim=-1)
        self.second(torch.nn.functional.silu(gate) * up, splits).sum().backward()

    def milliseconds(self, splits: list[int], clock: Clock) -> float:
        """Median time of a forward and backward with so many tokens for each expert."""
        assert len(splits) == self.num
        inputs = torch.randn(
            sum(splits), self.hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        return clock.time(lambda: self.run(inputs, splits)).seconds * 1e3


def evenly(tokens: int, num: int) -> list[int]:
    """``tokens`` among ``num`` experts, in multiples of 16 but the last."""
    share = tokens // num // 16 * 16
    return [share] * (num - 1) + [tokens - share * (num - 1)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU here")
    import transformer_engine

    print(
        f"{torch.cuda.get_device_name()}, TransformerEngine {transformer_engine.__version__}, bf16; milliseconds\n"
    )
    clock, table = (
        Clock(torch.device("cuda"), calls=options.calls),
        Table("grouped GEMM, milliseconds"),
    )
    for name, (hidden, ffn, homes) in LAYERS.items():
        stock, ours = Experts(homes, hidden, ffn), Experts(homes + REPLICAS, hidden, ffn)
        hot = evenly(TOKENS // 2, homes - 1) if homes > 1 else []
        hot = [int(SKEW * TOKENS) - sum(hot), *hot]
        table.add(
            layer=name,
            homes=homes,
            tokens=TOKENS,
            stock=stock.milliseconds(evenly(TOKENS, homes), clock),
            same_tokens_with_replicas=ours.milliseconds(evenly(TOKENS, homes + REPLICAS), clock),
            hot_rank_stock=stock.milliseconds(hot, clock),
            hot_rank_with_replicas=ours.milliseconds(evenly(TOKENS, homes + REPLICAS), clock),
        )
        del stock, ours


if __name__ == "__main__":
    main()
