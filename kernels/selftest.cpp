// Threads as ranks, for ThreadSanitizer and AddressSanitizer. Runs a script of writes, transfers
// and checks. Every rank is a free-running thread, so that only the transfers order the ranks.
// tests/support/scripts/kernel_scripts.py writes the scripts, with the schedules of training.
//
//     g++ -std=c++17 -pthread -fsanitize=thread -DFSSDP_STALLS -o selftest selftest.cpp
//     ./selftest SCRIPT
//
// A script is u64 words. The header is: ranks, bytes of memory per rank, blocks, threads, initial
// value of the progress counters, which are at the beginning of each rank's memory, offset and
// initial value of the counters of exchanges. For each rank follow the number of its words and its
// operations. An operation is a code, an address, a number of bytes, and the bytes; the upper half
// of the code is the position of a transfer, and the experts of an exchange. In a script the memory
// of rank r begins at (r + 1) << 40; this program relocates the addresses.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "host.cpp"

namespace {

using namespace fssdp;

// WRITE writes the bytes; CHECK compares them with memory. In the others the bytes are the
// description of a transfer, or of an exchange: `send` is the routing map and its tokens, `parts`
// takes the loads.
enum Operation : u32 { WRITE, CHECK, GATHER, REDUCE_32_32, REDUCE_32_16, REDUCE_16_32, REDUCE_16_16, EXCHANGE };

std::vector<char*> memory;

void* at(u64 address) { return address ? memory[(address >> 40) - 1] + (address & ((1ull << 40) - 1)) : nullptr; }

void relocate(u64& address) { address = (u64)at(address); }
template <class T>
void relocate(T*& address) {
  address = (T*)at((u64)address);
}

const Transfer& load(u64 address, const void* description, u64 size) {
  Transfer& t = *(Transfer*)at(address);
  std::memcpy(&t, description, size);
  for (i32 r = 0; r < t.world; ++r) t.distance[r] = memory[r] - memory[t.rank];
  relocate(t.progress);
  relocate(t.arrived);
  relocate(t.failure);
  relocate(t.epoch);
  relocate(t.table);
  relocate(t.homes);
  relocate(t.ends);
  for (Chunks* chunks : {&t.send, &t.slots, &t.parts}) relocate(chunks->first);
  for (u64* home = (u64*)t.homes; (void*)home < (void*)t.ends; ++home) relocate(*home);
  return t;
}

void reduce(u32 op, const Transfer& t, u32 position, u32 blocks, u32 threads) {
  if (op == REDUCE_32_32) run<Reduce<Float32, Float32>>(t, position, false, blocks, threads);
  if (op == REDUCE_32_16) run<Reduce<Float32, Bfloat16>>(t, position, false, blocks, threads);
  if (op == REDUCE_16_32) run<Reduce<Bfloat16, Float32>>(t, position, false, blocks, threads);
  if (op == REDUCE_16_16) run<Reduce<Bfloat16, Bfloat16>>(t, position, false, blocks, threads);
}

void exchange(const Transfer& t, u32 experts, u32 blocks, u32 threads) {
  const Tokens tokens = {(u32)t.send.stride, 3};
  std::vector<i32> before(tokens.tiles() * experts), loads(experts);
  u32 arrived = 0;
  const auto count = [&](Host& th) {
    count_tokens(th, tokens, experts, (const u8*)t.send.first, {before.data(), loads.data(), nullptr, &t}, &arrived);
  };
  launch(count, blocks, threads);
  const auto await = [&](Host& th) {
    const i32* all = await_loads(th, t, 0);
    for (u32 i = th.id(); all && i < (u32)t.world * experts; i += th.count()) ((i32*)t.parts.first)[i] = all[i];
  };
  launch(await, 1, threads);
}

void rank_main(int rank, const std::vector<u64>& script, u32 blocks, u32 threads) {
  for (size_t i = 0; i < script.size();) {
    const u32 op = (u32)script[i], position = (u32)(script[i] >> 32);
    const u64 address = script[i + 1], size = script[i + 2];
    const char* bytes = (const char*)&script[i + 3];
    i += 3 + (size + 7) / 8;
    if (op == WRITE) {
      std::memcpy(at(address), bytes, size);
    } else if (op == CHECK) {
      for (u64 b = 0; b < size; ++b)
        if (((const char*)at(address))[b] != bytes[b]) {
          std::printf("FAIL rank %d: byte %llu of %llu at %llx is not as it should be\n", rank, b, size, address);
          std::fflush(stdout), std::_Exit(1);
        }
    } else {
      const Transfer& t = load(address, bytes, size);
      if (op == EXCHANGE) {
        exchange(t, position, blocks, threads);
      } else {
        run_synchronize(t, position, threads);
        op == GATHER ? run<Gather>(t, position, false, blocks, threads) : reduce(op, t, position, blocks, threads);
      }
      if (t.failure->failed) {
        const Failure& f = *t.failure;
        std::printf("FAIL rank %u waits for rank %u: expected step %u, seen %d\n", f.rank, f.peer, f.expected, (int)f.seen);
        std::fflush(stdout), std::_Exit(1);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  FILE* file = argc == 2 ? std::fopen(argv[1], "rb") : nullptr;
  u64 head[7];
  if (!file || std::fread(head, 8, 7, file) != 7) return 2;
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
    for (u64 r = 0; r <= MAX_RANKS; ++r) ((u32*)(m + head[5]))[r] = (u32)head[6];
  }
  std::vector<std::thread> ranks;
  for (u64 r = 0; r < head[0]; ++r)
    ranks.emplace_back([&, r] { rank_main((int)r, scripts[r], (u32)head[2], (u32)head[3]); });
  for (auto& rank : ranks) rank.join();
  for (char* m : memory) std::free(m);
  std::puts("OK");
}
