// The library's own threads. They wait for each other by looking (for a bounded time) and then by sleeping, so that a
// machine with other work on it loses microseconds and not time slices.
#pragma once
#include <stdint.h>

typedef void (*team_work)(void* argument, int thread, int threads);

// One caller at a time: the others sleep until it leaves.
void team_enter();
void team_leave();
// Run `work` on at most so many threads, the caller's being number 0; it has entered. It runs on the caller's alone,
// for a while, where the last runs have shown that others keep a core busy: then most of the time goes into waiting for
// a thread that is not being run.
void team_run(int threads, team_work work, void* argument);
// Wait until all threads of the present run are here.
void team_barrier();
