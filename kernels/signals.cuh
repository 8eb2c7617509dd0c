// Signals between ranks about finished steps. Every rank signals before it waits, and all ranks run
// the transfers in the same order, so there is no circular wait.
#pragma once
#include "schedule.cuh"

namespace fssdp {

// Signal every peer that this rank has finished `value` - t.begin steps. One block runs this, after
// all blocks have finished the steps.
template <class Thread>
FSSDP_FN void tell(Thread& th, const Transfer& t, u32 value) {
  for (i32 r = (i32)th.id(); r < t.world; r += (i32)th.count())
    if (has(t.peers, r)) th.store_release(t.progress_at[r] + t.rank, value);
}

// Wait, in one thread, until the progress of `peer` is at least `value`. Counters wrap, so the sign
// of the difference decides. Return false after the timeout, with a record of the failure.
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

// Wait until all peers have finished `steps` steps. Each thread polls a different subset of peers.
template <class Thread>
FSSDP_FN void await_peers(Thread& th, const Transfer& t, u32 steps) {
  for (i32 r = (i32)th.id(); r < t.world; r += (i32)th.count())
    if (has(t.peers, r) && !await(th, t, r, t.begin + steps)) return;
}

// Wait, with the whole block, until the data that `step` reads from `source` is complete. `ready`:
// ranks that the block has already waited for. The first step needs no wait, because all ranks have
// passed the barrier.
template <class Thread>
FSSDP_FN bool await_source(Thread& th, const Transfer& t, i32 source, u32 step, Ranks& ready) {
  if (source == LOCAL || step == 0 || has(ready, source)) return true;
  put(ready, source);
  // The block barrier makes the writes that thread 0 acquired visible to all threads.
  return th.all(th.id() != 0 || await(th, t, source, t.begin + step));
}

// Finish `step` in this block; the last block to finish signals the peers. Its signal covers the
// writes of all blocks: each block releases its writes to the counter `arrived`, and the last block
// acquires them there.
template <class Thread>
FSSDP_FN void finish(Thread& th, const Transfer& t, u32 step) {
  th.all(true);
  bool last = true;
  if (th.id() == 0) {
    last = th.add_acq_rel(t.arrived + step, 1u) == th.blocks() - 1;
    // Reset for the next transfer.
    if (last) th.store_relaxed(t.arrived + step, 0u);
  }
  if (th.all(last)) tell(th, t, t.begin + step + 1);
}

}  // namespace fssdp
