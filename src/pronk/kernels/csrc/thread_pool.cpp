#include "thread_pool.h"

#include "ieee_mode.h"

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
const int MAX_THREADS = 256;
// Seconds that a waiting thread spins before it sleeps; waiting usually takes less.
const double SPIN_SECONDS = 60e-6;      // at a barrier, until the last thread arrives
const double IDLE_SPIN_SECONDS = 2e-3;  // between runs, until the next forward pass

// A run is one call of pool_run. If its threads wait for more than this share of their time, they probably wait for a
// thread whose core another process occupies. The next runs, called solo runs, then use one thread; after them one run
// tries all threads again. If that run waits too long as well, the number of solo runs doubles. Runs that had to wake a
// sleeping thread are ignored. So are short waits: a thread without a core waits until the operating system gives it one,
// a millisecond or more, while the threads of a run of few microseconds spend most of it waiting for each other.
const double MAX_WAIT_SHARE = 0.35;
const double MIN_WAIT_SECONDS = 5e-4;  // summed over the threads of a run
const int MIN_SOLO_RUNS = 4;
const int MAX_SOLO_RUNS = 256;

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

inline void spin_pause() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

// A number; threads can wait until it changes.
struct Event {
  std::atomic<uint64_t> value{0};
  std::atomic<int> sleepers{0};
  Mutex mutex = MUTEX_INIT;
  Condition condition = CONDITION_INIT;

  // Set the value. Returns whether a sleeping thread had to be woken.
  bool set(uint64_t next) {
    value.store(next, std::memory_order_seq_cst);
    if (!sleepers.load(std::memory_order_seq_cst)) return false;
    lock(&mutex);
    wake_all(&condition);
    unlock(&mutex);
    return true;
  }

  // Wait until the value differs from `last_seen`: spin for `seconds`, then sleep. Returns the seconds waited.
  double wait(uint64_t last_seen, double seconds) {
    double start_time = now(), until = start_time + seconds;
    do {
      for (int i = 0; i < 32; i++) {
        if (value.load(std::memory_order_acquire) != last_seen) return now() - start_time;
        spin_pause();
      }
    } while (now() < until);
    lock(&mutex);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (value.load(std::memory_order_seq_cst) == last_seen) sleep_on(&condition, &mutex);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
    unlock(&mutex);
    return now() - start_time;
  }
};

struct ThreadPool {
  Mutex mutex = MUTEX_INIT;
  Event start;  // value: 1024 * run number + threads of the run; workers with a number below the threads take part
  Event barrier;
  std::atomic<int> arrived{0};
  int workers = 0;  // number of worker threads started so far
  int size = 1;     // number of threads of the current run, including the caller
  pool_task task = nullptr;
  void* argument = nullptr;
  std::atomic<int64_t> waited_ns{0};  // time at barriers, summed over the threads of the current run
  int solo_runs = 0;                  // number of next runs that use one thread
  int solo_penalty = MIN_SOLO_RUNS;   // value for solo_runs when a run waits too long; doubles each time in a row
};

ThreadPool pool;

struct Worker {
  int number;
  uint64_t last_seen;
} workers[MAX_THREADS];

// Main loop of a worker thread: in every run with more threads than this worker's number, run the pool's task.
void worker_loop(Worker* self) {
  for (uint64_t last_seen = self->last_seen;;) {
    pool.start.wait(last_seen, IDLE_SPIN_SECONDS);
    last_seen = pool.start.value.load(std::memory_order_acquire);
    if (self->number < (int)(last_seen % 1024)) {
      {
        IeeeMode mode;
        pool.task(pool.argument, self->number, pool.size);
      }
      pool_barrier();
    }
  }
}

#ifdef _WIN32
DWORD WINAPI thread_main(void* worker) {
  worker_loop((Worker*)worker);
  return 0;
}
bool start_thread(Worker* worker) {
  HANDLE thread = CreateThread(nullptr, 0, thread_main, worker, 0, nullptr);
  if (thread) CloseHandle(thread);
  return thread != nullptr;
}
#else
void* thread_main(void* worker) {
  worker_loop((Worker*)worker);
  return nullptr;
}
// A fork waits until no thread holds the pool. The child process starts with an empty pool.
void before_fork() { lock(&pool.mutex); }
void after_fork() { unlock(&pool.mutex); }
void in_child() { new (&pool) ThreadPool; }
bool start_thread(Worker* worker) {
  pthread_t thread;
  if (pthread_create(&thread, nullptr, thread_main, worker)) return false;
  pthread_detach(thread);
  return true;
}
#endif
}  // namespace

PoolLock::PoolLock() {
#ifndef _WIN32
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, [] { pthread_atfork(before_fork, after_fork, in_child); });
#endif
  lock(&pool.mutex);
}

PoolLock::~PoolLock() { unlock(&pool.mutex); }

void pool_barrier() {
  // Read the size before announcing the arrival: afterwards this run may end and one of another size may begin.
  int size = pool.size;
  uint64_t last_seen = pool.barrier.value.load(std::memory_order_acquire);
  if (pool.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
    pool.arrived.store(0, std::memory_order_relaxed);
    pool.barrier.set(last_seen + 1);
  } else {
    pool.waited_ns.fetch_add((int64_t)(1e9 * pool.barrier.wait(last_seen, SPIN_SECONDS)), std::memory_order_relaxed);
  }
}

namespace {
// Start worker threads for a run of `threads` threads. Returns the number of threads that it can have.
int start_workers(int threads) {
  threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
  while (pool.workers < threads - 1) {
    Worker* worker = &workers[pool.workers];
    worker->number = pool.workers + 1;
    worker->last_seen = pool.start.value.load(std::memory_order_acquire);
    if (!start_thread(worker)) break;
    pool.workers++;
  }
  return threads > pool.workers + 1 ? pool.workers + 1 : threads;
}

// Run a task on `threads` threads, which exist. Returns whether a sleeping thread had to be woken.
bool run_task(int threads, pool_task task, void* argument) {
  IeeeMode mode;
  pool.size = threads;
  pool.task = task;
  pool.argument = argument;
  if (threads == 1) {
    task(argument, 0, 1);
    return false;
  }
  pool.waited_ns.store(0, std::memory_order_relaxed);
  uint64_t last = pool.start.value.load(std::memory_order_relaxed);
  bool had_sleepers = pool.start.set((last / 1024 + 1) * 1024 + (uint64_t)threads);
  task(argument, 0, threads);
  pool_barrier();
  return had_sleepers;
}
}  // namespace

void pool_run(int threads, pool_task task, void* argument) {
  threads = start_workers(threads);
  if (threads > 1 && pool.solo_runs > 0) {
    pool.solo_runs--;
    threads = 1;
  }
  double start_time = now();
  bool had_sleepers = run_task(threads, task, argument);
  if (threads == 1 || had_sleepers) return;
  double waited = 1e-9 * (double)pool.waited_ns.load(std::memory_order_relaxed);
  double wait_share = waited / (threads * (now() - start_time));
  if (wait_share <= MAX_WAIT_SHARE) {
    pool.solo_penalty = MIN_SOLO_RUNS;
  } else if (waited > MIN_WAIT_SECONDS) {
    pool.solo_runs = pool.solo_penalty;
    pool.solo_penalty = pool.solo_penalty * 2 < MAX_SOLO_RUNS ? pool.solo_penalty * 2 : MAX_SOLO_RUNS;
  }
}

void pool_share(int threads, pool_task task, void* argument) {
  threads = start_workers(threads);
  run_task(pool.solo_runs > 0 ? 1 : threads, task, argument);
}
