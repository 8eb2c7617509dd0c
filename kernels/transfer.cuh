// A whole transfer: its steps in order, and a final wait until no peer reads this rank's memory any
// more.
#pragma once
#include "reduce.cuh"

namespace fssdp {

// Vector loads per thread in flight before the first is awaited: 64 KiB for a block of 256 threads.
enum { IN_FLIGHT = 16 };

struct Gather {
  enum { STEPS = GATHER_STEPS, AWAY = EXCHANGE };
  template <class Thread>
  using Op = Copies<IN_FLIGHT, Thread>;
};
template <class Slot, class Main>
struct Reduce {
  enum { STEPS = REDUCE_STEPS, AWAY = COLLECT };
  template <class Thread>
  using Op = Sums<Slot, Main, Thread>;
};

// Barrier before the first step, at `position`: progress since the epoch, the same on all ranks.
// Signal that this rank has come, and wait for all others. One small
// block, because it may wait long. Without copies there is nothing to wait for, but the signals
// keep the counters of all ranks together.
template <class Thread>
FSSDP_FN void synchronize(Thread& th, const Transfer& t, u32 position) {
  const Progress r = {t, *t.epoch + position, 0};
  tell(th, r, 0u);
  if (t.table[0]) await_all(th, r, 0u);
}

// Run all steps, after `synchronize`. All blocks must be resident at once. `away`: run the last step
// alone, for what has come from other domains.
template <class Kind, class Thread>
FSSDP_FN void transfer(Thread& th, const Transfer& t, u32 position, bool away) {
  const Table plan = {t.table};
  if (!plan.chunks()) return;
  const u32 first = away ? (u32)Kind::AWAY : 0u;
  const Progress r = {t, *t.epoch + position - first, first};
  typename Kind::template Op<Thread> op = {th, t, plan, away};
  for (u32 step = r.first; step < (u32)Kind::STEPS; ++step) {
    if (step > r.first && !await_all(th, r, step)) return;
    op.run(step);
    finish(th, r, step);
  }
  if (th.block() == 0) await_all(th, r, (u32)Kind::STEPS);
}

}  // namespace fssdp
