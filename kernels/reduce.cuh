// The sums of a step: one pass over fp32 memory, in a fixed order of sources, so bitwise the same in every run.
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

// What travels: how many elements a Vector has, and what they are.
struct Fp32 {
  enum { BYTES = 4, PER_VECTOR = 4 };
  FSSDP_FN static float element(const Vector& v, int i) { return as_float(v.word[i]); }
  template <class Thread>
  FSSDP_FN static float load(Thread& th, u64 address) { return as_float(th.load((const u32*)address)); }
};
struct Bf16 {
  enum { BYTES = 2, PER_VECTOR = 8 };
  FSSDP_FN static float element(const Vector& v, int i) {
    const u32 word = v.word[i / 2];
    return as_float(i % 2 ? word & 0xffff0000u : word << 16);
  }
  template <class Thread>
  FSSDP_FN static float load(Thread& th, u64 address) { return as_float((u32)th.load((const u16*)address) << 16); }
};

// -0.0: adding it to a number changes nothing, not even 0.
enum : u32 { NOTHING = 0x80000000u };

template <int VECTORS, class Thread>
FSSDP_FN void load_all(Thread& th, Vector* held, u64 address, u32 stride) {
  FSSDP_UNROLL
  for (int v = 0; v < VECTORS; ++v) held[v] = th.load((const Vector*)address + v * stride);
}

// VECTORS vectors of every source, the block's threads apart, from `element` on. A thread waits for a source when it has
// asked for all vectors of it; for the first fp32 source when it has asked for those of the destination and, if there
// is one, of the second source too.
template <class Wire, int VECTORS, class Thread>
FSSDP_FN void sum_vectors(Thread& th, const Sum& s, const Source* sources, u64 element) {
  enum { N = Wire::PER_VECTOR, PARTS = N / 4 };  // PARTS: vectors of the sum to one of a source
  const u32 stride = th.count();
  const u64 offset = element * Wire::BYTES;
  float total[VECTORS][N];
  Vector held[VECTORS];
  load_all<VECTORS>(th, held, sources[0].src + offset, stride);
  FSSDP_UNROLL
  for (int v = 0; v < VECTORS; ++v) {
    FSSDP_UNROLL
    for (int i = 0; i < N; ++i) total[v][i] = Wire::element(held[v], i);
  }
  FSSDP_ROLLED
  for (u32 k = 1; k < s.sources; ++k) {
    load_all<VECTORS>(th, held, sources[k].src + offset, stride);
    FSSDP_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
      FSSDP_UNROLL
      for (int i = 0; i < N; ++i) total[v][i] = total[v][i] + Wire::element(held[v], i);
    }
  }
  FSSDP_UNROLL
  for (int part = 0; part < PARTS; ++part) {
    const u64 dst = s.dst + element * 4 + part * VECTOR;
    Vector out[VECTORS];
    FSSDP_UNROLL
    for (int v = 0; v < VECTORS; ++v) out[v] = {{NOTHING, NOTHING, NOTHING, NOTHING}};
    if (s.flags & ADD) load_all<VECTORS>(th, out, dst, stride * PARTS);
    FSSDP_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
      FSSDP_UNROLL
      for (int i = 0; i < 4; ++i) out[v].word[i] = as_bits(as_float(out[v].word[i]) + total[v][4 * part + i]);
      th.store((Vector*)dst + v * stride * PARTS, out[v]);
    }
  }
}

template <class Wire, class Thread>
FSSDP_FN void sum_element(Thread& th, const Sum& s, const Source* sources, u64 element) {
  float total = Wire::load(th, sources[0].src + element * Wire::BYTES);
  FSSDP_ROLLED
  for (u32 k = 1; k < s.sources; ++k) total += Wire::load(th, sources[k].src + element * Wire::BYTES);
  const bool add = s.flags & ADD;
  u32* dst = (u32*)(s.dst + element * 4);
  th.store(dst, as_bits(add ? as_float(th.load(dst)) + total : total));
}

// One tile, by the whole block.
template <class Wire, int IN_FLIGHT, class Thread>
FSSDP_FN void sum_tile(Thread& th, const Sum& s, const Source* sources, u32 tile, bool vectors) {
  const Span part = span(s.elements * Wire::BYTES, tile, s.first_tile);
  const u64 begin = part.begin / Wire::BYTES;
  const u32 length = (u32)part.length / Wire::BYTES, stride = th.count();
  const u32 whole = vectors ? length / Wire::PER_VECTOR : 0u;
  u32 v = th.id();
  FSSDP_ROLLED
  for (; v + (IN_FLIGHT - 1) * stride < whole; v += IN_FLIGHT * stride)
    sum_vectors<Wire, IN_FLIGHT>(th, s, sources, begin + (u64)v * Wire::PER_VECTOR);
  FSSDP_ROLLED
  for (; v < whole; v += stride) sum_vectors<Wire, 1>(th, s, sources, begin + (u64)v * Wire::PER_VECTOR);
  for (u32 e = whole * Wire::PER_VECTOR + th.id(); e < length; e += stride)
    sum_element<Wire>(th, s, sources, begin + e);
}

template <int IN_FLIGHT, class Thread>
FSSDP_FN bool sums(Thread& th, const Transfer& t, u32 step) {
  const Step& todo = t.steps[step];
  const Sum* items = (const Sum*)todo.items;
  Ranks ready = {0, 0};
  u32 at = 0;
  for (u32 tile = th.block(); tile < todo.tiles; tile += th.blocks()) {
    at = seek(items, todo.count, at, tile);
    const Sum& s = items[at];
    const Source* sources = todo.sources + s.first_source;
    bool vectors = aligned(s.dst, 0);
    for (u32 k = 0; k < s.sources; ++k) {
      vectors = vectors && aligned(sources[k].src, 0);
      if (!await_source(th, t, sources[k].rank, step, ready)) return false;
    }
    if (s.flags & BF16)
      sum_tile<Bf16, IN_FLIGHT>(th, s, sources, tile, vectors);
    else
      sum_tile<Fp32, IN_FLIGHT>(th, s, sources, tile, vectors);
  }
  return true;
}

}  // namespace fssdp
