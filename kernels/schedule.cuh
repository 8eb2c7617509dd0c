// What a transfer does, as every rank is told, and the walk through it. No #include: nvcc, NVRTC and g++ compile the
// same text. Every decision is taken here and in the three files beside it (which tile, which flag, which order, what is
// left at the end of a chunk); `Thread`, the execution policy, only knows how to load, store and wait.
//
// A transfer is a few steps. In each, a rank reads what others have (it *pulls*); what one step writes, others may read
// in the next. So that nobody reads too early or overwrites too early, every rank tells those it deals with how many
// steps it has finished: one counter per pair of ranks, `progress`, which only grows (signals.cuh).
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define FSSDP_FN __device__ __forceinline__
#define FSSDP_UNROLL _Pragma("unroll")
#define FSSDP_UNROLL_4 _Pragma("unroll 4")
#define FSSDP_UNROLL_8 _Pragma("unroll 8")
#define FSSDP_ROLLED _Pragma("unroll 1")
#else
#define FSSDP_FN inline
#define FSSDP_UNROLL
#define FSSDP_UNROLL_4
#define FSSDP_UNROLL_8
#define FSSDP_ROLLED
#endif

namespace fssdp {

typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;

enum { MAX_RANKS = 72, MAX_STEPS = 4, VECTOR = 16 };  // VECTOR: bytes per access
#ifndef FSSDP_TILE
#define FSSDP_TILE 65536
#endif
enum { TILE = FSSDP_TILE };  // bytes a block copies, or reads of every source, between two looks at the schedule
enum { LOCAL = -1 };         // the source is on this rank, and ready

// Copy `bytes` from `src`, on `rank` or LOCAL, to `dst`. Addresses as this rank sees them, of any alignment.
struct Copy {
  u64 src, dst, bytes;
  i32 rank;
  u32 first_tile;  // tiles of the copies before it in the step
};

// One gradient of a sum.
struct Source {
  u64 src;
  i32 rank;
  u32 reserved;
};

// dst[i] = s0[i] + s1[i] + ... for `elements`, all fp32, in order of the sources. dst may be one of its own sources.
struct Sum {
  u64 dst, elements;
  u32 first_source, sources;
  u32 first_tile, flags;
};
enum { ADD = 1 };  // flags: dst[i] += the sum

// What one rank does in one step; copies and sums are arrays in this rank's memory.
struct Step {
  const void* items;  // Copy or Sum
  const Source* sources;
  u32 count, tiles;
};

// A set of ranks.
struct Ranks {
  u64 low, high;  // a bit each
};

// Why a wait ended without its signal.
struct Failure {
  u32 failed, rank, peer, expected, seen, begin;  // expected and seen: steps since begin, which tells the transfer
};

struct Transfer {
  u32* progress;                     // [world]: what others told this rank
  u32* progress_at[MAX_RANKS];       // where to tell them: their `progress`
  u32* arrived;                      // [MAX_STEPS] blocks that finished a step; zero before and after
  Failure* failure;
  Ranks peers;                       // whom this rank reads from, or is read by
  u64 timeout;                       // per wait, in ticks of the policy's clock
  Step steps[MAX_STEPS];
  u32 num_steps;
  u32 begin;                         // progress before the first step, the same on all ranks
  i32 rank, world;
};

FSSDP_FN bool has(const Ranks& ranks, i32 rank) {
  return ((rank < 64 ? ranks.low >> rank : ranks.high >> (rank - 64)) & 1ull) != 0;
}
FSSDP_FN void put(Ranks& ranks, i32 rank) {
  if (rank < 64)
    ranks.low |= 1ull << rank;
  else
    ranks.high |= 1ull << (rank - 64);
}

// The part of an item that one tile covers, in bytes of `size`.
struct Span {
  u64 begin, length;
};
FSSDP_FN Span span(u64 size, u32 tile, u32 first_tile) {
  const u64 begin = (u64)(tile - first_tile) * TILE;
  return {begin, size - begin < TILE ? size - begin : (u64)TILE};
}

// Moves to the item that `tile` belongs to; tiles of a block ascend, so it never goes back.
template <class Item>
FSSDP_FN u32 seek(const Item* items, u32 count, u32 at, u32 tile) {
  while (at + 1 < count && items[at + 1].first_tile <= tile) ++at;
  return at;
}

}  // namespace fssdp
