// How ranks tell each other what they have finished. Tell before waiting, transfers in the same order on every rank:
// then no wait can be for something that waits.
#pragma once
#include "schedule.cuh"

namespace fssdp {

// Tell every peer that this rank has finished `value` - t.begin steps. By one block, when all blocks have.
template <class Thread>
FSSDP_FN void tell(Thread& th, const Transfer& t, u32 value) {
  for (i32 r = (i32)th.id(); r < t.world; r += (i32)th.count())
    if (has(t.peers, r)) th.store_release(t.progress_at[r] + t.rank, value);
}

// The thread waits until `peer` has said `value`, or more; counters wrap, so the difference decides. False: it did not
// come in time, which is on record.
template <class Thread>
FSSDP_FN bool await(Thread& th, const Transfer& t, i32 peer, u32 value) {
  const u64 start = th.clock();
  u32 seen;
  while ((i32)((seen = th.load_acquire(t.progress + peer)) - value) < 0) {
    if (th.clock() - start > t.timeout) {
      th.fail(t.failure, {1u, (u32)t.rank, (u32)peer, value - t.begin, seen - t.begin, t.begin});
      return false;
    }
    th.pause();
  }
  return true;
}

// The block ends when all peers have finished as many steps. Every thread looks at peers of its own.
template <class Thread>
FSSDP_FN void await_peers(Thread& th, const Transfer& t, u32 steps) {
  for (i32 r = (i32)th.id(); r < t.world; r += (i32)th.count())
    if (has(t.peers, r) && !await(th, t, r, t.begin + steps)) return;
}

// The block waits until `source`, if it is another rank, has what is read in `step`; `ready`: those that have been
// awaited. Before the first step all have met.
template <class Thread>
FSSDP_FN bool await_source(Thread& th, const Transfer& t, i32 source, u32 step, Ranks& ready) {
  if (source == LOCAL || step == 0 || has(ready, source)) return true;
  put(ready, source);
  // a barrier: what thread 0 acquired is visible to the block
  return th.all(th.id() != 0 || await(th, t, source, t.begin + step));
}

// The block has finished `step`; the last block to do so tells the peers. What the others wrote comes with it: each
// releases it to the counter, and the last one acquires it there.
template <class Thread>
FSSDP_FN void finish(Thread& th, const Transfer& t, u32 step) {
  th.all(true);
  bool last = true;
  if (th.id() == 0) {
    last = th.add_acq_rel(t.arrived + step, 1u) == th.blocks() - 1;
    if (last) th.store_relaxed(t.arrived + step, 0u);  // for the next transfer
  }
  if (th.all(last)) tell(th, t, t.begin + step + 1);
}

}  // namespace fssdp
