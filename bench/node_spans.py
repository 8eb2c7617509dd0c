"""Where the time of a training step goes, from torch.profiler's traces of all ranks.

    python bench/node_spans.py FOLDER --layers L --microbatches M

FOLDER holds one Chrome trace per rank and way of training, ``NAME-rank<r>.json.gz``. In each, an
annotation ``step`` spans the step up to its last ``torch.cuda.synchronize``. All ranks run on one
machine, hence on one clock. Each moment of a rank's step counts for the first of `COLUMNS` that is
running: a transfer gets what no computation hides. The columns' sum is the step, from the first
rank's start to the last rank's end.

The i-th collective of a process group is matched over ranks. The shortest duration is that of the
last arriver, who does not wait: so long data moves on each rank, up to the collective's end, and
before that the rank waits. FSSDP's messages are matched by transfer. Where ranks move different
amounts, what a rank moves longer than the shortest counts as waiting.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gzip
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rows import Table

FETCH, RETURN, EITHER = "FSSDP fetch", "FSSDP return", "FSSDP fetch or return"
ROUTING, LOADS, TOKENS = "FSSDP routing", "gather of loads", "token all-to-all"
OTHER, OTHER_COLLECTIVES, COPIES = "other compute", "other collectives", "memory copies"
GEMM, ATTENTION, PERMUTE, SUMS = "GEMM", "attention", "permute and sort", "gradient sums, zeroing"
# Kind of a kernel: the first expression that is part of its name, in any case of letters.
KERNELS: tuple[tuple[str, str], ...] = (
    # kernels/device.cu
    (ROUTING, r"^fssdp_(count|quotas|reroute)"),
    (FETCH, r"^fssdp_gather\b"),
    (RETURN, r"^fssdp_reduce_"),
    (EITHER, r"^fssdp_synchronize\b"),
    # NCCL: the parameters of the call say which, see `_collective`
    (OTHER_COLLECTIVES, r"^nccl"),
    # DeepEP and HybridEP, dispatchers of Megatron
    (TOKENS, r"\b(deep_ep|hybrid_ep)::|\bep::(inter|intra)node"),
    # Kineto's names of copies; torch's and Kineto's of zeroing; main_grad.add_ is a sum in fp32
    (COPIES, r"^memcpy"),
    (SUMS, r"^memset|FillFunctor|CUDAFunctor_add<float>"),
    # Apex and TransformerEngine
    ("optimizer", r"multi_tensor|adam"),
    # cuDNN, FlashAttention (whose names contain "cutlass" too), Megatron's fused softmax
    (ATTENTION, r"sdpa|fmha|flash|attention|attn|scaled_\w*softmax"),
    # cuBLAS on Hopper and before, CUTLASS, TransformerEngine, DeepGEMM
    (GEMM, r"nvjet|gemm|cutlass|cublas|xmma|splitKreduce"),
    # TransformerEngine's common/triton/permutation.py; torch: masked_select, scatter, gather
    (PERMUTE, r"permute|row_id_map|DeviceSelect|_scatter_gather"),
    # torch: index_select, index_put, sort
    (PERMUTE, r"index_\w*kernel|indexing_|indexSelect|vectorized_gather|sort"),
)
# Kinds of what is launched within a span ``fssdp/<what> <layer>``, such as copies and sums.
SPANS = {
    **dict.fromkeys(("spAG start", "spAG wait"), FETCH),
    **dict.fromkeys(("spRS start", "spRS wait"), RETURN),
    **dict.fromkeys(("loads", "quotas", "late", "plan"), ROUTING),
}
COMPUTE = (GEMM, ATTENTION, PERMUTE, ROUTING, SUMS, "optimizer", OTHER, COPIES)
TRANSFERS = (FETCH, RETURN, EITHER)
MOVED = (TOKENS, LOADS, *TRANSFERS, OTHER_COLLECTIVES)
GAP, NOT_BEGUN, ENDED = "host gap", "wait for other ranks' start", "wait for other ranks' end"
COLUMNS: tuple[str, ...] = (
    *COMPUTE,
    *(f"{kind}, {part}" for kind in MOVED for part in ("moving", "waiting")),
    *(GAP, NOT_BEGUN, ENDED),
)
WAITING = "fssdp_synchronize"  # waits for peers and moves nothing
ALL, SHARE, NAME = "hidden and exposed", "hidden share", "ms of a step"
_PLACE = {column: place for place, column in enumerate(COLUMNS)}
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("user_annotation", "cuda_runtime", "cuda_driver", "cpu_op")
# Kineto writes nothing for an empty text, which is no JSON.
_EMPTY = re.compile(r'("Process Group \w+":)\s*(?=[,}])')
_FILE = re.compile(r"(?P<way>.+)-rank(?P<rank>\d+)\.json(\.gz)?")


@dataclasses.dataclass(frozen=True)
class Event:
    """Work on a GPU, from ``begin`` to ``end`` in nanoseconds."""

    name: str
    kind: str  # of `COMPUTE` or `MOVED`
    begin: int
    end: int
    match: tuple[str, ...] = ()  # names the same collectives of other ranks, if there are any
    ranks: int = 0  # number of ranks of a collective, 0 if unknown


@dataclasses.dataclass(frozen=True)
class Trace:
    """One rank's step, from ``begin`` to ``end`` in nanoseconds of the machine's clock."""

    name: str
    begin: int
    end: int
    events: tuple[Event, ...]


@dataclasses.dataclass(frozen=True)
class _Raw:
    """Event of a trace file; ``thread`` is a stream for work on the GPU."""

    name: str
    cat: str
    thread: tuple[Any, Any]
    begin: int
    end: int
    args: Mapping[str, Any]


@functools.cache
def category(name: str) -> str:
    """Return the kind of a kernel, copy or memset by its name alone."""
    return next((kind for kind, part in KERNELS if re.search(part, name, re.IGNORECASE)), OTHER)


def read(path: Path) -> Trace:
    """Read the trace of a rank, of which only the step counts.

    Raises:
        ValueError: the file is truncated, is no trace, or has not one step.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        content = json.loads(_EMPTY.sub(r'\1 ""', data.decode()))
        raws = _raws(content["traceEvents"], content.get("baseTimeNanoseconds", 0))
        steps = [raw for raw in raws if (raw.cat, raw.name) == ("user_annotation", "step")]
        if len(steps) != 1:
            raise ValueError(f"{len(steps)} annotations 'step', expected 1")
        begin, end = steps[0].begin, steps[0].end
        inside = [raw for raw in raws if raw.begin < end and raw.end > begin]
        return Trace(path.name, begin, end, tuple(_events(inside)))
    # Anything may be wrong with a truncated file, or with one of another program.
    except Exception as error:
        raise ValueError(
            f"{path} is no trace of a step ({type(error).__name__}: {error}); profile one step "
            'within torch.profiler.record_function("step") and export it again'
        ) from error


def _raws(events: Iterable[Mapping[str, Any]], base: int) -> list[_Raw]:
    """Return all events with a duration, by begin; times are microseconds after ``base``."""
    raws = []
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in (*_ON_GPU, *_ON_HOST):
            begin = round(event["ts"] * 1000) + base
            end = begin + round(event.get("dur", 0) * 1000)
            thread, args = (event["pid"], event["tid"]), event.get("args", {})
            raws.append(_Raw(event["name"], event["cat"], thread, begin, end, args))
    return sorted(raws, key=lambda raw: (raw.begin, -raw.end))


def _events(raws: Sequence[_Raw]) -> Iterator[Event]:
    """Yield the events of the GPU among ``raws``, which are in order."""
    launches = _launches(raws)
    counts: Counter[tuple[str, ...]] = Counter()
    for raw in raws:
        if raw.cat not in _ON_GPU:
            continue
        span, call = launches.get(raw.args.get("correlation"), ((), {}))
        kind = category(raw.name)
        match: tuple[str, ...] = ()
        if raw.name.startswith("nccl"):
            call = raw.args if "Collective name" in raw.args else call
            kind, match = _collective(call, span)
            if kind in TRANSFERS:
                counts[match] += 1
                match = match and (*match, str(counts[match]))
        elif span and kind not in (FETCH, RETURN):
            kind = SPANS[span[0]]
        # Ranks that have nothing to send take no part in a transfer.
        ranks = 0 if kind in TRANSFERS or not match else int(call.get("Group size", 0))
        yield Event(raw.name, kind, raw.begin, raw.end, match, ranks)


def _launches(raws: Sequence[_Raw]) -> dict[Any, tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Return by correlation of a launch: its innermost span of `SPANS`, and the last call of NCCL.

    A span is (what, name, number among equal spans), empty if there is none. Kineto writes a call's
    parameters to its kernel, except for coalesced calls, after the last of which the kernel starts.
    """
    spans: defaultdict[Any, list[tuple[int, tuple[str, ...]]]] = defaultdict(list)
    calls: dict[Any, Mapping[str, Any]] = {}
    numbers: Counter[str] = Counter()
    launches = {}
    for raw in raws:
        if raw.cat == "user_annotation" and raw.name.startswith("fssdp/"):
            name = raw.name.removeprefix("fssdp/")
            if what := next((what for what in SPANS if name.startswith(f"{what} ")), ""):
                numbers[name] += 1
                spans[raw.thread].append((raw.end, (what, name, str(numbers[name]))))
        elif raw.name == "record_param_comms":
            if raw.args.get("Collective name") not in ("wait", "init"):
                calls[raw.thread] = raw.args
        elif raw.cat in ("cuda_runtime", "cuda_driver") and "correlation" in raw.args:
            open_spans = spans[raw.thread]
            while open_spans and open_spans[-1][0] < raw.begin:
                open_spans.pop()
            span = open_spans[-1][1] if open_spans else ()
            launches[raw.args["correlation"]] = (span, calls.get(raw.thread, {}))
    return launches


def _collective(call: Mapping[str, Any], span: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the kind of a kernel of NCCL, and its name on all ranks if they can be matched."""
    keys = ("Collective name", "Process Group Name", "Process Group Description", "dtype")
    name, group, description, dtype = (str(call.get(key, "")) for key in keys)
    if span and SPANS[span[0]] in TRANSFERS:
        return SPANS[span[0]], (*span, group)
    # megatron_hecate/switch_on/connect.py and comm/groups.py
    if description.startswith("fssdp") and description != "fssdp homes":
        return EITHER, ()
    kind = OTHER_COLLECTIVES
    if re.search("all_?to_?all", name) and not description.startswith("fssdp"):
        kind = TOKENS
    # Megatron gathers the tokens per expert too; other gathers are of floating point numbers.
    elif re.search("all_?gather", name) and dtype in ("Int", "Long"):
        kind = LOADS
    # Ranks may send different numbers of messages.
    if not name or not group or name.startswith(("send", "recv")):
        return kind, ()
    return kind, (name, group, str(call.get("Process Group Ranks", "")), kind)


def _spans_of(traces: Sequence[Trace]) -> list[list[tuple[int, int, str]]]:
    """Return by rank (begin, end, column), with collectives split into both parts."""
    spans: list[list[tuple[int, int, str]]] = [[] for _ in traces]
    matched: dict[tuple[str, ...], dict[int, list[Event]]] = {}
    for rank, trace in enumerate(traces):
        for event in trace.events:
            if event.match:
                matched.setdefault(event.match, {}).setdefault(rank, []).append(event)
            elif event.kind in COMPUTE:
                spans[rank].append((event.begin, event.end, event.kind))
            else:
                part = "waiting" if event.name.startswith(WAITING) else "moving"
                spans[rank].append((event.begin, event.end, f"{event.kind}, {part}"))
    for match, of_ranks in matched.items():
        counts = {rank: len(events) for rank, events in of_ranks.items()}
        fewest, most = (choose(counts, key=counts.__getitem__) for choose in (min, max))
        ranks = of_ranks[fewest][0].ranks
        if counts[fewest] < counts[most] or len(counts) < ranks:
            raise ValueError(
                f"{match[0]} of process group {match[1]}: {counts[fewest]} in "
                f"{traces[fewest].name}, {counts[most]} in {traces[most].name}, by {len(counts)} "
                f"ranks of {ranks or 'unknown'}; export the same step of all ranks"
            )
        for same in zip(*of_ranks.values(), strict=True):
            shortest = min(event.end - event.begin for event in same)
            for rank, event in zip(of_ranks, same, strict=True):
                arrived = event.end - shortest
                spans[rank].append((event.begin, arrived, f"{event.kind}, waiting"))
                spans[rank].append((arrived, event.end, f"{event.kind}, moving"))
    return spans


def rank_times(traces: Sequence[Trace]) -> list[dict[str, float]]:
    """Return each rank's milliseconds by column, of the step, and of all of each transfer.

    Raises:
        ValueError: the traces are not of one step, or miss collectives or ranks.
    """
    if not traces:
        raise ValueError("no traces; give those of all ranks of a step")
    first = min(traces, key=lambda trace: trace.end)
    last = max(traces, key=lambda trace: trace.begin)
    if last.begin >= first.end:
        raise ValueError(
            f"{last.name} begins after the end of {first.name}; export the same step of all ranks"
        )
    begin, end = min(trace.begin for trace in traces), max(trace.end for trace in traces)
    times = []
    for trace, spans in zip(traces, _spans_of(traces), strict=True):
        waits = {NOT_BEGUN: trace.begin - begin, ENDED: end - trace.end}
        sums = {"step": end - begin, **_exclusive(trace, spans), **waits}
        times.append({name: nanoseconds / 1e6 for name, nanoseconds in sums.items()})
    return times


def _exclusive(trace: Trace, spans: Sequence[tuple[int, int, str]]) -> dict[str, int]:
    """Return nanoseconds of the rank's own step by column, and of all of each transfer."""
    changes: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for begin, end, column in spans:
        if max(begin, trace.begin) < min(end, trace.end):
            changes[max(begin, trace.begin)].append((_PLACE[column], 1))
            changes[min(end, trace.end)].append((_PLACE[column], -1))
    sums = dict.fromkeys((*COLUMNS, *(f"{kind}, {ALL}" for kind in TRANSFERS)), 0)
    running = [0] * len(COLUMNS)
    now = trace.begin
    for moment in sorted({*changes, trace.end}):
        place = next((place for place, count in enumerate(running) if count), _PLACE[GAP])
        sums[COLUMNS[place]] += moment - now
        for kind in TRANSFERS:
            if running[_PLACE[f"{kind}, moving"]] or running[_PLACE[f"{kind}, waiting"]]:
                sums[f"{kind}, {ALL}"] += moment - now
        for place, change in changes.get(moment, ()):
            running[place] += change
        now = moment
    return sums


def where_time_goes(traces: Sequence[Trace]) -> dict[str, float]:
    """Return the means of `rank_times`, whose sum over `COLUMNS` is the step, and hidden shares."""
    times = rank_times(traces)
    means = {name: sum(of_rank[name] for of_rank in times) / len(times) for name in times[0]}
    for kind in TRANSFERS:
        exposed = means[f"{kind}, moving"] + means[f"{kind}, waiting"]
        if total := means[f"{kind}, {ALL}"]:
            means[f"{kind}, {SHARE}"] = 1 - exposed / total
    return means


def table(
    ways: Mapping[str, Sequence[Trace]], *, layers: int, microbatches: int
) -> list[dict[str, Any]]:
    """Return a row for each column that a way spends time in, ways of training side by side."""
    if layers < 1 or microbatches < 1:
        raise ValueError(f"layers={layers}, microbatches={microbatches}: give 1 or more of each")
    times = {way: where_time_goes(traces) for way, traces in ways.items()}
    rows = []
    for name in dict.fromkeys(name for of_way in times.values() for name in of_way):
        row: dict[str, Any] = {NAME: name}
        is_time = not name.endswith(SHARE)
        for way, of_way in times.items():
            row[way] = value = of_way.get(name)
            part = value / layers / microbatches if is_time and value is not None else None
            row[f"{way}, per layer and microbatch"] = part
        if not is_time or any(row[way] for way in times):
            rows.append(row)
    return rows


def longest_others(traces: Sequence[Trace], count: int = 5) -> list[tuple[str, float]]:
    """Return names and milliseconds, mean over ranks, of the longest kernels in "other compute"."""
    sums: Counter[str] = Counter()
    for event in itertools.chain.from_iterable(trace.events for trace in traces):
        if event.kind == OTHER:
            sums[event.name] += event.end - event.begin
    return [(name, total / 1e6 / len(traces)) for name, total in sums.most_common(count)]


def read_folder(folder: Path) -> dict[str, list[Trace]]:
    """Read all traces of ``folder``, by way of training (stock first) and rank."""
    paths: defaultdict[str, list[tuple[int, Path]]] = defaultdict(list)
    for path in folder.glob("*"):
        if match := _FILE.fullmatch(path.name):
            paths[match["way"]].append((int(match["rank"]), path))
    if not paths:
        raise ValueError(f"{folder} has no traces NAME-rank<r>.json.gz; run bench/node.py first")
    for way, numbered in paths.items():
        numbered.sort()
        ranks = [rank for rank, _ in numbered]
        if ranks != list(range(len(ranks))):
            raise ValueError(f"{folder}: {way} has ranks {ranks}; give a trace of each from 0 on")
    ways = sorted(paths, key=lambda way: (way != "stock", way))
    with ProcessPoolExecutor() as pool:
        return {way: list(pool.map(read, [path for _, path in paths[way]])) for way in ways}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of traces NAME-rank<r>.json.gz")
    parser.add_argument("--layers", type=int, required=True, help="layers of a rank")
    parser.add_argument("--microbatches", type=int, required=True, help="microbatches of the step")
    parser.add_argument("--ranks", action="store_true", help="print each rank's times too")
    arguments = parser.parse_args(argv)
    try:
        ways = read_folder(arguments.folder)
        rows = table(ways, layers=arguments.layers, microbatches=arguments.microbatches)
    except ValueError as error:
        parser.error(str(error))
    step = Table("where the time of a step goes, mean over ranks")
    for row in rows:
        step.add(**row)
    for way, traces in ways.items():
        if arguments.ranks:
            by_rank = Table(f"ms of a step by rank, {way}")
            for rank, times in enumerate(rank_times(traces)):
                by_rank.add(rank=rank, **{row[NAME]: times.get(row[NAME]) for row in rows})
        others = Table(f"longest of {OTHER}, {way}: for `KERNELS` of bench/node_spans.py")
        for kernel, milliseconds in longest_others(traces):
            others.add(kernel=kernel[:120], ms=milliseconds)


if __name__ == "__main__":
    main()
