// Description of a transfer, which all ranks of an NVLink domain derive from the same plan. Without
// an #include, so that nvcc, NVRTC and g++ compile the same text. This file, signals.cuh,
// gather.cuh, reduce.cuh and transfer.cuh decide tiles, order and remainders; `Thread`, the
// execution policy, only loads, stores and waits.
//
// A *chunk* is one expert's parameters, or its gradient, laid end to end. A *receiver* is a replica:
// a rank and a slot. A chunk is divided into parts. The *carriers* of the parts are the receivers
// of the chunk, one part each; where the chunk crosses to other domains, the first ranks of the
// domain, and parts are stripes. A transfer has a few steps. In each step a rank reads from its
// peers' memory (it *pulls*).
//
// | | step | reads | into |
// |---|---|---|---|
// | spAG | PACK | parameters of the rank's own experts | its send buffer, visible to peers |
// | | FETCH | the part that this rank carries, from the send buffer of the home | slot |
// | | EXCHANGE | the other parts, from their carriers | slot |
// | spRS | SUM | the part that this rank carries of all receivers' gradients | part buffer |
// | | COLLECT | parts of the sum, from their carriers | the home's main gradient, added |
//
// So a home sends each chunk once, however many replicas it has, and a receiver once at most.
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

typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

// VECTOR: bytes per access. GRAIN: parts of a chunk begin at multiples of it, so that their
// addresses are aligned; bytes in a spAG, elements in a spRS.
enum { MAX_RANKS = 72, MAX_STEPS = 4, VECTOR = 16, GRAIN = 128 };
#ifndef FSSDP_TILE
#define FSSDP_TILE 65536
#endif
// Bytes of a source that a block reads in its turn.
enum { TILE = FSSDP_TILE };

enum Step : u32 { PACK, FETCH, EXCHANGE, GATHER_STEPS, SUM = PACK, COLLECT, REDUCE_STEPS };

// Record of a wait that timed out, in the host's memory. `failed`: see `State`. `expected` and `seen`
// count steps; `id`: see `Progress`.
enum State : u32 { FAILED = 1, WRITING, ENDED };  // ENDED: by the host, which needs no data any more
struct Failure {
  u32 failed, rank, peer, expected, seen, id;
};

// Chunks in memory: the first one's address, and bytes from chunk to chunk.
struct Chunks {
  u64 first, stride;
};

// Memory of a layer's transfers in one direction on this rank, constant as long as it stays where
// it is. Peers have the same layout, at a distance. Ranks are numbered within the domain.
struct Transfer {
  u32* progress;                  // [world] by peer: steps that it has finished
  i64 distance[MAX_RANKS];        // by peer: from this rank's memory to its memory
  u32* arrived;                   // [MAX_STEPS] blocks that finished a step; 0 between transfers
  Failure* failure;
  const u32* epoch;               // progress from which positions count
  u64 timeout;                    // per wait, in ticks of the policy's clock
  const i32* table;               // copies of the current plan, see `Table`
  const u64* homes;               // [own experts, tensors] addresses
  const u32* ends;                // [tensors] where each ends in a chunk
  Chunks send, slots;
  Chunks parts, stripes;          // by slot, and by number of stripe
  u32 size;                       // of a chunk: bytes in a spAG, elements in a spRS
  u32 tensors;
  i32 rank, world;
};

// A chunk of a plan. `home`: rank, or -1 in another domain. `stripe`: stripe buffer of its carriers
// if it crosses to another domain or comes from there, else -1.
struct Chunk {
  i32 home, index, stripe, first, count;  // receivers: `count` from `first` on
};
struct Receiver {
  i32 rank, slot;
};
// A slot of this rank that receives a chunk, as receiver number `position` of it.
struct Filled {
  i32 slot, chunk, position;
};

// Copies of a plan, as one rank needs them, written by the host (nvlink/tables.py): six sizes, then
// the arrays. `filled` begins with the home after this rank, so that not all ranks read from one
// home at the same time. Only the address is kept, because registers are for loads in flight.
struct Table {
  const i32* at;
  FSSDP_FN i32 chunks() const { return at[0]; }
  FSSDP_FN i32 slots() const { return at[2]; }    // of this rank that receive a chunk
  FSSDP_FN i32 homes() const { return at[3]; }    // own experts with replicas
  FSSDP_FN i32 stripes() const { return at[4]; }  // chunks that cross to other domains or from there
  FSSDP_FN i32 carriers() const { return at[5]; }
  FSSDP_FN const i32* arrays() const { return at + 6; }
  FSSDP_FN const Chunk& chunk(i32 i) const { return ((const Chunk*)arrays())[i]; }
  FSSDP_FN const Receiver& receiver(i32 i) const { return ((const Receiver*)(arrays() + 5 * at[0]))[i]; }
  FSSDP_FN const Filled& filled(i32 i) const { return ((const Filled*)(arrays() + 5 * at[0] + 2 * at[1]))[i]; }
  FSSDP_FN const i32* of_homes() const { return arrays() + 5 * at[0] + 2 * at[1] + 3 * at[2]; }
  FSSDP_FN const Chunk& home(i32 i) const { return chunk(of_homes()[i]); }
  FSSDP_FN const Chunk& crossing(i32 i) const { return chunk(of_homes()[at[3] + i]); }
};

// Range of a chunk: bytes in a spAG, elements in a spRS.
struct Span {
  u32 begin, end;
};
// Part `number` of `count` of a chunk; it may be empty.
FSSDP_FN u32 part_begin(u32 size, i32 number, i32 count) {
  const u32 begin = (size / GRAIN + (size % GRAIN != 0)) * (u32)number / (u32)count * GRAIN;
  return begin < size ? begin : size;
}
FSSDP_FN Span part(const Transfer& t, i32 number, i32 count) {
  return {part_begin(t.size, number, count), part_begin(t.size, number + 1, count)};
}
FSSDP_FN u64 chunk_at(const Transfer& t, const Chunks& chunks, i32 rank, i32 index) {
  return chunks.first + (u64)t.distance[rank] + (u64)index * chunks.stride;
}

// Turns of a block: the tiles of a step are dealt to the blocks one by one.
struct Turns {
  u32 next;   // tile of this block
  u32 first;  // tile with which the current pull begins
  // Call `visit` with this block's tiles of `size`, each `tile` long.
  template <class Thread, class Visit>
  FSSDP_FN void deal(Thread& th, u32 size, u32 tile, const Visit& visit) {
    const u32 end = first + size / tile + (size % tile != 0);
    FSSDP_ROLLED
    for (; next < end; next += th.blocks()) {
      const u32 begin = (next - first) * tile;
      visit(Span{begin, size - begin < tile ? size : begin + tile});
    }
    first = end;
  }
};

}  // namespace fssdp
