// A whole transfer: its steps one after the other, and the end, when nobody reads this rank's memory any more. Or only
// its signals, where others make the copies.
#pragma once
#include "reduce.cuh"

namespace fssdp {

// Vectors per thread that are asked for before one is waited for: 64 KiB of a block of 256. In a sum they are of two
// arrays.
enum { IN_FLIGHT = 16 };

struct Gather {
  template <class Thread>
  FSSDP_FN static bool run(Thread& th, const Transfer& t, u32 step) { return copies<IN_FLIGHT>(th, t, step); }
};
struct Reduce {
  template <class Thread>
  FSSDP_FN static bool run(Thread& th, const Transfer& t, u32 step) { return sums<IN_FLIGHT / 2>(th, t, step); }
};

// This rank has finished so many steps, and goes on when its peers have: before the first step, before every step made
// of plain copies, and after the last of those. One block, small, because it may wait long.
template <class Thread>
FSSDP_FN void synchronize(Thread& th, const Transfer& t, u32 steps) {
  tell(th, t, t.begin + steps);
  await_peers(th, t, steps);
}

// By blocks that all run at once, when the peers have met: `synchronize` of 0 steps.
template <class Op, class Thread>
FSSDP_FN void transfer(Thread& th, const Transfer& t) {
  for (u32 step = 0; step < t.num_steps; ++step) {
    if (!Op::run(th, t, step)) return;
    finish(th, t, step);
  }
  if (th.block() == 0) await_peers(th, t, t.num_steps);
}

}  // namespace fssdp
