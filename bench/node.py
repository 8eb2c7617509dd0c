"""Time training steps of stock Megatron and FSSDP on ranks that share one GPU, over NCCL.

    python bench/node.py --ranks 8 --model qwen3 --profile FOLDER
    python bench/node.py --tiny                     the same on 2 CPU ranks, to rehearse it

Ways of training take turns, step by step, in the same processes, on the same routes
(`node_routes`):

| way | |
|---|---|
| stock | stock Megatron |
| ideal | stock Megatron; the same popularities, dealt so that ranks are equally loaded |
| nvlink, p2p | FSSDP with this transport |
| nvlink:layer | the same with lifetime `layer` |
| nvlink:late | the same with up to 8 late replicas of a layer |
| nvlink:one, nvlink:free | one slot instead of two; all slots filled, as if copies cost nothing |

Regimes: `gpu` has as many tokens as `node_scale` asks for, so that the ratios of a step's parts are
those of a node of H100; `host` has an eighth of them, and the host bounds the step; `balanced` has
all tokens and equally popular experts. A row is a headline only if all ratios agree by measured
speeds and the host does not bound it. ``--profile`` adds a step of each way under torch.profiler,
and prints where its time goes (`node_spans`).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from launch import again_on_gpus, again_on_ranks  # noqa: E402
from node_models import FREE, KINDS, SLOTS, TRANSPORTS, Model, batches, make_case, start  # noqa: E402

WAYS = ("nvlink", "p2p", "nvlink:layer", "nvlink:late")
REGIMES = ("host", "gpu", "balanced")
HOST_BOUND: int = 8
# The host bounds a step that is not this much longer than stock's in the regime `host`.
HOST_SHARE: float = 1.25
# share of the GPU's memory for weights, gradients, optimizer states and replicas of all models
MEMORY: float = 0.6


@dataclasses.dataclass(frozen=True)
class Sample:
    """Seconds of one step: forward and backward, and the optimizer's."""

    compute: float
    optimizer: float


class Comparison:
    """Models of all ways that take turns.

    Args:
        models: model by way, "stock" first.
        popularity: popularities of experts.
        warmup: steps of a regime that are not timed.
    """

    def __init__(self, models: Mapping[str, Model], popularity: Any, *, warmup: int) -> None:
        self.models = {"stock": models["stock"], "ideal": models["stock"], **models}
        self.popularity = popularity
        self.warmup = warmup
        self.steps = 0

    def prepare(self, way: str, case: Any, step: int) -> list[float]:
        """Draw the routes of a step; returns the imbalance of each layer as routed."""
        import torch.distributed as dist
        from node_routes import imbalance

        ranks = dist.get_world_size()
        routed = []
        for routes in self.models[way].routes:
            logarithms = self.popularity.logarithms(routes.layer, step)
            if way == "ideal":
                logarithms = self.popularity.deal(logarithms, ranks)
            tokens = case.seq * case.micro_batch
            routes.begin_step(step, logarithms, tokens=tokens, microbatches=case.accumulate)
            loads = routes.loads(self.popularity.top_k, ranks, group=dist.group.WORLD)
            routed.append(imbalance(loads))
        return routed

    def time(self, way: str, case: Any, step: int) -> Sample:
        """Time a step: from a barrier of all ranks until all have ended."""
        import torch
        import torch.distributed as dist

        moments = []
        model = self.models[way]
        for part in (lambda: None, lambda: model.compute(case, step), model.trained.optimizer.step):
            part()
            torch.cuda.synchronize()
            dist.barrier()
            moments.append(time.perf_counter())
        return Sample(moments[1] - moments[0], moments[2] - moments[1])

    def run(
        self, case: Any, steps: int, after_warmup: Callable[[Model], None] | None = None
    ) -> tuple[dict[str, list[Sample]], dict[str, list[float]]]:
        """Train ``steps`` timed steps of all ways in turns.

        Returns:
            Samples, and the mean imbalance as routed of each step, by way.
        """
        samples: dict[str, list[Sample]] = {way: [] for way in self.models}
        routed: dict[str, list[float]] = {way: [] for way in self.models}
        ways = list(self.models)
        for number in range(self.warmup + steps):
            # Another way goes first in each step.
            first = number % len(ways)
            for way in [*ways[first:], *ways[:first]]:
                layers = self.prepare(way, case, self.steps)
                sample = self.time(way, case, self.steps)
                if number >= self.warmup:
                    samples[way].append(sample)
                    routed[way].append(sum(layers) / len(layers))
            self.steps += 1
            if number + 1 == self.warmup and after_warmup is not None:
                for model in dict.fromkeys(self.models.values()):
                    after_warmup(model)
        return samples, routed

    def profile(self, case: Any, folder: Path) -> None:
        """Write a trace of one step of each way and rank to ``folder``."""
        import torch
        import torch.distributed as dist
        from torch.profiler import ProfilerActivity, record_function

        folder.mkdir(parents=True, exist_ok=True)
        # Plans follow the routes of steps before.
        self.run(case, 0)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available() and not hasattr(torch.cuda, "_hecate_stand_in"):
            activities.append(ProfilerActivity.CUDA)
        for way in self.models:
            self.prepare(way, case, self.steps)
            with torch.profiler.profile(activities=activities) as profiler:
                torch.cuda.synchronize()
                dist.barrier()
                with record_function("step"):
                    self.models[way].compute(case, self.steps)
                    torch.cuda.synchronize()
            self.models[way].trained.optimizer.step()
            name = f"{way.replace(':', '-')}-rank{dist.get_rank()}.json.gz"
            profiler.export_chrome_trace(str(folder / name))
        self.steps += 1
        dist.barrier()


def spread(values: list[float]) -> tuple[float, float, float]:
    """Return the median and the quartiles."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else values * 3
    return median(values), low, high


def rows(
    samples: Mapping[str, list[Sample]], routed: Mapping[str, list[float]], models: Mapping
) -> list[dict[str, Any]]:
    """Return a row per way: imbalance, milliseconds, ratios of the same steps."""
    from megatron_hecate import layer_metrics

    result = []
    for way, of_way in samples.items():
        middle, low, high = spread([1e3 * sample.compute for sample in of_way])
        pairs = {
            other: [b.compute / a.compute for a, b in zip(of_way, samples[other], strict=True)]
            for other in ("stock", "ideal")
        }
        row = {"way": way, "routed": sum(routed[way]) / len(routed[way])}
        row |= {"computed": row["routed"], "replicas": 0}
        if way not in ("stock", "ideal"):
            layers = layer_metrics(models[way].trained.chunks)
            row["computed"] = sum(layer.computed for layer in layers) / len(layers)
            row["replicas"] = sum(layer.replicas for layer in layers) / len(layers)
        row |= {"fwd+bwd ms": middle, "quartiles": f"{low:.1f} to {high:.1f}"}
        row["optimizer ms"] = median([1e3 * sample.optimizer for sample in of_way])
        for other, ratios in pairs.items():
            middle, low, high = spread(ratios)
            row[f"{other} / this"] = f"{middle:.3f} ({low:.3f} to {high:.3f})"
        result.append(row)
    return result


def choose_sizes(arguments: argparse.Namespace, ranks: int) -> tuple[Any, Any, Any]:
    """Return the model's sizes, those that stand for them here, and the speeds measured here."""
    import torch
    from node_machine import MODELS
    from node_scale import measure, scaled

    model = MODELS[arguments.model]
    if arguments.routes == "recorded":
        # The recording has 64 experts and 6 per token.
        model = dataclasses.replace(model, experts=64, top_k=6)
    if arguments.tiny:
        tiny = dict(hidden=32, ffn=32, tokens=64, sequences=2, heads=2, kv_heads=1)
        here = dataclasses.replace(
            model, **tiny, experts=min(model.experts, 64), top_k=min(model.top_k, 6)
        )
        return here, here, None
    device = torch.device("cuda", torch.cuda.current_device())
    here = scaled(model, measure(device))
    return model, here, measure(device, shapes=[here])


def affordable_ways(ways: list[str], shape: Any, arguments: argparse.Namespace) -> list[str]:
    """Return the first of ``ways`` whose models fit into the GPU beside stock's."""
    import torch
    import torch.distributed as dist

    if arguments.tiny:
        return ways
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    stock = shape.training_bytes * arguments.layers
    # weights in bf16 and gradients in fp32
    ours = stock + 6 * SLOTS * dist.get_world_size() * shape.expert * arguments.layers
    count = int((MEMORY * total - stock) / ours)
    if count < 1:
        raise ValueError(
            f"{arguments.layers} layers of {arguments.model} take {stock / 1e9:.0f} GB as stock "
            f"and {ours / 1e9:.0f} with replicas, of {total / 1e9:.0f}; use fewer --layers"
        )
    return ways[:count]


def write_speeds(shape: Any, machine: Any) -> str:
    """Write the speeds measured here for the planner; returns the path, the same on all ranks."""
    import torch.distributed as dist

    from megatron_hecate.plan import H100

    if machine is None:
        return FREE
    path = [""]
    if dist.get_rank() == 0:
        links = dict(intra=machine.fetch, inter=machine.fetch)
        rates = dict(flops=machine.experts[shape.name], memory=machine.memory)
        speeds = dataclasses.replace(H100, **links, **rates)
        path = [str(Path(tempfile.mkdtemp(), "speeds.json"))]
        speeds.save(path[0], origin=machine.source)
    dist.broadcast_object_list(path)
    return path[0]


def measure_all(arguments: argparse.Namespace) -> None:
    """Measure on every rank; print the tables on rank 0."""
    start()
    import node_scale
    import tiny_gpt
    import torch.distributed as dist
    from node_machine import ThreadBlocks
    from node_routes import Popularity
    from rows import Table

    ranks, is_first = dist.get_world_size(), dist.get_rank() == 0
    model, shape, machine = choose_sizes(arguments, ranks)
    case = make_case(shape, arguments, ranks)
    tiny_gpt.initialize(case)
    # The same tokens in each step; routes do not depend on them.
    tiny_gpt.batch = batches(tiny_gpt.batch)
    ways = affordable_ways(arguments.ways, shape, arguments)
    if is_first and ways != arguments.ways:
        print(f"left out for want of memory: {', '.join(set(arguments.ways) - set(ways))}")
    settings = dict(nccl_ctas=ThreadBlocks.of(ranks).p2p, speeds=write_speeds(shape, machine))
    models = {way: Model(case, way, settings) for way in ("stock", *ways)}
    popularity = Popularity(
        experts=shape.experts,
        top_k=shape.top_k,
        alpha=arguments.alpha,
        jump=arguments.jump,
        recorded=arguments.routes == "recorded",
    )
    comparison = Comparison(models, popularity, warmup=arguments.warmup)
    title = f"{arguments.model}, {ranks} ranks, {arguments.layers} layers"
    # seconds of stock's step in the regime `host`
    host_step = 0.0
    for regime in arguments.regimes:
        length = case.seq // HOST_BOUND if regime == "host" else case.seq
        alpha = 0.0 if regime == "balanced" else arguments.alpha
        recorded = popularity.recorded and regime != "balanced"
        comparison.popularity = dataclasses.replace(popularity, alpha=alpha, recorded=recorded)
        of_regime = dataclasses.replace(case, seq=length)
        captures = arguments.graphs and regime == arguments.regimes[0]
        after_warmup = Model.capture if captures else None
        samples, routed = comparison.run(of_regime, arguments.steps, after_warmup)
        stock = median([sample.compute for sample in samples["stock"]])
        if regime == "host":
            host_step = stock
            host = stock / arguments.layers / arguments.microbatches
            machine = machine and dataclasses.replace(machine, host=host)
        label = scale_label(model, shape, machine, is_host_bound=stock < HOST_SHARE * host_step)
        if is_first:
            tokens = length * case.micro_batch
            table = Table(f"{title}, regime {regime}, {tokens} tokens")
            for row in rows(samples, routed, models):
                table.add(**row, scale=label)
    if is_first and machine is not None:
        node_scale.table(model, shape, machine)
    # Last, when all times are written: the profiler may fail under MPS.
    if arguments.profile and "gpu" in arguments.regimes:
        comparison.popularity = popularity
        comparison.profile(case, arguments.profile)
    dist.barrier()
    dist.destroy_process_group()


def scale_label(model: Any, shape: Any, machine: Any, *, is_host_bound: bool) -> str:
    """Return whether a row can be a headline, or why not."""
    from node_scale import misfits

    if machine is None:
        return "rehearsal"
    off = misfits(model, shape, machine)
    fit = f"scale off: {', '.join(off)}" if off else ""
    bound = "host-bound" if is_host_bound else ""
    return "; ".join(filter(None, (bound, fit))) or "headline"


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8, help="ranks of one GPU (%(default)s)")
    parser.add_argument("--model", choices=("qwen3", "dsv3", "mixtral"), default="qwen3")
    parser.add_argument("--routes", choices=("drawn", "recorded"), default="drawn")
    parser.add_argument("--alpha", type=float, default=0.8, help="exponent of drawn popularities")
    parser.add_argument("--jump", type=int, default=0, help="steps until other experts are hot")
    parser.add_argument("--ways", default=",".join(WAYS), help="%(default)s")
    parser.add_argument("--regimes", default=",".join(REGIMES), help="%(default)s")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a regime")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--graphs", action="store_true", help="Megatron's CUDA graphs")
    parser.add_argument("--profile", type=Path, help="folder of traces")
    parser.add_argument("--tiny", action="store_true", help="2 CPU ranks; times mean nothing")
    arguments = parser.parse_args()
    arguments.ways, arguments.regimes = arguments.ways.split(","), arguments.regimes.split(",")
    allowed = {f"{name}:{kind}".rstrip(":") for name in TRANSPORTS for kind in KINDS}
    if unknown := set(arguments.ways) - allowed:
        parser.error(f"--ways {','.join(unknown)}: choose from {', '.join(sorted(allowed))}")
    if unknown := set(arguments.regimes) - set(REGIMES):
        parser.error(f"--regimes {','.join(unknown)}: choose from {', '.join(REGIMES)}")
    if arguments.graphs and {"host", "gpu"} <= set(arguments.regimes):
        parser.error("graphs have one number of tokens: choose --regimes host or gpu,balanced")
    return arguments


def main() -> int:
    """Run the benchmark on all ranks; returns the exit status."""
    arguments = parse()
    if "RANK" in os.environ:
        measure_all(arguments)
        return 0
    # Traces of an earlier call, perhaps of other ways.
    for path in arguments.profile.glob("*-rank*.json.gz") if arguments.profile else ():
        path.unlink()
    if arguments.tiny:
        status = again_on_ranks(__file__, 2)
    else:
        status = again_on_gpus(__file__, arguments.ranks)
    if arguments.profile and "gpu" in arguments.regimes and not status:
        # Here, because it takes long, and a trace that it cannot read must end no rank.
        import node_spans

        counts = f"--layers={arguments.layers} --microbatches={arguments.microbatches}"
        node_spans.main([str(arguments.profile), *counts.split()])
    return status


if __name__ == "__main__":
    sys.exit(main())
