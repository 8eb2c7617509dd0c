// The copies of a step.
#pragma once
#include "signals.cuh"

namespace fssdp {

struct alignas(VECTOR) Vector {
  u32 word[4];
};

FSSDP_FN bool aligned(u64 a, u64 b) { return ((a | b) & (VECTOR - 1)) == 0; }

// Copy `length` bytes with the whole block, with IN_FLIGHT loads in flight per thread.
template <int IN_FLIGHT, class Thread>
FSSDP_FN void copy(Thread& th, u64 dst, u64 src, u64 length) {
  const u32 stride = th.count(), vectors = aligned(dst, src) ? (u32)(length / VECTOR) : 0u;
  const Vector* from = (const Vector*)src;
  Vector* to = (Vector*)dst;
  u32 i = th.id();
  for (; i + (IN_FLIGHT - 1) * stride < vectors; i += IN_FLIGHT * stride) {
    Vector held[IN_FLIGHT];
    FSSDP_UNROLL
    for (int k = 0; k < IN_FLIGHT; ++k) held[k] = th.load(from + i + k * stride);
    FSSDP_UNROLL
    for (int k = 0; k < IN_FLIGHT; ++k) th.store(to + i + k * stride, held[k]);
  }
  for (; i < vectors; i += stride) th.store(to + i, th.load(from + i));
  // Byte by byte: the tail, or everything if the addresses are not aligned.
  for (u64 b = (u64)vectors * VECTOR + th.id(); b < length; b += stride)
    th.store((unsigned char*)dst + b, th.load((const unsigned char*)src + b));
}

template <int IN_FLIGHT, class Thread>
FSSDP_FN bool copies(Thread& th, const Transfer& t, u32 step) {
  const Step& s = t.steps[step];
  const Item* items = items_of(t, step);
  const Source* sources = sources_of(t, step);
  Ranks ready = {0, 0};
  u32 at = 0;
  for (u32 tile = th.block(); tile < s.tiles; tile += th.blocks()) {
    at = seek(items, s.count, at, tile);
    const Item c = items[at];
    const Source from = sources[c.first_source];
    if (!await_source(th, t, from.rank, step, ready)) return false;
    const Span part = span(c.bytes, tile, c.first_tile);
    copy<IN_FLIGHT>(th, c.dst + part.begin, from.src + part.begin, part.length);
  }
  return true;
}

}  // namespace fssdp
