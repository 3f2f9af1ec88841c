// The thread pool of the library. Threads wait for each other by spinning for a bounded time and then by sleeping: on a
// busy machine a wait costs microseconds instead of scheduler time slices.
#pragma once
#include <stdint.h>

typedef void (*pool_task)(void* argument, int thread, int threads);

// Hold the pool: one caller at a time, other callers sleep.
struct PoolLock {
  PoolLock();
  ~PoolLock();
};
// Run `task` on at most `threads` threads. The caller must hold the pool and is thread 0. After a run that lost much
// time to waiting, because other processes keep a core busy, some runs use the caller's thread only.
void pool_run(int threads, pool_task task, void* argument);
// Wait until all threads of the current run arrive.
void pool_barrier();
