// The copies of a spAG.
#pragma once
#include "signals.cuh"

namespace fssdp {

struct alignas(VECTOR) Vector {
  u32 word[4];
};

FSSDP_FN bool aligned(u64 a, u64 b) { return ((a | b) & (VECTOR - 1)) == 0; }

// Copy `length` bytes with the whole block, with IN_FLIGHT loads in flight per thread.
template <int IN_FLIGHT, class Thread>
FSSDP_FN void copy(Thread& th, u64 dst, u64 src, u32 length) {
  const u32 stride = th.count(), vectors = aligned(dst, src) ? length / VECTOR : 0u;
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
  for (u32 b = vectors * VECTOR + th.id(); b < length; b += stride)
    th.store((unsigned char*)dst + b, th.load((const unsigned char*)src + b));
}

// The copies of a spAG on this rank. `away`: those of chunks whose home is in another domain, after
// their stripes have arrived; else all others.
template <int IN_FLIGHT, class Thread>
struct Copies {
  Thread& th;
  const Transfer& t;
  const Table plan;
  bool away;

  FSSDP_FN void run(u32 step) {
    Turns turns = {th.block(), 0};
    if (step == PACK) pack(turns);
    if (step == FETCH) fetch(turns);
    if (step == EXCHANGE) exchange(turns);
  }

  // Copy `span` of a chunk; `dst`, `src`: where the chunk begins, or would begin.
  FSSDP_FN void pull(Turns& turns, Span span, u64 dst, u64 src) {
    turns.deal(th, span.end - span.begin, TILE, [&](Span tile) {
      const u64 begin = span.begin + (u64)tile.begin;
      copy<IN_FLIGHT>(th, dst + begin, src + begin, tile.end - tile.begin);
    });
  }
  FSSDP_FN void pack(Turns& turns) {
    FSSDP_ROLLED
    for (i32 k = 0; k < plan.homes(); ++k) {
      const i32 index = plan.home(k).index;
      u32 begin = 0;
      FSSDP_ROLLED
      for (u32 tensor = 0; tensor < t.tensors; ++tensor) {
        const u32 end = t.ends[tensor];
        const u64 from = t.homes[(u64)index * t.tensors + tensor] - begin;
        pull(turns, {begin, end}, chunk_at(t, t.send, t.rank, index), from);
        begin = end;
      }
    }
  }
  FSSDP_FN void fetch(Turns& turns) {
    FSSDP_ROLLED
    for (i32 k = 0; k < plan.slots(); ++k) {
      const Filled filled = plan.filled(k);
      const Chunk chunk = plan.chunk(filled.chunk);
      if (chunk.stripe >= 0) continue;
      const u64 to = chunk_at(t, t.slots, t.rank, filled.slot);
      pull(turns, part(t, filled.position, chunk.count), to, chunk_at(t, t.send, chunk.home, chunk.index));
    }
    FSSDP_ROLLED
    for (i32 k = 0; k < plan.stripes() && t.rank < plan.carriers(); ++k) {
      const Chunk chunk = plan.crossing(k);
      if (chunk.home < 0) continue;
      const Span span = part(t, t.rank, plan.carriers());
      const u64 to = chunk_at(t, t.stripes, t.rank, chunk.stripe) - span.begin;
      pull(turns, span, to, chunk_at(t, t.send, chunk.home, chunk.index));
    }
  }
  FSSDP_FN void exchange(Turns& turns) {
    FSSDP_ROLLED
    for (i32 k = 0; k < plan.slots(); ++k) {
      const Filled filled = plan.filled(k);
      const Chunk chunk = plan.chunk(filled.chunk);
      if (away != (chunk.home < 0)) continue;
      const bool crosses = chunk.stripe >= 0;
      const i32 count = crosses ? plan.carriers() : chunk.count, before = crosses ? t.rank : filled.position;
      // The last part is this rank's own, which is in the slot unless the chunk crosses.
      FSSDP_ROLLED
      for (i32 turn = 1; turn < count + crosses; ++turn) {
        const i32 number = (before + turn) % count;
        const Span span = part(t, number, count);
        const Receiver peer = plan.receiver(chunk.first + (crosses ? 0 : number));
        const u64 from = crosses ? chunk_at(t, t.stripes, number, chunk.stripe) - span.begin
                                 : chunk_at(t, t.slots, peer.rank, peer.slot);
        pull(turns, span, chunk_at(t, t.slots, t.rank, filled.slot), from);
      }
    }
  }
};

}  // namespace fssdp
