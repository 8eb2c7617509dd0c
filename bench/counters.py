"""Read hardware counters of the quotas and of sums with Nsight Compute (``ncu``).

    python bench/counters.py

If ``ncu`` must not read counters (a driver that restricts counters, a sandbox), the table has one
row with the reason. The full output of ``ncu`` is written next to the rows of `gpu.py` as
``counters.csv``. Clocks are not locked.
"""

from __future__ import annotations

import csv
import functools
import io
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import rows  # noqa: E402

SECTIONS = [
    "SpeedOfLight",
    "LaunchStats",
    "Occupancy",
    "WarpStateStats",
    "InstructionStats",
    "MemoryWorkloadAnalysis",
]
REFUSED = ("ERR_NVGPUCTRPERM", "LibraryNotLoaded", "==ERROR==", "Device not supported")
# columns of the table by counter
SHOWN = {
    "gpu__time_duration.sum": "duration",
    "launch__grid_size": "blocks",
    "launch__registers_per_thread": "registers",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "SM, %",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory, %",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM, %",
    "smsp__inst_executed.sum": "instructions",
    "smsp__average_warps_issue_stalled_no_instruction_per_issue_active.ratio": "waits for code",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "waits for memory",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": "waits at barriers",
    "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio": (
        "waits for shared memory, shuffles"
    ),
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": "waits for results",
}


def target() -> None:
    """Launch the profiled kernels.

    The kernels are the quotas of 64 ranks with two slots and with one slot, and sums with 16 and
    with 132 blocks.
    """
    from routing import GROUPS, Case

    from kernels import EXPERTS, Bench

    device = torch.device("cuda")
    for slots in (2, 1):
        Case(GROUPS[0], slots, tokens=4096, device=device).parts()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        bench = Bench(device, EXPERTS["DeepSeek-V3"], sets=1)
        (launch,) = bench.launches("spRS")
        for blocks in (16, 132):
            launch(blocks)
            torch.cuda.synchronize()


def parse(text: str) -> list[dict[str, str]]:
    """Parse ncu's CSV; returns value and unit of each counter for every launch."""
    lines = text.splitlines()
    begin = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        return []
    names, units, *launches = csv.reader(io.StringIO("\n".join(lines[begin:])))
    join = functools.partial(map, lambda value, unit: f"{value} {unit}".strip())
    return [
        dict(zip(names, join(launch, units), strict=True))
        for launch in launches
        if len(launch) == len(names)
    ]


def main() -> None:
    """Profile and print the table."""
    if sys.argv[1:] == ["--target"]:
        target()
        return
    command = [
        "ncu",
        "--clock-control",
        "none",
        "--cache-control",
        "none",
        "--csv",
        "--page",
        "raw",
    ]
    # Only these kernels: profiling replays each kernel many times.
    command += ["--kernel-name", "regex:fssdp_(quotas|reduce)"]
    for section in SECTIONS:
        command += ["--section", section]
    done = subprocess.run(
        [*command, sys.executable, __file__, "--target"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = parse(done.stdout)
    if not found:
        output = done.stdout + done.stderr
        why = f"exit status {done.returncode}: {output.strip()[-300:]}"
        for line in output.splitlines():
            if any(word in line for word in REFUSED):
                why = line
                break
        rows.Table("ncu").add(ncu="cannot profile here", why=why)
        return
    if name := os.environ.get(rows.FILE):
        Path(name).with_name("counters.csv").write_text(done.stdout)
    table = rows.Table("counters")
    for launch in found:
        table.add(
            kernel=launch.get("Kernel Name", ""),
            **{text: launch.get(name, "") for name, text in SHOWN.items()},
        )


if __name__ == "__main__":
    main()
