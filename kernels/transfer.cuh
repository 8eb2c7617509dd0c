// A whole transfer: its steps one after the other, and the end, when nobody reads this rank's memory any more. Or only
// its signals, where others make the copies.
#pragma once
#include "reduce.cuh"

namespace fssdp {

struct Gather {
  template <class Thread>
  FSSDP_FN static bool run(Thread& th, const Transfer& t, u32 step) { return copies<8>(th, t, step); }
};
struct Reduce {
  template <class Thread>
  FSSDP_FN static bool run(Thread& th, const Transfer& t, u32 step) { return sums<4>(th, t, step); }
};

// All peers have finished as many steps.
template <class Thread>
FSSDP_FN void await_peers(Thread& th, const Transfer& t, u32 steps) {
  for (i32 r = 0; r < t.world; ++r)
    if (has(t.peers, r) && !await(th, t, r, t.begin + steps)) return;
}

// This rank has finished so many steps, and goes on when its peers have: before a step made of plain copies, and after
// the last. One block.
template <class Thread>
FSSDP_FN void synchronize(Thread& th, const Transfer& t, u32 steps) {
  tell(th, t, t.begin + steps);
  await_peers(th, t, steps);
}

template <class Op, class Thread>
FSSDP_FN void transfer(Thread& th, const Transfer& t) {
  if (th.block() == 0) tell(th, t, t.begin);  // what this rank had before may be read
  for (u32 step = 0; step < t.num_steps; ++step) {
    if (!Op::run(th, t, step)) return;
    finish(th, t, step);
  }
  if (th.block() == 0) await_peers(th, t, t.num_steps);
}

}  // namespace fssdp
