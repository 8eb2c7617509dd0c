// Loads of all sources, exchanged through memory that peers can access: ranks of one NVLink domain,
// with one source each. The kernel that counts a rank's tokens writes its loads into every rank's
// memory and signals; the kernel of the quotas waits for all signals.
//
// The description is a `Transfer` (schedule.cuh) in which
//   `progress`  counts, by peer, the exchanges whose loads have come,
//   `arrived`   is one counter: exchanges that this rank has begun,
//   `slots`     are two buffers, [world, E], used in turn.
//
// All ranks run the same exchanges in the same order. Each counts them in its own memory, so a launch
// has the same arguments in every exchange, and a CUDA graph can hold it. Two buffers suffice: a rank
// writes those of exchange n + 2 after it has waited for exchange n + 1 of all peers, and a peer
// begins that one after its quotas of exchange n.
#pragma once
#include "signals.cuh"

namespace fssdp {

FSSDP_FN i32* loads_at(const Transfer& t, i32 rank, u32 exchange) {
  return (i32*)chunk_at(t, t.slots, rank, (i32)(exchange % 2));
}

// Number of the exchange that this rank begins next.
template <class Thread>
FSSDP_FN u32 next_exchange(Thread& th, const Transfer& t) { return th.load(t.arrived) + 1; }

// Write this rank's load of one of `experts` into the memory of all ranks.
FSSDP_FN void send_load(const Transfer& t, u32 exchange, u32 experts, u32 expert, i32 load) {
  for (i32 peer = 0; peer < t.world; ++peer) loads_at(t, peer, exchange)[(u32)t.rank * experts + expert] = load;
}

// Signal all ranks that this rank's loads are written, with the whole block that wrote them.
template <class Thread>
FSSDP_FN void tell_loads(Thread& th, const Transfer& t, u32 exchange) {
  th.all(true);
  if (th.id() == 0) th.store(t.arrived, exchange);
  tell(th, Progress{t, exchange, 0}, 0);
}

// Wait for the loads of all ranks in the exchange begun last, with the whole block. `id`: see
// `Progress`. Return the loads, [world, E], or null after the timeout.
template <class Thread>
FSSDP_FN const i32* await_loads(Thread& th, const Transfer& t, u32 id) {
  const u32 exchange = th.load(t.arrived);
  return await_all(th, Progress{t, exchange, 0, id}, 0) ? loads_at(t, t.rank, exchange) : nullptr;
}

}  // namespace fssdp
