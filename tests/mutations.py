"""Plants bugs in the kernels, one at a time, and checks that the host runs of ``test_kernels.py`` catch each.

    python tests/mutations.py

A bug is caught when a sanitizer complains, a value is wrong, or the run does not end. Each gets up to 6 runs, of
different placements, since what sanitizers see depends on the threads' timing. Takes about 10 minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_kernels import build_selftest, run_selftest, write_script  # noqa: E402

from megatron_hecate import compile as kernels  # noqa: E402

RUNS = 6
# name: (file, text, its replacement, sanitizer)
# fmt: off
MUTATIONS: dict[str, tuple[str, str, str, str]] = {
    "acquire is relaxed": ("host.cpp", "__atomic_load_n(at, __ATOMIC_ACQUIRE)", "__atomic_load_n(at, __ATOMIC_RELAXED)", "thread"),
    "release is relaxed": ("host.cpp", "value, __ATOMIC_RELEASE)", "value, __ATOMIC_RELAXED)", "thread"),
    "blocks arrive relaxed": ("host.cpp", "__ATOMIC_ACQ_REL);\n  }\n  template", "__ATOMIC_RELAXED);\n  }\n  template", "thread"),
    "no wait for a source": ("gather.cuh", "if (!await_source(th, t, c.rank, step, ready)) return false;", "", "thread"),
    "no wait for a sum's sources": ("reduce.cuh", "if (!await_source(th, t, sources[k].rank, step, ready)) return false;", "", "thread"),
    "waits for the step before": ("signals.cuh", "await(th, t, source, t.begin + step)", "await(th, t, source, t.begin + step - 1)", "thread"),
    "waits for another rank": ("signals.cuh", "await(th, t, source,", "await(th, t, (source + 1) % t.world,", "thread"),
    "no barrier after a wait": ("signals.cuh", "return th.all(came);", "return came;", "thread"),
    "no barrier before arriving": ("signals.cuh", "  th.all(true);\n", "", "thread"),
    "the first block tells": ("signals.cuh", "== th.blocks() - 1", "== 0u", "thread"),
    "every block tells": ("signals.cuh", "if (th.all(last))", "if (th.all(true))", "thread"),
    "block 0 tells": ("signals.cuh", "if (th.all(last))", "if (th.all(true) && th.block() == 0)", "thread"),
    "arrivals are not reset": ("signals.cuh", "if (last) th.store_relaxed(t.arrived + step, 0u);", "", "thread"),
    "counters compare without wrapping": ("signals.cuh", "(i32)((seen = th.load_acquire(t.progress + peer)) - value) < 0", "(seen = th.load_acquire(t.progress + peer)) < value", "thread"),
    "the end is not awaited": ("transfer.cuh", "await_peers(th, t, t.num_steps)", "await_peers(th, t, 0)", "thread"),
    "the end is awaited one step early": ("transfer.cuh", "await_peers(th, t, t.num_steps)", "await_peers(th, t, t.num_steps - 1)", "thread"),
    "copies are announced before they are made": ("transfer.cuh", "tell(th, t, t.begin + steps);", "tell(th, t, t.begin + steps + 1);", "thread"),
    "copies do not wait for the peers' step": ("transfer.cuh", "await_peers(th, t, steps);", "await_peers(th, t, steps - 1);", "thread"),
    "steps are told one early": ("signals.cuh", "tell(th, t, t.begin + step + 1)", "tell(th, t, t.begin + step + 2)", "thread"),
    "the cursor is one tile late": ("schedule.cuh", "items[at + 1].first_tile <= tile", "items[at + 1].first_tile < tile", "address"),
    "tiles are whole at the end": ("schedule.cuh", "size - begin < TILE ? size - begin : (u64)TILE", "(u64)TILE", "address"),
    "the unrolled loop goes too far": ("gather.cuh", "i + (IN_FLIGHT - 1) * stride < vectors", "i + (IN_FLIGHT - 2) * stride < vectors", "address"),
    "the tail is dropped": ("gather.cuh", "b < length; b += stride", "b < (u64)vectors * VECTOR; b += stride", "address"),
    "the last source is dropped": ("reduce.cuh", "      if (first + k < s.sources) {", "      if (first + k + 1 < s.sources || first + k == 0) {", "address"),
    "a sum starts at zero over and over": ("reduce.cuh", "first + k == 0 ? Wire", "k == 0 ? Wire", "address"),
    "a sum's tail is dropped": ("reduce.cuh", "for (u64 e = whole * Wire::PER_VECTOR + th.id(); e < length;", "for (u64 e = whole * Wire::PER_VECTOR + th.id(); e < whole;", "address"),
    "sums replace what they should add to": ("reduce.cuh", "as_float(out.word[i]) + total[4 * part + i]", "total[4 * part + i]", "address"),
    "halves of a word change places": ("reduce.cuh", "i % 2 ? word & 0xffff0000u : word << 16", "i % 2 ? word << 16 : word & 0xffff0000u", "address"),
}


# fmt: on


def main() -> int:
    """Print a line per bug; 1 when some escapes."""
    escaped = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scripts = []
        for seed in range(RUNS):
            scripts.append(folder / f"script{seed}")
            write_script(scripts[-1], ranks=6, half=seed % 2 == 1, shift=seed // 2 % 2, seed=seed, blocks=3)
        for sanitizer in ("thread", "address"):
            program = build_selftest(folder, sanitizer)
            for script in scripts:
                assert run_selftest(program, script).stdout == "OK\n", "the kernels as they are must pass"
        for what, (file, text, replacement, sanitizer) in MUTATIONS.items():
            sources = folder / "mutated"
            shutil.rmtree(sources, ignore_errors=True)
            shutil.copytree(kernels.SOURCES, sources)
            source = (sources / file).read_text()
            assert source.count(text) == 1, f"{what}: {file} has {source.count(text)} times {text!r}"
            (sources / file).write_text(source.replace(text, replacement))
            program = build_selftest(sources, sanitizer, sources)
            verdict = next((v for v in (_verdict(program, script) for script in scripts) if v), None)
            print(f"{what:<40} {verdict or 'ESCAPED'}", flush=True)
            if verdict is None:
                escaped.append(what)
    print(f"{len(MUTATIONS) - len(escaped)} of {len(MUTATIONS)} caught")
    return 1 if escaped else 0


def _verdict(program: Path, script: Path) -> str | None:
    """What caught the bug, if something did."""
    try:
        done = run_selftest(program, script, timeout=60)
    except subprocess.TimeoutExpired:
        return "does not end"
    if done.returncode == 0:
        return None
    said = done.stdout + done.stderr
    found = [line for line in said.splitlines() if "WARNING:" in line or "ERROR:" in line or "runtime error" in line]
    return (found or said.splitlines() or ["died"])[0].split(" (pid")[0].strip("= ")[:70]


if __name__ == "__main__":
    sys.exit(main())
