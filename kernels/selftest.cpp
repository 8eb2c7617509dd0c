// Threads as ranks: runs a script of writes, transfers and checks, every rank on a thread of its own and as fast as it
// likes, so that the only order between ranks is the one the transfers make. tests/kernel_scripts.py writes the scripts,
// with the schedules that training uses; ThreadSanitizer and AddressSanitizer watch.
//
//     g++ -std=c++17 -pthread -fsanitize=thread -DFSSDP_STALLS -o selftest selftest.cpp && ./selftest SCRIPT
//
// A script is u64 words: ranks, bytes of memory per rank, blocks, threads, and what the progress counters, which lie first
// in memory, start at; then for each rank the number of words that follow and these: an operation and its operands. Rank
// r's memory lies at (r + 1) << 40, until it is relocated here.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "host.cpp"

namespace {

using namespace fssdp;

enum Operation : u64 { WRITE, CHECK, GATHER, REDUCE, COPIES };
// WRITE   address, type, elements, seed
// CHECK   address, type, elements, seed of what was there or NONE, number of addends, for each (type, seed)
// GATHER, REDUCE   address of the program, its bytes, and it
// COPIES  the same: a gather of which the kernels only make the signals
enum Type : u64 { BYTE, HALF, FLOAT };
const u64 NONE = ~0ull;

std::vector<char*> memory;

void* at(u64 address) { return address ? memory[(address >> 40) - 1] + (address & ((1ull << 40) - 1)) : nullptr; }

u32 random_bits(u64 seed, u64 i) {
  u64 x = (seed + 1) * 0x9e3779b97f4a7c15ull + i * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 31)) * 0x94d049bb133111ebull;
  return (u32)(x >> 32);
}
// Of mixed magnitude, so that the order of a sum shows.
float random_float(u64 seed, u64 i) {
  const u32 bits = random_bits(seed, i);
  const float value = (float)((int)(bits & 0xff) - 128) * (float)(1u << (bits >> 28));
  return as_float(as_bits(value) & 0xffff0000u);  // a bf16 as well
}
float addend(u64 seed, u64 i) { return random_float(seed, i); }

void write(u64 address, u64 type, u64 elements, u64 seed) {
  char* to = (char*)at(address);
  for (u64 i = 0; i < elements; ++i) {
    const u32 bits = as_bits(random_float(seed, i));
    if (type == BYTE) to[i] = (char)random_bits(seed, i);
    if (type == HALF) ((u16*)to)[i] = (u16)(bits >> 16);
    if (type == FLOAT) ((u32*)to)[i] = bits;
  }
}

bool same(u64 address, u64 type, u64 i, u64 was, const u64* seeds, u64 count) {
  const char* from = (const char*)at(address);
  if (type == BYTE) return from[i] == (char)random_bits(was, i);
  if (type == HALF) return ((const u16*)from)[i] == (u16)(as_bits(random_float(was, i)) >> 16);
  float expected = 0;
  for (u64 k = 0; k < count; ++k) expected = k ? expected + addend(seeds[k], i) : addend(seeds[k], i);
  if (was != NONE) expected = count ? random_float(was, i) + expected : random_float(was, i);
  return ((const u32*)from)[i] == as_bits(expected);
}

void relocate(u64& address) { address = (u64)at(address); }
template <class T>
void relocate(T*& address) {
  address = (T*)at((u64)address);
}

const Transfer& load(u64 address, const void* program, u64 size, bool sums) {
  Transfer& t = *(Transfer*)at(address);
  std::memcpy(&t, program, size);
  relocate(t.progress);
  for (i32 r = 0; r < t.world; ++r) relocate(t.progress_at[r]);
  relocate(t.arrived);
  relocate(t.failure);
  for (u32 s = 0; s < t.num_steps; ++s) {
    Step& step = t.steps[s];
    relocate(step.items);
    relocate(step.sources);
    u32 sources = 0;
    for (u32 i = 0; i < step.count; ++i)
      if (sums) {
        Sum& sum = ((Sum*)step.items)[i];
        relocate(sum.dst);
        sources += sum.sources;
      } else {
        Copy& copy = ((Copy*)step.items)[i];
        relocate(copy.src);
        relocate(copy.dst);
      }
    for (u32 i = 0; i < sources; ++i) relocate(((Source*)step.sources)[i].src);
  }
  return t;
}

// As copy engines would: between the signals, in no particular order.
void copies(const Transfer& t, u32 threads) {
  for (u32 s = 0; s <= t.num_steps; ++s) {
    run_meet(t, s, threads);
    if (t.failure->failed) return;
    if (s == t.num_steps) return;
    const Step& step = t.steps[s];
    for (u32 i = step.count; i-- > 0;) {
      const Copy& copy = ((const Copy*)step.items)[i];
      std::memcpy((void*)copy.dst, (const void*)copy.src, copy.bytes);
    }
  }
}

void rank_main(int rank, const std::vector<u64>& script, u32 blocks, u32 threads) {
  for (size_t i = 0; i < script.size();) {
    const u64* op = &script[i];
    if (op[0] == WRITE) {
      write(op[1], op[2], op[3], op[4]);
      i += 5;
    } else if (op[0] == CHECK) {
      for (u64 e = 0; e < op[3]; ++e)
        if (!same(op[1], op[2], e, op[4], op + 6, op[5])) {
          std::printf("FAIL rank %d: element %llu of %llu at %llx is not as it should be\n", rank, e, op[3], op[1]);
          std::fflush(stdout), std::_Exit(1);
        }
      i += 6 + op[5];
    } else {
      const Transfer& t = load(op[1], op + 3, op[2], op[0] == REDUCE);
      if (op[0] == COPIES)
        copies(t, threads);
      else if (op[0] == REDUCE)
        run<Reduce>(t, blocks, threads);
      else
        run<Gather>(t, blocks, threads);
      if (t.failure->failed) {
        const Failure& f = *t.failure;
        std::printf("FAIL rank %u waits for rank %u: expected step %u, seen %d\n", f.rank, f.peer, f.expected, (int)f.seen);
        std::fflush(stdout), std::_Exit(1);
      }
      i += 3 + (op[2] + 7) / 8;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  FILE* file = argc == 2 ? std::fopen(argv[1], "rb") : nullptr;
  u64 head[5];
  if (!file || std::fread(head, 8, 5, file) != 5) return 2;
  std::vector<std::vector<u64>> scripts(head[0]);
  for (auto& script : scripts) {
    u64 words;
    if (std::fread(&words, 8, 1, file) != 1) return 2;
    script.resize(words);
    if (std::fread(script.data(), 8, words, file) != words) return 2;
  }
  for (u64 r = 0; r < head[0]; ++r) memory.push_back((char*)std::aligned_alloc(256, head[1]));
  for (char* m : memory) {
    std::memset(m, 0, head[1]);
    for (u64 r = 0; r < head[0]; ++r) ((u32*)m)[r] = (u32)head[4];
  }
  std::vector<std::thread> ranks;
  for (u64 r = 0; r < head[0]; ++r)
    ranks.emplace_back([&, r] { rank_main((int)r, scripts[r], (u32)head[2], (u32)head[3]); });
  for (auto& rank : ranks) rank.join();
  for (char* m : memory) std::free(m);
  std::puts("OK");
}
