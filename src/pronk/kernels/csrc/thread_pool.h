// The thread pool of the library. A waiting thread spins for a bounded time and then sleeps, so that on a busy machine
// the thread that it waits for gets the core at once, not after the rest of a time slice.
#pragma once
#include <stdint.h>

typedef void (*pool_task)(void* argument, int thread, int threads);

// Lock of the pool while the object exists. One caller at a time holds it; other callers sleep until then.
struct PoolLock {
  PoolLock();
  ~PoolLock();
};
// Run `task` on at most `threads` threads. The caller must hold a PoolLock and is thread 0. After a run whose threads
// mostly waited, because other processes keep a core busy, some runs use the caller's thread only.
void pool_run(int threads, pool_task task, void* argument);
// Run `task`, whose threads may take unequal times, on at most `threads` threads. Waiting says nothing here, so the run
// does not count among those of pool_run. While these use one thread, it does, too.
void pool_share(int threads, pool_task task, void* argument);
// Wait until all threads of the current run arrive.
void pool_barrier();
