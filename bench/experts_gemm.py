"""Time TransformerEngine's grouped GEMM on one GPU, on a rank's homes and on homes and replicas.

    python bench/experts_gemm.py

There are two comparisons, forward and backward, for the linears of one expert layer in bf16. *Same
tokens, more experts*: the cost of two replicas as further groups of a GEMM. *Hot rank*: the fullest
rank of a skewed layer with stock Megatron, against that rank after its hottest expert's tokens were
split: it has replicas and the mean number of tokens.
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

# hidden size, ffn size and homes per rank
LAYERS = {
    "DeepSeek-V3": (7168, 2048, 4),
    "Qwen3-30B-A3B": (2048, 768, 4),
    "Mixtral-8x7B": (4096, 14336, 1),
}
REPLICAS: int = 2
# tokens of a rank with balanced loads
TOKENS: int = 16384
# tokens of the fullest rank, over the mean
SKEW: float = 2.0


class Experts:
    """The two grouped linears of ``num`` gated experts."""

    def __init__(self, num: int, hidden: int, ffn: int) -> None:
        import transformer_engine.pytorch as te

        settings: dict[str, Any] = dict(bias=False, params_dtype=torch.bfloat16, device="cuda")
        self.num = num
        self.hidden = hidden
        self.first = te.GroupedLinear(num, hidden, 2 * ffn, **settings)
        self.second = te.GroupedLinear(num, ffn, hidden, **settings)

    def run(self, inputs: torch.Tensor, splits: list[int]) -> None:
        """Run forward and backward; ``splits``: tokens of each expert."""
        gate, up = self.first(inputs, splits).chunk(2, dim=-1)
        self.second(torch.nn.functional.silu(gate) * up, splits).sum().backward()

    def milliseconds(self, splits: list[int], clock: Clock) -> float:
        """Time a forward and backward with ``splits`` tokens per expert; returns the median."""
        assert len(splits) == self.num
        inputs = torch.randn(
            sum(splits), self.hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        return clock.time(lambda: self.run(inputs, splits)).seconds * 1e3


def evenly(tokens: int, num: int) -> list[int]:
    """Split ``tokens`` among ``num`` experts, in multiples of 16 except for the last expert."""
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

    version = f"TransformerEngine {transformer_engine.__version__}"
    print(f"{torch.cuda.get_device_name()}, {version}, bf16; milliseconds\n")
    clock = Clock(torch.device("cuda"), calls=options.calls)
    table = Table("grouped GEMM, milliseconds")
    for name, (hidden, ffn, homes) in LAYERS.items():
        stock = Experts(homes, hidden, ffn)
        ours = Experts(homes + REPLICAS, hidden, ffn)
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
