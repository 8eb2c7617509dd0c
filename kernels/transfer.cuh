// A whole transfer: its steps in order, and a final wait until no peer reads this rank's memory any
// more.
#pragma once
#include "reduce.cuh"

namespace fssdp {

// Vector loads per thread in flight before the first is awaited: 64 KiB for a block of 256 threads.
// In a sum they belong to two arrays.
enum { IN_FLIGHT = 16 };

struct Gather {
  template <class Thread>
  FSSDP_FN static bool run(Thread& th, const Transfer& t, u32 step) { return copies<IN_FLIGHT>(th, t, step); }
};
struct Reduce {
  template <class Thread>
  FSSDP_FN static bool run(Thread& th, const Transfer& t, u32 step) { return sums<IN_FLIGHT / 2>(th, t, step); }
};

// Barrier before the first step: signal that this rank has come, and wait for all peers. One small
// block, because it may wait long.
template <class Thread>
FSSDP_FN void synchronize(Thread& th, const Transfer& t) {
  tell(th, t, t.begin);
  await_peers(th, t, 0u);
}

// Run all steps, after `synchronize`. All blocks must be resident at once.
template <class Op, class Thread>
FSSDP_FN void transfer(Thread& th, const Transfer& t) {
  for (u32 step = 0; step < t.num_steps; ++step) {
    if (!Op::run(th, t, step)) return;
    finish(th, t, step);
  }
  if (th.block() == 0) await_peers(th, t, t.num_steps);
}

}  // namespace fssdp
