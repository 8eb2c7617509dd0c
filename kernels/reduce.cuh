// Sums of a step: one pass over fp32 memory. The order of the sources is fixed, so the result is
// bitwise repeatable.
#pragma once
#include "gather.cuh"

namespace fssdp {

FSSDP_FN float as_float(u32 bits) {
  union {
    u32 bits;
    float value;
  } cast;
  cast.bits = bits;
  return cast.value;
}
FSSDP_FN u32 as_bits(float value) {
  union {
    float value;
    u32 bits;
  } cast;
  cast.value = value;
  return cast.bits;
}
FSSDP_FN u32 sum_of(u32 a, u32 b) { return as_bits(as_float(a) + as_float(b)); }

template <int VECTORS, class Thread>
FSSDP_FN void load_all(Thread& th, Vector* held, u64 address, u32 stride) {
  FSSDP_UNROLL
  for (int v = 0; v < VECTORS; ++v) held[v] = th.load((const Vector*)address + v * stride);
}
template <int VECTORS, class Thread>
FSSDP_FN void store_all(Thread& th, const Vector* held, u64 address, u32 stride) {
  FSSDP_UNROLL
  for (int v = 0; v < VECTORS; ++v) th.store((Vector*)address + v * stride, held[v]);
}
template <int VECTORS>
FSSDP_FN void add_all(Vector* total, const Vector* held) {
  FSSDP_UNROLL
  for (int v = 0; v < VECTORS; ++v) {
    FSSDP_UNROLL
    for (int i = 0; i < 4; ++i) total[v].word[i] = sum_of(total[v].word[i], held[v].word[i]);
  }
}

// Operands: the sources in order, and last the destination if the sum is added to it.
FSSDP_FN u32 terms(const Item& s) { return s.sources + (s.flags & ADD ? 1u : 0u); }
FSSDP_FN u64 term(const Item& s, const Source* sources, u32 k) { return k < s.sources ? sources[k].src : s.dst; }

// Sum VECTORS vectors of all terms per thread, from byte `at` on, with a stride of the block's
// threads. The loads of two terms are issued before the first is awaited; while one term is added,
// the loads of the next are in flight.
template <int VECTORS, class Thread>
FSSDP_FN void sum_vectors(Thread& th, const Item& s, const Source* sources, u64 at) {
  const u32 stride = th.count(), count = terms(s);
  Vector total[VECTORS], odd[VECTORS], even[VECTORS];
  load_all<VECTORS>(th, total, sources[0].src + at, stride);
  if (1 < count) load_all<VECTORS>(th, odd, term(s, sources, 1) + at, stride);
  FSSDP_ROLLED
  for (u32 k = 2; k - 1 < count; k += 2) {
    if (k < count) load_all<VECTORS>(th, even, term(s, sources, k) + at, stride);
    add_all<VECTORS>(total, odd);
    if (k >= count) break;
    if (k + 1 < count) load_all<VECTORS>(th, odd, term(s, sources, k + 1) + at, stride);
    add_all<VECTORS>(total, even);
  }
  store_all<VECTORS>(th, total, s.dst + at, stride);
}

// Sum one vector of all terms.
template <class Thread>
FSSDP_FN void sum_vector(Thread& th, const Item& s, const Source* sources, u64 at) {
  Vector total = th.load((const Vector*)(sources[0].src + at));
  FSSDP_ROLLED
  for (u32 k = 1; k < terms(s); ++k) {
    const Vector held = th.load((const Vector*)(term(s, sources, k) + at));
    add_all<1>(&total, &held);
  }
  th.store((Vector*)(s.dst + at), total);
}

template <class Thread>
FSSDP_FN void sum_element(Thread& th, const Item& s, const Source* sources, u64 at) {
  u32 total = th.load((const u32*)(sources[0].src + at));
  FSSDP_ROLLED
  for (u32 k = 1; k < terms(s); ++k) total = sum_of(total, th.load((const u32*)(term(s, sources, k) + at)));
  th.store((u32*)(s.dst + at), total);
}

// Sum one tile with the whole block.
template <int IN_FLIGHT, class Thread>
FSSDP_FN void sum_tile(Thread& th, const Item& s, const Source* sources, u32 tile, bool vectors) {
  const Span part = span(s.bytes, tile, s.first_tile);
  const u32 stride = th.count(), whole = vectors ? (u32)part.length / VECTOR : 0u;
  u32 v = th.id();
  FSSDP_ROLLED
  for (; v + (IN_FLIGHT - 1) * stride < whole; v += IN_FLIGHT * stride)
    sum_vectors<IN_FLIGHT>(th, s, sources, part.begin + (u64)v * VECTOR);
  FSSDP_ROLLED
  for (; v < whole; v += stride) sum_vector(th, s, sources, part.begin + (u64)v * VECTOR);
  for (u64 b = (u64)whole * VECTOR + th.id() * 4; b < part.length; b += stride * 4)
    sum_element(th, s, sources, part.begin + b);
}

// Wait, with the whole block, for the sources of all its tiles. A wait before the sum of each tile
// would keep the set of ready ranks in registers, which the loads in flight need.
template <class Thread>
FSSDP_FN bool await_sources(Thread& th, const Transfer& t, u32 step) {
  const Step& todo = t.steps[step];
  const Item* items = items_of(t, step);
  const Source* all_sources = sources_of(t, step);
  Ranks ready = {0, 0};
  u32 at = 0;
  FSSDP_ROLLED
  for (u32 tile = th.block(); tile < todo.tiles; tile += th.blocks()) {
    at = seek(items, todo.count, at, tile);
    FSSDP_ROLLED
    for (u32 k = 0; k < items[at].sources; ++k)
      if (!await_source(th, t, all_sources[items[at].first_source + k].rank, step, ready)) return false;
  }
  return true;
}

template <int IN_FLIGHT, class Thread>
FSSDP_FN bool sums(Thread& th, const Transfer& t, u32 step) {
  if (!await_sources(th, t, step)) return false;
  const Step& todo = t.steps[step];
  const Item* items = items_of(t, step);
  u32 at = 0;
  FSSDP_ROLLED
  for (u32 tile = th.block(); tile < todo.tiles; tile += th.blocks()) {
    at = seek(items, todo.count, at, tile);
    const Item& s = items[at];
    const Source* sources = sources_of(t, step) + s.first_source;
    bool vectors = aligned(s.dst, 0);
    FSSDP_ROLLED
    for (u32 k = 0; k < s.sources; ++k) vectors = vectors && aligned(sources[k].src, 0);
    sum_tile<IN_FLIGHT>(th, s, sources, tile, vectors);
  }
  return true;
}

}  // namespace fssdp
