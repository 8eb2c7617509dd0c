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

// The sum starts with the first source, not with 0: 0 + -0.0 is not -0.0.
template <class Wire, int IN_FLIGHT, class Thread>
FSSDP_FN void sum_vector(Thread& th, const Sum& s, const Source* sources, u64 element) {
  enum { N = Wire::PER_VECTOR };
  float total[N];
  for (u32 first = 0; first < s.sources; first += IN_FLIGHT) {
    Vector held[IN_FLIGHT];
    FSSDP_UNROLL
    for (int k = 0; k < IN_FLIGHT; ++k)
      if (first + k < s.sources) held[k] = th.load((const Vector*)(sources[first + k].src + element * Wire::BYTES));
    FSSDP_UNROLL
    for (int k = 0; k < IN_FLIGHT; ++k)
      if (first + k < s.sources) {
        FSSDP_UNROLL
        for (int i = 0; i < N; ++i)
          total[i] = first + k == 0 ? Wire::element(held[k], i) : total[i] + Wire::element(held[k], i);
      }
  }
  const bool add = s.flags & ADD;
  Vector* dst = (Vector*)(s.dst + element * 4);
  FSSDP_UNROLL
  for (int part = 0; part < N / 4; ++part) {
    Vector out;
    if (add) out = th.load(dst + part);
    FSSDP_UNROLL
    for (int i = 0; i < 4; ++i)
      out.word[i] = as_bits(add ? as_float(out.word[i]) + total[4 * part + i] : total[4 * part + i]);
    th.store(dst + part, out);
  }
}

template <class Wire, class Thread>
FSSDP_FN void sum_element(Thread& th, const Sum& s, const Source* sources, u64 element) {
  float total = Wire::load(th, sources[0].src + element * Wire::BYTES);
  for (u32 k = 1; k < s.sources; ++k) total += Wire::load(th, sources[k].src + element * Wire::BYTES);
  const bool add = s.flags & ADD;
  u32* dst = (u32*)(s.dst + element * 4);
  th.store(dst, as_bits(add ? as_float(th.load(dst)) + total : total));
}

// One tile, by the whole block.
template <class Wire, int IN_FLIGHT, class Thread>
FSSDP_FN void sum_tile(Thread& th, const Sum& s, const Source* sources, u32 tile, bool vectors) {
  const Span part = span(s.elements * Wire::BYTES, tile, s.first_tile);
  const u64 begin = part.begin / Wire::BYTES, length = part.length / Wire::BYTES;
  const u64 whole = vectors ? length / Wire::PER_VECTOR : 0;
  for (u64 v = th.id(); v < whole; v += th.count())
    sum_vector<Wire, IN_FLIGHT>(th, s, sources, begin + v * Wire::PER_VECTOR);
  for (u64 e = whole * Wire::PER_VECTOR + th.id(); e < length; e += th.count())
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
    const Sum s = items[at];
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
