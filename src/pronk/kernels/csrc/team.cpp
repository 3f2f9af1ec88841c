#include "team.h"

#include <atomic>
#include <new>

#ifdef _WIN32
#include <windows.h>
#else
#include <pthread.h>
#include <time.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace {

const int MOST = 256;
const double LOOK_SECONDS = 60e-6;   // at a barrier: longer than threads that run are apart
const double IDLE_SECONDS = 2e-3;    // between two passes: longer than a step takes outside them

// A run that loses a larger share of its threads' time to waiting was disturbed. Then some runs have one thread, twice
// as many after each further disturbance, and the next one tries all of them again. Of a run that had to wake a thread
// nothing is learnt.
const double LOST_SHARE = 0.35;
const int FIRST_ALONE = 4, MOST_ALONE = 256;

#ifdef _WIN32
typedef SRWLOCK Mutex;
typedef CONDITION_VARIABLE Condition;
#define MUTEX_INIT SRWLOCK_INIT
#define CONDITION_INIT CONDITION_VARIABLE_INIT
void lock(Mutex* m) { AcquireSRWLockExclusive(m); }
void unlock(Mutex* m) { ReleaseSRWLockExclusive(m); }
void sleep_on(Condition* c, Mutex* m) { SleepConditionVariableSRW(c, m, INFINITE, 0); }
void wake_all(Condition* c) { WakeAllConditionVariable(c); }
double now() {
  LARGE_INTEGER count, frequency;
  QueryPerformanceCounter(&count);
  QueryPerformanceFrequency(&frequency);
  return (double)count.QuadPart / (double)frequency.QuadPart;
}
#else
typedef pthread_mutex_t Mutex;
typedef pthread_cond_t Condition;
#define MUTEX_INIT PTHREAD_MUTEX_INITIALIZER
#define CONDITION_INIT PTHREAD_COND_INITIALIZER
void lock(Mutex* m) { pthread_mutex_lock(m); }
void unlock(Mutex* m) { pthread_mutex_unlock(m); }
void sleep_on(Condition* c, Mutex* m) { pthread_cond_wait(c, m); }
void wake_all(Condition* c) { pthread_cond_broadcast(c); }
double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
#endif

inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

// A number that changes, and those who wait for that.
struct Event {
  std::atomic<uint64_t> value{0};
  std::atomic<int> sleepers{0};
  Mutex mutex = MUTEX_INIT;
  Condition condition = CONDITION_INIT;

  // Returns whether anybody had to be woken.
  bool set(uint64_t next) {
    value.store(next, std::memory_order_seq_cst);
    if (!sleepers.load(std::memory_order_seq_cst)) return false;
    lock(&mutex);
    wake_all(&condition);
    unlock(&mutex);
    return true;
  }

  // Returns how long it took, in seconds.
  double wait(uint64_t seen, double seconds) {
    double began = now(), until = began + seconds;
    do {
      for (int i = 0; i < 32; i++) {
        if (value.load(std::memory_order_acquire) != seen) return now() - began;
        relax();
      }
    } while (now() < until);
    lock(&mutex);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (value.load(std::memory_order_seq_cst) == seen) sleep_on(&condition, &mutex);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
    unlock(&mutex);
    return now() - began;
  }
};

struct Team {
  Mutex busy = MUTEX_INIT;
  Event start;  // number of the run * 1024 + its threads: whoever reads it knows whether it takes part
  Event meet;
  std::atomic<int> arrived{0};
  int workers = 0;  // threads that exist beside the callers
  int size = 1;     // of the present run
  team_work work = nullptr;
  void* argument = nullptr;
  std::atomic<int64_t> waited{0};  // nanoseconds that all threads of the present run have waited
  int alone = 0;                   // runs that are still to have one thread
  int penalty = FIRST_ALONE;       // how many the next disturbance costs
};

Team team;

struct Worker {
  int number;
  uint64_t seen;
} workers[MOST];

void serve(Worker* self) {
  for (uint64_t seen = self->seen;;) {
    team.start.wait(seen, IDLE_SECONDS);
    seen = team.start.value.load(std::memory_order_acquire);
    if (self->number < (int)(seen % 1024)) {
      team.work(team.argument, self->number, team.size);
      team_barrier();
    }
  }
}

#ifdef _WIN32
DWORD WINAPI begin(void* worker) {
  serve((Worker*)worker);
  return 0;
}
bool hire(Worker* worker) {
  HANDLE thread = CreateThread(nullptr, 0, begin, worker, 0, nullptr);
  if (thread) CloseHandle(thread);
  return thread != nullptr;
}
#else
void* begin(void* worker) {
  serve((Worker*)worker);
  return nullptr;
}
// A fork waits for the run of another thread. The child has none of the threads.
void before_fork() { lock(&team.busy); }
void after_fork() { unlock(&team.busy); }
void in_child() { new (&team) Team; }
bool hire(Worker* worker) {
  pthread_t thread;
  if (pthread_create(&thread, nullptr, begin, worker)) return false;
  pthread_detach(thread);
  return true;
}
#endif

}  // namespace

void team_enter() {
#ifndef _WIN32
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, [] { pthread_atfork(before_fork, after_fork, in_child); });
#endif
  lock(&team.busy);
}

void team_leave() { unlock(&team.busy); }

void team_barrier() {
  // Read before it is said that this thread has come: thereafter the run may end, and the next one have another size.
  int size = team.size;
  uint64_t seen = team.meet.value.load(std::memory_order_acquire);
  if (team.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
    team.arrived.store(0, std::memory_order_relaxed);
    team.meet.set(seen + 1);
  } else {
    team.waited.fetch_add((int64_t)(1e9 * team.meet.wait(seen, LOOK_SECONDS)), std::memory_order_relaxed);
  }
}

void team_run(int threads, team_work work, void* argument) {
  threads = threads < 1 ? 1 : threads > MOST ? MOST : threads;
  while (team.workers < threads - 1) {
    Worker* worker = &workers[team.workers];
    worker->number = team.workers + 1;
    worker->seen = team.start.value.load(std::memory_order_acquire);
    if (!hire(worker)) break;
    team.workers++;
  }
  if (threads > team.workers + 1) threads = team.workers + 1;
  bool alone = threads > 1 && team.alone > 0;
  if (alone) {
    team.alone--;
    threads = 1;
  }
  team.size = threads;
  team.work = work;
  team.argument = argument;
  if (threads > 1) {
    double began = now();
    team.waited.store(0, std::memory_order_relaxed);
    uint64_t last = team.start.value.load(std::memory_order_relaxed);
    bool woken = team.start.set((last / 1024 + 1) * 1024 + (uint64_t)threads);
    work(argument, 0, threads);
    team_barrier();
    double lost = 1e-9 * (double)team.waited.load(std::memory_order_relaxed) / (threads * (now() - began));
    if (!woken && lost > LOST_SHARE) {
      team.alone = team.penalty;
      team.penalty = team.penalty * 2 < MOST_ALONE ? team.penalty * 2 : MOST_ALONE;
    } else if (!woken) {
      team.penalty = FIRST_ALONE;
    }
  } else {
    work(argument, 0, 1);
  }
}
