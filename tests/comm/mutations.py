"""Bugs to plant in the kernels, one at a time; the host runs of ``test_kernels.py`` must catch each."""

from __future__ import annotations

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
