// Signals between ranks about finished steps. Peers may read in the next step the bytes that this
// step wrote. To prevent early reads and early overwrites, every rank signals the number of steps
// that it has finished to each rank of its domain: one counter per pair of ranks, `progress`, which
// only increases. Every rank signals before it waits, and all ranks run the transfers in the same
// order, so there is no circular wait.
#pragma once
#include "schedule.cuh"

namespace fssdp {

// Progress of a transfer from step `first` on. `begin`: progress that stands for step 0. `id`: what
// the host knows the wait by.
struct Progress {
  const Transfer& t;
  u32 begin, first, id = begin + first;
};

// Signal every rank that this rank has finished the steps before `step`. One block runs this, after
// all blocks have finished the steps.
template <class Thread>
FSSDP_FN void tell(Thread& th, const Progress& r, u32 step) {
  for (i32 peer = (i32)th.id(); peer < r.t.world; peer += (i32)th.count())
    th.store_release((u32*)((u64)r.t.progress + (u64)r.t.distance[peer]) + r.t.rank, r.begin + step);
}

// Polls of a counter between two looks at the host's memory, which is far.
enum { POLLS = 256 };

// Wait, in one thread, until `peer` has finished the steps before `step`, or the host has ended all
// waits. Counters wrap, so the sign of the difference decides. Return false after the timeout, with
// a record of the failure.
template <class Thread>
FSSDP_FN bool await(Thread& th, const Progress& r, i32 peer, u32 step) {
  const u64 start = th.clock();
  u32 seen, polls = 0;
  while ((i32)((seen = th.load_acquire(r.t.progress + peer)) - r.begin - step) < 0) {
    const bool is_late = th.clock() - start > r.t.timeout;
    if ((is_late || ++polls % POLLS == 0) && th.load_acquire(&r.t.failure->failed) == ENDED) return true;
    if (is_late) {
      th.fail(r.t.failure, {FAILED, (u32)r.t.rank, (u32)peer, step - r.first, seen - r.begin - r.first, r.id});
      return false;
    }
    th.pause();
  }
  return true;
}

// Wait, with the whole block, until all ranks have finished the steps before `step`. Each thread
// polls a different subset; the block barrier makes the writes that it acquired visible to all.
template <class Thread>
FSSDP_FN bool await_all(Thread& th, const Progress& r, u32 step) {
  bool come = true;
  for (i32 peer = (i32)th.id(); come && peer < r.t.world; peer += (i32)th.count()) come = await(th, r, peer, step);
  return th.all(come);
}

// Finish `step` in this block; the last block to finish signals the ranks. Its signal covers the
// writes of all blocks: each block releases its writes to the counter `arrived`, and the last block
// acquires them there.
template <class Thread>
FSSDP_FN void finish(Thread& th, const Progress& r, u32 step) {
  th.all(true);
  bool last = true;
  if (th.id() == 0) {
    last = th.add_acq_rel(r.t.arrived + step, 1u) == th.blocks() - 1;
    // Reset for the next transfer.
    if (last) th.store_relaxed(r.t.arrived + step, 0u);
  }
  if (th.all(last)) tell(th, r, step + 1);
}

}  // namespace fssdp
