"""Bugs to plant in the kernels, one at a time; the host runs of ``test_kernels.py`` must catch each."""

from __future__ import annotations

# name: (file, text, its replacement, sanitizer)
# fmt: off
MUTATIONS: dict[str, tuple[str, str, str, str]] = {
    "acquire is relaxed": ("host.cpp", "__atomic_load_n(at, __ATOMIC_ACQUIRE)", "__atomic_load_n(at, __ATOMIC_RELAXED)", "thread"),
    "release is relaxed": ("host.cpp", "value, __ATOMIC_RELEASE)", "value, __ATOMIC_RELAXED)", "thread"),
    "blocks arrive relaxed": ("host.cpp", "__ATOMIC_ACQ_REL);\n  }\n  template", "__ATOMIC_RELAXED);\n  }\n  template", "thread"),
    "no wait for a source": ("gather.cuh", "if (!await_source(th, t, from.rank, step, ready)) return false;", "", "thread"),
    "no wait for a sum's sources": ("reduce.cuh", "      if (!await_source(th, t, all_sources[items[at].first_source + k].rank, step, ready)) return false;", "      ;", "thread"),
    "waits for the step before": ("signals.cuh", "await(th, t, source, t.begin + step)", "await(th, t, source, t.begin + step - 1)", "thread"),
    "waits for another rank": ("signals.cuh", "await(th, t, source,", "await(th, t, (source + 1) % t.world,", "thread"),
    "no barrier after a wait": ("signals.cuh", "return th.all(th.id() != 0 || await(", "return (th.id() != 0 || await(", "thread"),
    "later steps wait no more than the first": ("signals.cuh", "step == 0 ||", "step <= 1 ||", "thread"),
    "the ranks do not meet": ("selftest.cpp", "run_synchronize(t, threads);", "", "thread"),
    "the first peer is not awaited": ("signals.cuh", "    if (has(t.peers, r) && !await", "    if (r > 0 && has(t.peers, r) && !await", "thread"),
    "the last peer is not awaited": ("signals.cuh", "    if (has(t.peers, r) && !await", "    if (r + 1 < t.world && has(t.peers, r) && !await", "thread"),
    "a thread waits for one peer only": ("signals.cuh", "    if (has(t.peers, r) && !await(th, t, r, t.begin + steps)) return;", "    if (has(t.peers, r)) { await(th, t, r, t.begin + steps); return; }", "thread"),
    "no barrier before arriving": ("signals.cuh", "  th.all(true);\n", "", "thread"),
    "the first block tells": ("signals.cuh", "== th.blocks() - 1", "== 0u", "thread"),
    "every block tells": ("signals.cuh", "if (th.all(last))", "if (th.all(true))", "thread"),
    "block 0 tells": ("signals.cuh", "if (th.all(last))", "if (th.all(true) && th.block() == 0)", "thread"),
    "arrivals are not reset": ("signals.cuh", "if (last) th.store_relaxed(t.arrived + step, 0u);", "", "thread"),
    "counters compare without wrapping": ("signals.cuh", "(i32)((seen = th.load_acquire(t.progress + peer)) - value) < 0", "(seen = th.load_acquire(t.progress + peer)) < value", "thread"),
    "the end is not awaited": ("transfer.cuh", "await_peers(th, t, t.num_steps)", "await_peers(th, t, 0)", "thread"),
    "the end is awaited one step early": ("transfer.cuh", "await_peers(th, t, t.num_steps)", "await_peers(th, t, t.num_steps - 1)", "thread"),
    "the first step is told at the barrier": ("transfer.cuh", "tell(th, t, t.begin);", "tell(th, t, t.begin + 1);", "thread"),
    "the barrier waits for nobody": ("transfer.cuh", "await_peers(th, t, 0u);", "await_peers(th, t, 0u - 1);", "thread"),
    "steps are told one early": ("signals.cuh", "tell(th, t, t.begin + step + 1)", "tell(th, t, t.begin + step + 2)", "thread"),
    "the cursor is one tile late": ("schedule.cuh", "items[at + 1].first_tile <= tile", "items[at + 1].first_tile < tile", "address"),
    "tiles are whole at the end": ("schedule.cuh", "size - begin < TILE ? size - begin : (u64)TILE", "(u64)TILE", "address"),
    "the unrolled loop goes too far": ("gather.cuh", "i + (IN_FLIGHT - 1) * stride < vectors", "i + (IN_FLIGHT - 2) * stride < vectors", "address"),
    "the tail is dropped": ("gather.cuh", "b < length; b += stride", "b < (u64)vectors * VECTOR; b += stride", "address"),
    "the last source is dropped": ("reduce.cuh", "const u32 stride = th.count(), count = terms(s);", "const u32 stride = th.count(), count = terms(s) - (s.sources > 2);", "address"),
    "a sum starts over with every source": ("reduce.cuh", "= sum_of(total[v].word[i], held[v].word[i]);", "= held[v].word[i];", "address"),
    "a sum adds to 0": ("reduce.cuh", "as_bits(as_float(a) + as_float(b))", "as_bits(0.0f + as_float(a) + as_float(b))", "address"),
    "the unrolled sum goes too far": ("reduce.cuh", "v + (IN_FLIGHT - 1) * stride < whole", "v + (IN_FLIGHT - 2) * stride < whole", "address"),
    "the unrolled sum leaves vectors out": ("reduce.cuh", "v += IN_FLIGHT * stride", "v += (IN_FLIGHT + 1) * stride", "address"),
    "single vectors run over": ("reduce.cuh", "for (; v < whole; v += stride)", "for (; v < whole + 1; v += stride)", "address"),
    "every second vector is the one before it": ("reduce.cuh", "(const Vector*)address + v * stride", "(const Vector*)address + v / 2 * 2 * stride", "address"),
    "later vectors come from the first source": ("reduce.cuh", "k < s.sources ? sources[k].src : s.dst", "k < s.sources ? sources[0].src : s.dst", "address"),
    "the last vector is not stored": ("reduce.cuh", "  for (int v = 0; v < VECTORS; ++v) th.store(", "  for (int v = 0; v < VECTORS - (VECTORS > 1); ++v) th.store(", "address"),
    "a sum's tail is dropped": ("reduce.cuh", "+ th.id() * 4; b < part.length;", "+ th.id() * 4; b < (u64)whole * VECTOR;", "address"),
    "sums replace what they should add to": ("reduce.cuh", "s.sources + (s.flags & ADD ? 1u : 0u)", "s.sources", "address"),
    "every second term is left out": ("reduce.cuh", "    add_all<VECTORS>(total, even);\n", "", "address"),
    "terms are loaded over those under way": ("reduce.cuh", "if (k < count) load_all<VECTORS>(th, even,", "if (k < count) load_all<VECTORS>(th, odd,", "address"),
}


# fmt: on
