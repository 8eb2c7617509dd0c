"""Bugs to plant in the kernels, one at a time; the host runs of ``test_kernels.py`` must catch each."""

from __future__ import annotations

# name: (file, text, its replacement, sanitizer)
# fmt: off
MUTATIONS: dict[str, tuple[str, str, str, str]] = {
    "acquire is relaxed": ("host.cpp", "__atomic_load_n(at, __ATOMIC_ACQUIRE)", "__atomic_load_n(at, __ATOMIC_RELAXED)", "thread"),
    "release is relaxed": ("host.cpp", "value, __ATOMIC_RELEASE)", "value, __ATOMIC_RELAXED)", "thread"),
    "blocks arrive relaxed": ("host.cpp", "__ATOMIC_ACQ_REL);\n  }\n  template", "__ATOMIC_RELAXED);\n  }\n  template", "thread"),
    "no wait before a step": ("transfer.cuh", "if (step > r.first && !await_all(th, r, step)) return;", "", "thread"),
    "the second step is not awaited": ("transfer.cuh", "if (step > r.first && !await", "if (step > r.first + 1 && !await", "thread"),
    "waits for the step before": ("transfer.cuh", "!await_all(th, r, step)", "!await_all(th, r, step - 1)", "thread"),
    "no barrier after a wait": ("signals.cuh", "return th.all(come);", "return come;", "thread"),
    "the ranks do not meet": ("selftest.cpp", "run_synchronize(t, position, threads);", "", "thread"),
    "the first peer is not awaited": ("signals.cuh", "i32 peer = (i32)th.id(); come &&", "i32 peer = 1 + (i32)th.id(); come &&", "thread"),
    "the last peer is not awaited": ("signals.cuh", "come && peer < r.t.world;", "come && peer < r.t.world - 1;", "thread"),
    "a thread waits for one peer only": ("signals.cuh", "come = await(th, r, peer, step);", "return th.all(await(th, r, peer, step));", "thread"),
    "no barrier before arriving": ("signals.cuh", "  th.all(true);\n", "", "thread"),
    "the first block tells": ("signals.cuh", "== th.blocks() - 1", "== 0u", "thread"),
    "every block tells": ("signals.cuh", "if (th.all(last))", "if (th.all(true))", "thread"),
    "block 0 tells": ("signals.cuh", "if (th.all(last))", "if (th.all(true) && th.block() == 0)", "thread"),
    "arrivals are not reset": ("signals.cuh", "if (last) th.store_relaxed(r.t.arrived + step, 0u);", "", "thread"),
    "counters compare without wrapping": ("signals.cuh", "(i32)((seen = th.load_acquire(r.t.progress + peer)) - r.begin - step) < 0", "(seen = th.load_acquire(r.t.progress + peer)) < r.begin + step", "thread"),
    "the end is not awaited": ("transfer.cuh", "await_all(th, r, (u32)Kind::STEPS)", "await_all(th, r, 0)", "thread"),
    "the end is awaited one step early": ("transfer.cuh", "await_all(th, r, (u32)Kind::STEPS)", "await_all(th, r, (u32)Kind::STEPS - 1)", "thread"),
    "the first step is told at the barrier": ("transfer.cuh", "tell(th, r, 0u);", "tell(th, r, 1u);", "thread"),
    "the barrier waits for nobody": ("transfer.cuh", "await_all(th, r, 0u);", "await_all(th, r, 0u - 1);", "thread"),
    "steps are told one early": ("signals.cuh", "tell(th, r, step + 1)", "tell(th, r, step + 2)", "thread"),
    "tiles are whole at the end": ("schedule.cuh", "size - begin < tile ? size : begin + tile", "begin + tile", "address"),
    "a pull continues the tiles of the one before": ("schedule.cuh", "    first = end;\n", "", "address"),
    "parts are one grain short": ("schedule.cuh", "return begin < size ? begin : size;", "return number && begin < size ? begin - GRAIN * (begin > 0) : begin < size ? begin : size;", "address"),
    "parts of another count": ("gather.cuh", "pull(turns, part(t, filled.position, chunk.count), to,", "pull(turns, part(t, filled.position, chunk.count + 1), to,", "address"),
    "the last part is not exchanged": ("gather.cuh", "turn < count + crosses; ++turn", "turn < count + crosses - 1; ++turn", "address"),
    "the last tensor is not packed": ("gather.cuh", "tensor < t.tensors; ++tensor", "tensor + 1 < t.tensors; ++tensor", "address"),
    "the unrolled loop goes too far": ("gather.cuh", "i + (IN_FLIGHT - 1) * stride < vectors", "i + (IN_FLIGHT - 2) * stride < vectors", "address"),
    "the tail is dropped": ("gather.cuh", "b < length; b += stride", "b < vectors * VECTOR; b += stride", "address"),
    "the last source is dropped": ("reduce.cuh", "for (i32 k = 2; k < count; ++k)", "for (i32 k = 2; k + 1 < count; ++k)", "address"),
    "a sum starts over with every source": ("reduce.cuh", "total[u].put(th, i, total[u].number(i) + next[u].number(i),", "total[u].put(th, i, next[u].number(i),", "address"),
    "the second source is left out": ("reduce.cuh", "count > 1 ? first[u].number(i) + next[u].number(i) : first[u].number(i),", "first[u].number(i),", "address"),
    "sums replace what they should add to": ("reduce.cuh", "sum.put(th, i, terms[u].number(i) + totals[u].number(i),", "sum.put(th, i, terms[u].number(i),", "address"),
    "a sum adds to 0": ("reduce.cuh", "    return as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);", "    return 0.0f + as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);", "address"),
    "bf16 is cut off": ("host.cpp", "(bits + 0x7fffu + (bits >> 16 & 1u)) >> 16", "bits >> 16", "address"),
    "bf16 rounds ties up": ("host.cpp", "0x7fffu + (bits >> 16 & 1u)", "0x8000u", "address"),
    "numbers change places": ("reduce.cuh", "i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16", "i % 2 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u", "address"),
    "batches go too far": ("reduce.cuh", "u + (UNITS - 1) * stride < units", "u + (UNITS - 2) * stride < units", "address"),
    "batches leave units out": ("reduce.cuh", "u += UNITS * stride) work", "u += (UNITS + 1) * stride) work", "address"),
    "single units run over": ("reduce.cuh", "for (; u < units; u += stride)", "for (; u < units + 1; u += stride)", "address"),
    "a sum's tail is dropped": ("reduce.cuh", "e < tile.end; e += stride", "e < tile.begin + units * N; e += stride", "address"),
    "the parts of other ranks are summed": ("reduce.cuh", "part(t, plan.filled(k).position, chunk.count)", "part(t, 0, chunk.count)", "address"),
    "a home collects one part less": ("reduce.cuh", "turn < count; ++turn", "turn + 1 < count; ++turn", "address"),
    "single gradients come from part buffers": ("reduce.cuh", "const bool summed = crosses || count > 1;", "const bool summed = true;", "address"),
}


# fmt: on
