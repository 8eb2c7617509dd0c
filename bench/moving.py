"""Time rehoming: moving experts with their optimizer state between CPU ranks.

    python bench/moving.py [--ranks 4] [--ep 2] [--share 0.25]

A Megatron GPT trains for three steps, with the distributed optimizer and Adam in bf16. Then a share
of all experts is swapped between the two most distant ranks. The table shows

* the largest number of state bytes received by a rank (a lower bound for every way to move),
* the seconds of the move,
* the seconds of one equal all-to-all from ready buffers, by the same process group: the link.

Times are the best of several. The ratio is the cost of packing, agreement and writing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from launch import again_on_ranks  # noqa: E402

REPEATS: int = 5


def best(act: Callable[[], None]) -> float:
    """Time ``act`` on all ranks `REPEATS` times, from a barrier to the end of the slowest rank.

    Returns:
        Seconds of the fastest repetition.
    """
    import torch
    import torch.distributed as dist

    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        act()
        taken = torch.tensor(time.perf_counter() - begin)
        # The slowest rank determines the time.
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        seconds.append(float(taken))
    return min(seconds)


def link_seconds(group: Any, received: Any) -> float:
    """Time one all-to-all in which ranks half a group apart exchange ``received`` bytes.

    Args:
        group: process group of the move.
        received: bytes that this rank receives in a move, a scalar int64 tensor.
    """
    import torch
    import torch.distributed as dist

    distance = group.size() // 2
    partner = (group.rank() + distance) % group.size()
    source = (group.rank() - distance) % group.size()
    peers = torch.zeros(group.size(), dtype=torch.int64)
    dist.all_gather_into_tensor(peers, received.view(1), group=group)
    sizes_out = [0] * group.size()
    sizes_out[partner] = int(received)
    sizes_in = [0] * group.size()
    sizes_in[source] = int(peers[source])
    out = torch.zeros(sum(sizes_out), dtype=torch.uint8)
    into = torch.zeros(sum(sizes_in), dtype=torch.uint8)
    return best(lambda: dist.all_to_all_single(into, out, sizes_in, sizes_out, group=group))


def run(arguments: argparse.Namespace) -> None:
    """Measure on every rank; print the table on rank 0."""
    import tiny_gpt
    import torch
    import torch.distributed as dist

    from megatron_hecate.homes.mover import ROUND_BYTES

    dist.init_process_group("gloo")
    settings = dict(hidden_size=256, moe_ffn_hidden_size=1024, num_layers=2)
    sizes = dict(ep=arguments.ep, experts=16, bf16=True, distributed_optimizer=True)
    case = tiny_gpt.Case(**sizes, settings=tuple(settings.items()))
    tiny_gpt.initialize(case)
    # The interval of rehoming is longer than the training, so only this benchmark moves experts.
    run = tiny_gpt.train(case, steps=3, hook=tiny_gpt.fssdp_hook(rehome=1000))
    homes = tiny_gpt.moe_layers(run.chunks)[0].prefetcher.rehoming.homes
    count = max(2, int(arguments.share * case.experts)) // 2
    swapped = homes.built[0].copy()
    swapped[:count] = homes.built[0][-count:]
    swapped[-count:] = homes.built[0][:count]
    orders = [[swapped] * case.layers, homes.built]

    def there_and_back() -> None:
        for order in orders:
            homes.move(order)

    before = torch.tensor(homes.received_bytes)
    # Back again, so that every repetition begins with the same homes.
    seconds = best(there_and_back) / 2
    received = (torch.tensor(homes.received_bytes) - before) // (2 * REPEATS)
    link = link_seconds(homes._group, received)
    dist.all_reduce(received, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        moved = 2 * count * case.layers
        bound = ROUND_BYTES / 2**20
        print("python bench/moving.py", *sys.argv[1:])
        print(
            "| experts that move | MiB received, most | s | s of the link alone | ratio | "
            "MiB in a round, at most |"
        )
        print("|---|---|---|---|---|---|")
        print(
            f"| {moved} | {received / 2**20:.1f} | {seconds:.3f} | {link:.3f} | "
            f"{seconds / link:.2f} | {bound:.0f} |"
        )
    dist.destroy_process_group()


def main() -> int:
    """Run the benchmark on CPU ranks; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: %(default)s)")
    parser.add_argument(
        "--ep", type=int, default=2, help="expert-parallel size (default: %(default)s)"
    )
    parser.add_argument(
        "--share",
        type=float,
        default=0.25,
        help="share of experts that move (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        return again_on_ranks(__file__, arguments.ranks)
    run(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
