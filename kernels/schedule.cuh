// Description of a transfer, and iteration over its tiles. Without an #include, so that nvcc, NVRTC
// and g++ compile the same text. This file, signals.cuh, gather.cuh and reduce.cuh decide the
// tiles, flags, order and remainders; `Thread`, the execution policy, only loads, stores and waits.
//
// A transfer has a few steps. In each step a rank reads from its peers' memory (it *pulls*). Peers
// may read in the next step the bytes that this step wrote. To prevent early reads and early
// overwrites, every rank signals the number of steps that it has finished to each of its peers: one
// counter per pair of ranks, `progress`, which only increases (signals.cuh).
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

// VECTOR: bytes per access.
enum { MAX_RANKS = 72, MAX_STEPS = 4, VECTOR = 16 };
#ifndef FSSDP_TILE
#define FSSDP_TILE 65536
#endif
// Bytes that a block copies, or reads from every source, between two lookups in the schedule.
enum { TILE = FSSDP_TILE };
// Instead of a rank: the source is on this rank, and ready.
enum { LOCAL = -1 };

// Source of an item: memory of this rank, or of a peer. Addresses are in this rank's address space,
// with any alignment.
struct Source {
  u64 src;
  i32 rank;  // or LOCAL
  u32 reserved;
};

// Copy of `bytes` from the only source to `dst`; or sum dst[i] = s0[i] + s1[i] + ... of fp32 in the
// order of the sources, of which the destination may be one.
struct Item {
  u64 dst, bytes;
  u32 first_source, sources;
  u32 first_tile;  // number of tiles of the step's earlier items
  u32 flags;
};
enum { ADD = 1 };  // flags: dst[i] += the sum

// Work of one rank in one step: arrays of `count` items and of their sources, at offsets from the
// `Transfer` in bytes.
struct Step {
  u64 items, sources;
  u32 count, tiles;
};

// Set of ranks, one bit per rank.
struct Ranks {
  u64 low, high;
};

// Record of a wait that timed out. `expected` and `seen` count steps from `begin`, which identifies
// the transfer.
struct Failure {
  u32 failed, rank, peer, expected, seen, begin;
};

struct Transfer {
  u32* progress;                     // [world] by peer: steps that it has finished
  u32* progress_at[MAX_RANKS];       // by peer: address of its `progress`
  u32* arrived;                      // [MAX_STEPS] blocks that finished a step; 0 between transfers
  Failure* failure;
  Ranks peers;                       // ranks that this rank reads from, or that read from it
  u64 timeout;                       // per wait, in ticks of the policy's clock
  Step steps[MAX_STEPS];
  u32 num_steps;
  u32 begin;                         // progress before the first step, the same on all ranks
  i32 rank, world;
};

FSSDP_FN const Item* items_of(const Transfer& t, u32 step) { return (const Item*)((const char*)&t + t.steps[step].items); }
FSSDP_FN const Source* sources_of(const Transfer& t, u32 step) {
  return (const Source*)((const char*)&t + t.steps[step].sources);
}

FSSDP_FN bool has(const Ranks& ranks, i32 rank) {
  return ((rank < 64 ? ranks.low >> rank : ranks.high >> (rank - 64)) & 1ull) != 0;
}
FSSDP_FN void put(Ranks& ranks, i32 rank) {
  if (rank < 64)
    ranks.low |= 1ull << rank;
  else
    ranks.high |= 1ull << (rank - 64);
}

// Part of an item's `size` bytes that one tile covers.
struct Span {
  u64 begin, length;
};
FSSDP_FN Span span(u64 size, u32 tile, u32 first_tile) {
  const u64 begin = (u64)(tile - first_tile) * TILE;
  return {begin, size - begin < TILE ? size - begin : (u64)TILE};
}

// Advance to the item that contains `tile`. Tiles of a block ascend, so the index never decreases.
FSSDP_FN u32 seek(const Item* items, u32 count, u32 at, u32 tile) {
  while (at + 1 < count && items[at + 1].first_tile <= tile) ++at;
  return at;
}

}  // namespace fssdp
