// The sums of a spRS, in fp32 and in one pass over memory. The order of the receivers is fixed, so
// the result is bitwise repeatable.
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

// Types of numbers in memory. `Element` is as large as one number; pairs are written at once.
struct Float32 {
  typedef u32 Element;
  FSSDP_FN static float number(const u32* words, int i) { return as_float(words[i]); }
  template <class Thread>
  FSSDP_FN static void put(Thread&, u32* words, int i, float even, float odd) {
    words[i] = as_bits(even);
    words[i + 1] = as_bits(odd);
  }
};
struct Bfloat16 {
  typedef u16 Element;
  FSSDP_FN static float number(const u32* words, int i) {
    return as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
  }
  template <class Thread>
  FSSDP_FN static void put(Thread& th, u32* words, int i, float even, float odd) {
    words[i / 2] = th.bfloat16s(even, odd);
  }
};

// N numbers that one thread accesses at once: 8, 16 or 32 bytes, aligned to 16, or to 8 if fewer.
template <class Type, int N>
struct Unit {
  enum { BYTES = N * (int)sizeof(typename Type::Element), WORDS = BYTES < 4 ? 1 : BYTES / 4 };
  u32 word[WORDS];

  template <class Thread>
  FSSDP_FN void load(Thread& th, u64 address) {
    if (BYTES < (int)VECTOR) {
      const u64 bits = th.load((const u64*)address);
      word[0] = (u32)bits;
      word[WORDS - 1] = (u32)(bits >> 32);
      return;
    }
    FSSDP_UNROLL
    for (int v = 0; v < BYTES / VECTOR; ++v) {
      const Vector vector = th.load((const Vector*)address + v);
      FSSDP_UNROLL
      for (int i = 0; i < 4; ++i) word[4 * v + i] = vector.word[i];
    }
  }
  template <class Thread>
  FSSDP_FN void store(Thread& th, u64 address) const {
    if (BYTES < (int)VECTOR) {
      th.store((u64*)address, (u64)word[WORDS - 1] << 32 | word[0]);
      return;
    }
    FSSDP_UNROLL
    for (int v = 0; v < BYTES / VECTOR; ++v)
      th.store((Vector*)address + v, Vector{word[4 * v], word[4 * v + 1], word[4 * v + 2], word[4 * v + 3]});
  }
  FSSDP_FN float number(int i) const { return Type::number(word, i); }
  // Set number i, which is even, and the next one.
  template <class Thread>
  FSSDP_FN void put(Thread& th, int i, float even, float odd) { Type::put(th, word, i, even, odd); }
};
// A single number.
template <class Type>
struct Unit<Type, 1> {
  typedef typename Type::Element Element;
  u32 word[2];
  template <class Thread>
  FSSDP_FN void load(Thread& th, u64 address) { word[0] = th.load((const Element*)address); }
  template <class Thread>
  FSSDP_FN void store(Thread& th, u64 address) const { th.store((Element*)address, (Element)word[0]); }
  FSSDP_FN float number(int i) const { return i ? 0.0f : Type::number(word, 0); }
  template <class Thread>
  FSSDP_FN void put(Thread& th, int, float even, float odd) { Type::put(th, word, 0, even, odd); }
};

template <int UNITS, class Type, int N, class Thread>
FSSDP_FN void load_all(Thread& th, Unit<Type, N>* units, u64 address, u32 stride) {
  FSSDP_UNROLL
  for (int u = 0; u < UNITS; ++u) units[u].load(th, address + (u64)u * stride * N * sizeof(typename Type::Element));
}

// Sum units of all sources to fp32, from element `begin` on, with a stride of the block's threads.
// `source(k)`: address of source k. The loads of the first two are issued before one is awaited.
template <int UNITS, class Type, int N, class Thread, class Source>
FSSDP_FN void sum_units(Thread& th, i32 count, const Source& source, u64 dst, u32 begin) {
  const u32 stride = th.count();
  const u64 offset = (u64)begin * sizeof(typename Type::Element);
  Unit<Type, N> first[UNITS], next[UNITS];
  Unit<Float32, N> total[UNITS];
  load_all<UNITS>(th, first, source(0) + offset, stride);
  if (count > 1) load_all<UNITS>(th, next, source(1) + offset, stride);
  FSSDP_UNROLL
  for (int u = 0; u < UNITS; ++u) {
    FSSDP_UNROLL
    for (int i = 0; i < N; i += 2)
      total[u].put(th, i, count > 1 ? first[u].number(i) + next[u].number(i) : first[u].number(i),
                   count > 1 ? first[u].number(i + 1) + next[u].number(i + 1) : first[u].number(i + 1));
  }
  FSSDP_ROLLED
  for (i32 k = 2; k < count; ++k) {
    load_all<UNITS>(th, next, source(k) + offset, stride);
    FSSDP_UNROLL
    for (int u = 0; u < UNITS; ++u) {
      FSSDP_UNROLL
      for (int i = 0; i < N; i += 2)
        total[u].put(th, i, total[u].number(i) + next[u].number(i), total[u].number(i + 1) + next[u].number(i + 1));
    }
  }
  FSSDP_UNROLL
  for (int u = 0; u < UNITS; ++u) total[u].store(th, dst + ((u64)begin + u * stride * N) * sizeof(float));
}

// Add units of one source to the destination. Args as `sum_units`.
template <int UNITS, class Type, int N, class Main, class Thread>
FSSDP_FN void add_units(Thread& th, u64 src, u64 dst, u32 begin) {
  const u32 stride = th.count();
  const u64 to = dst + (u64)begin * sizeof(typename Main::Element);
  Unit<Type, N> terms[UNITS];
  Unit<Main, N> totals[UNITS];
  load_all<UNITS>(th, terms, src + (u64)begin * sizeof(typename Type::Element), stride);
  load_all<UNITS>(th, totals, to, stride);
  FSSDP_UNROLL
  for (int u = 0; u < UNITS; ++u) {
    Unit<Main, N> sum;
    FSSDP_UNROLL
    for (int i = 0; i < N; i += 2)
      sum.put(th, i, terms[u].number(i) + totals[u].number(i), terms[u].number(i + 1) + totals[u].number(i + 1));
    sum.store(th, to + (u64)u * stride * N * sizeof(typename Main::Element));
  }
}

// Numbers that a thread processes at once.
template <int UNITS_, int NUMBERS_>
struct Batch {
  enum { UNITS = UNITS_, NUMBERS = NUMBERS_ };
};

// Process `tile` with the whole block: in batches of UNITS units of N numbers, then single units, then
// single numbers; all of it in single numbers unless `vectors`. `work` takes a batch and its first
// number.
template <int UNITS, int N, class Thread, class Work>
FSSDP_FN void each_batch(Thread& th, Span tile, bool vectors, const Work& work) {
  const u32 stride = th.count(), units = vectors ? (tile.end - tile.begin) / N : 0u;
  u32 u = th.id();
  FSSDP_ROLLED
  for (; u + (UNITS - 1) * stride < units; u += UNITS * stride) work(Batch<UNITS, N>(), tile.begin + u * N);
  FSSDP_ROLLED
  for (; u < units; u += stride) work(Batch<1, N>(), tile.begin + u * N);
  FSSDP_ROLLED
  for (u32 e = tile.begin + units * N + th.id(); e < tile.end; e += stride) work(Batch<1, 1>(), e);
}

// Add a tile of one source to the destination.
template <class Type, class Main, class Thread>
FSSDP_FN void add_tile(Thread& th, u64 src, u64 dst, Span tile) {
  enum { N = VECTOR / sizeof(typename Type::Element) };
  each_batch<8, N>(th, tile, aligned(dst, src), [&](auto batch, u32 begin) {
    typedef decltype(batch) Size;
    add_units<Size::UNITS, Type, Size::NUMBERS, Main>(th, src, dst, begin);
  });
}

// The sums of a spRS on this rank. `away`: the stripes of sums over other domains, after they have
// arrived; else all others. Slot: type of the gradients in slots; Main: of main gradients. Sums of
// several receivers are fp32.
template <class Slot, class Main, class Thread>
struct Sums {
  Thread& th;
  const Transfer& t;
  const Table plan;
  bool away;

  FSSDP_FN void run(u32 step) {
    Turns turns = {th.block(), 0};
    if (step == SUM) sum(turns);
    if (step == COLLECT) collect(turns);
  }

  FSSDP_FN void sum(Turns& turns) {
    const i32 slots = plan.slots(), stripes = t.rank < plan.carriers() ? plan.stripes() : 0;
    FSSDP_ROLLED
    for (i32 k = 0; k < slots + stripes; ++k) {
      const bool crosses = k >= slots;
      const Chunk& chunk = crosses ? plan.crossing(k - slots) : plan.chunk(plan.filled(k).chunk);
      // The gradient of a single receiver is collected from its slot.
      if (crosses ? chunk.count == 0 : chunk.stripe >= 0 || chunk.count == 1) continue;
      const Span span = crosses ? part(t, t.rank, plan.carriers()) : part(t, plan.filled(k).position, chunk.count);
      const u64 to = crosses ? chunk_at(t, t.stripes, t.rank, chunk.stripe)
                             : chunk_at(t, t.parts, t.rank, plan.filled(k).slot);
      sum_part(turns, chunk, span, to);
    }
  }
  // Sum `span` of the gradients of all receivers into a part buffer at `dst`.
  FSSDP_FN void sum_part(Turns& turns, const Chunk& chunk, Span span, u64 dst) {
    typedef typename Slot::Element Element;
    // As many totals per thread for both types.
    enum { N = VECTOR / sizeof(Element), UNITS = 32 / N };
    const auto source = [&](i32 k) {
      const Receiver peer = plan.receiver(chunk.first + k);
      return chunk_at(t, t.slots, peer.rank, peer.slot) + (u64)span.begin * sizeof(Element);
    };
    bool vectors = aligned(dst, 0);
    FSSDP_ROLLED
    for (i32 k = 0; k < chunk.count; ++k) vectors = vectors && aligned(source(k), 0);
    turns.deal(th, span.end - span.begin, TILE / sizeof(Element), [&](Span tile) {
      each_batch<UNITS, N>(th, tile, vectors, [&](auto batch, u32 begin) {
        typedef decltype(batch) Size;
        sum_units<Size::UNITS, Slot, Size::NUMBERS>(th, chunk.count, source, dst, begin);
      });
    });
  }
  FSSDP_FN void collect(Turns& turns) {
    FSSDP_ROLLED
    for (i32 k = 0; k < plan.homes(); ++k) {
      const Chunk& chunk = plan.home(k);
      const bool crosses = chunk.stripe >= 0;
      if (away != crosses) continue;
      const i32 count = crosses ? plan.carriers() : chunk.count;
      FSSDP_ROLLED
      for (i32 turn = 0; turn < count; ++turn) {
        const i32 number = (t.rank + turn) % count;
        const Receiver peer = crosses ? Receiver{number, chunk.stripe} : plan.receiver(chunk.first + number);
        const Span span = part(t, number, count);
        const bool summed = crosses || count > 1;
        const Chunks& sums = crosses ? t.stripes : t.parts;
        const u64 from = chunk_at(t, summed ? sums : t.slots, peer.rank, peer.slot) - (summed ? 4 * (u64)span.begin : 0);
        if (summed || sizeof(typename Slot::Element) == 4)
          add_part<Float32>(turns, chunk.index, span, from);
        else
          add_part<Slot>(turns, chunk.index, span, from);
      }
    }
  }
  // Add `span` of a sum to the main gradients of own expert `index`; `src`: where it would begin.
  template <class Type>
  FSSDP_FN void add_part(Turns& turns, i32 index, Span span, u64 src) {
    typedef typename Type::Element Element;
    u32 begin = 0;
    FSSDP_ROLLED
    for (u32 tensor = 0; tensor < t.tensors; ++tensor) {
      const u32 end = t.ends[tensor], low = span.begin > begin ? span.begin : begin, high = span.end < end ? span.end : end;
      const u64 to = t.homes[(u64)index * t.tensors + tensor] + (u64)(low - begin) * sizeof(typename Main::Element);
      const u64 from = src + (u64)low * sizeof(Element);
      if (low < high) {
        turns.deal(th, high - low, TILE / sizeof(Element), [&](Span tile) { add_tile<Type, Main>(th, from, to, tile); });
      }
      begin = end;
    }
  }
};

}  // namespace fssdp
