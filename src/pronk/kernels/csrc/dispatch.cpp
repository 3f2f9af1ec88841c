// Choice of the instruction set at run time; entry points for sampling, draft chains and memory bandwidth.

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__APPLE__) && defined(__aarch64__)
#include <sys/sysctl.h>
#endif

#include <stdlib.h>

#include <algorithm>

#include "common.h"
#include "ieee_mode.h"

using namespace pronk;

namespace {
#if defined(__x86_64__) || defined(_M_X64)
// Execute CPUID for a leaf and subleaf; write the registers EAX, EBX, ECX and EDX to `out`.
void cpuid(uint32_t leaf, uint32_t sub, uint32_t out[4]) {
  __asm__ __volatile__("cpuid" : "=a"(out[0]), "=b"(out[1]), "=c"(out[2]), "=d"(out[3]) : "a"(leaf), "c"(sub));
}

#if !defined(PRONK_WITHOUT_AVX512)
// Request the operating system's permission to use the AMX tile registers.
bool request_amx() {
#if defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
#else
  return false;  // the request exists on Linux only; other systems run without AMX
#endif
}
#endif

// Return the highest pronk_isa that this machine supports. The bits of XCR0 (xgetbv) tell which registers the operating
// system saves: XMM and YMM (bits 1 and 2), AVX-512 (5 to 7), AMX tiles (17 and 18).
int detect() {
  uint32_t r[4], xcr0 = 0, xcr0_high = 0;
  cpuid(0, 0, r);
  if (r[0] < 7) return PRONK_PORTABLE;
  cpuid(1, 0, r);
  bool osxsave = r[2] >> 27 & 1, fma = r[2] >> 12 & 1, f16c = r[2] >> 29 & 1;
  if (!osxsave || !fma || !f16c) return PRONK_PORTABLE;
  __asm__ __volatile__("xgetbv" : "=a"(xcr0), "=d"(xcr0_high) : "c"(0));
  cpuid(7, 0, r);
  if ((xcr0 & 6) != 6 || !(r[1] >> 5 & 1 /* AVX2 */)) return PRONK_PORTABLE;
#if defined(PRONK_WITHOUT_AVX512)
  return PRONK_AVX2;
#else
  const uint32_t avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // AVX512F, DQ, BW, VL
  if ((xcr0 & 0xe6) != 0xe6 || (r[1] & avx512) != avx512) return PRONK_AVX2;
  bool amx = (r[3] >> 24 & 1) && (r[3] >> 22 & 1) && (r[3] >> 25 & 1) && (xcr0 >> 17 & 3) == 3;  // AMX-TILE, BF16, INT8
  uint32_t max_subleaf = r[0];
  if (max_subleaf < 1) return PRONK_AVX512;
  cpuid(7, 1, r);
  if (!(r[0] >> 5 & 1 /* AVX512-BF16 */)) return PRONK_AVX512;
  return amx && request_amx() ? PRONK_AMX : PRONK_AVX512_BF16;
#endif
}

#if !defined(PRONK_WITHOUT_AVX512)
// Whether a processor with AVX-512 has its 8-bit dot product, AVX512-VNNI.
bool has_vnni() {
  uint32_t r[4];
  cpuid(7, 0, r);
  return r[2] >> 11 & 1;
}
#endif

#if !defined(PRONK_WITHOUT_AVX_VNNI)
// Whether a processor with AVX2 has AVX-VNNI, the 8-bit dot product of 256 bits.
bool has_avx_vnni() {
#if defined(PRONK_EMULATE)
  return true;
#endif
  uint32_t r[4];
  cpuid(7, 0, r);
  if (r[0] < 1) return false;
  cpuid(7, 1, r);
  return r[0] >> 4 & 1;
}
#endif
#else
int detect() { return PRONK_PORTABLE; }
#endif

// The highest pronk_isa of this machine, without emulation.
int machine_isa() {
  static const int isa = detect();
  return isa;
}

#if defined(__aarch64__)
// Whether the processor has the 8-bit dot product, or 8-bit matrix products (i8mm). The bits are those of Linux's
// asm/hwcap.h.
bool has_arm(bool i8mm) {
#if defined(__linux__)
  return i8mm ? getauxval(AT_HWCAP2) >> 13 & 1 : getauxval(AT_HWCAP) >> 20 & 1;
#elif defined(__APPLE__)
  int found = 0;
  size_t size = sizeof(found);
  const char* name = i8mm ? "hw.optional.arm.FEAT_I8MM" : "hw.optional.arm.FEAT_DotProd";
  return sysctlbyname(name, &found, &size, nullptr, 0) == 0 && found;
#else
  return false;
#endif
}
#endif
}  // namespace

const IsaKernels* pronk::isa_kernels(int isa, bool fast) {
#if defined(PRONK_EMULATE) && (defined(__x86_64__) || defined(_M_X64))
  if (isa > PRONK_AVX2 && machine_isa() == PRONK_AVX2) return isa == PRONK_AMX ? &kernels_emulated_amx : &kernels_avx2;
#endif
  switch (isa) {
#if defined(__x86_64__) || defined(_M_X64)
    case PRONK_AVX2: return &kernels_avx2;
#if !defined(PRONK_WITHOUT_AVX512)
    case PRONK_AVX512: return &kernels_avx512;
    case PRONK_AVX512_BF16: return fast ? &kernels_avx512_bf16 : &kernels_avx512;
    case PRONK_AMX: return fast ? &kernels_amx : &kernels_amx_int8;
#endif
#endif
    default: (void)fast; return &kernels_portable;
  }
}

const QuantKernels* pronk::quant_kernels(int isa) {
#if defined(__x86_64__) || defined(_M_X64)
#if !defined(PRONK_WITHOUT_AVX512)
  static const bool vnni = has_vnni();
  if (isa >= PRONK_AVX512 && vnni) return &quant_vnni;
#endif
#if !defined(PRONK_WITHOUT_AVX_VNNI)
  static const bool avx_vnni = has_avx_vnni();
  if (isa == PRONK_AVX2 && avx_vnni) return &quant_avx_vnni;
#endif
#elif defined(__aarch64__)
  static const bool i8mm = has_arm(true), dot = has_arm(false);
  if (i8mm) return &quant_i8mm;
  if (dot) return &quant_dot;
#endif
  return isa_kernels(isa, false)->quant;
}

const StoredType* pronk::stored_type(const QuantKernels* quant, int32_t number) {
  for (int i = 0; i < NUM_STORED_TYPES; i++)
    if (quant->stored[i].number == number) return quant->stored + i;
  return nullptr;
}

namespace {
// Arguments and results of read_part, which pronk_read runs on every thread.
struct ReadTask {
  const char* data;
  int64_t bytes;
  double sum[256];  // [thread number]; 256 is MAX_THREADS of thread_pool.cpp
};

void read_part(void* argument, int thread, int threads) {
  ReadTask* read = (ReadTask*)argument;
  const uint64_t* p = (const uint64_t*)read->data;
  int64_t lines = read->bytes / 64, from = lines * thread / threads * 8, to = lines * (thread + 1) / threads * 8;
  uint64_t a[8] = {0};
  for (int64_t i = from; i < to; i += 8) {
    __builtin_prefetch(p + i + 256);
    for (int j = 0; j < 8; j++) a[j] += p[i + j];
  }
  uint64_t total = 0;
  for (int j = 0; j < 8; j++) total += a[j];
  read->sum[thread] = (double)total;
}

// Arguments and results of multiply_part, which pronk_multiply runs on every thread.
struct MultiplyTask {
  double (*multiply)(int64_t rounds);
  int64_t rounds;
  double products[256];  // [thread number]
};

void multiply_part(void* argument, int thread, int) {
  MultiplyTask* task = (MultiplyTask*)argument;
  task->products[thread] = task->multiply(task->rounds);
}

// Compute the logits of the tokens in the best clusters, and write the tokens to `ids`. `pass` has one row
// with logits, which are the scores of the clusters; `order` [num_clusters] is overwritten. Of clusters with equal scores,
// those with smaller numbers are chosen, and a score that is no number is the smallest.
int32_t run_clusters(const pronk_clusters* head, const pronk_pass* pass, int32_t* order, int32_t* ids) {
  const float* scores = pass->logits;
  auto score = [scores](int32_t cluster) { return scores[cluster] == scores[cluster] ? scores[cluster] : -INFINITY; };
  for (int32_t i = 0; i < head->num_clusters; i++) order[i] = i;
  std::partial_sort(order, order + head->num_best, order + head->num_clusters, [score](int32_t a, int32_t b) {
    return score(a) != score(b) ? score(a) > score(b) : a < b;
  });
  std::sort(order, order + head->num_best);
  pronk_op op = *head->op;
  pronk_pass own = *pass;
  own.logits = head->logits;
  for (int32_t i = 0; i < head->num_best; i++) {
    op.w = head->clusters[order[i]];
    int32_t code = pronk_run(&op, 1, &own);
    if (code) return code;
    memcpy(ids, head->tokens + order[i] * op.w->N, (size_t)op.w->N * sizeof(int32_t));
    own.logits += op.w->N;
    ids += op.w->N;
  }
  return 0;
}
}  // namespace

int32_t pronk_version(void) { return PRONK_VERSION; }

void pronk_sizes(int32_t sizes[11]) {
  const size_t all[] = {sizeof(pronk_weights), sizeof(pronk_adapter), sizeof(pronk_blocks), sizeof(pronk_op),
                        sizeof(pronk_segment), sizeof(pronk_pass),    sizeof(pronk_chain),
                        sizeof(pronk_recurrence), sizeof(pronk_sampling), sizeof(pronk_clusters),
                        sizeof(pronk_choice)};
  for (int i = 0; i < 11; i++) sizes[i] = (int32_t)all[i];
}

int32_t pronk_detect(void) {
#if defined(PRONK_EMULATE)
  if (machine_isa() >= PRONK_AVX2) return PRONK_AMX;
#endif
  return machine_isa();
}

int32_t pronk_sample(const float* logits, int64_t vocab, float temperature, uint64_t key, int32_t isa) {
  IeeeMode mode;
  return isa_kernels(isa, false)->sampling->sample(logits, vocab, temperature, key);
}

void pronk_exp(double* x, int64_t count, int32_t isa) {
  IeeeMode mode;
  isa_kernels(isa, false)->sampling->exps(x, count);
}

void pronk_log(double* x, int64_t count, int32_t isa) {
  IeeeMode mode;
  isa_kernels(isa, false)->sampling->logs(x, count);
}

double pronk_total(const double* x, int64_t count, int32_t isa) {
  IeeeMode mode;
  return isa_kernels(isa, false)->sampling->total(x, count);
}

double pronk_exp_total(const float* x, int64_t count, float largest, int32_t isa) {
  IeeeMode mode;
  return isa_kernels(isa, false)->sampling->exp_total(x, count, largest);
}

int32_t pronk_draft_chain(const pronk_op* ops, int64_t count, const pronk_pass* pass, const pronk_chain* chain) {
  const pronk_op* head = ops + count - 1;
  if (pass->segments != 1 || count < 1 || head->output != PRONK_LOGITS || pass->num_wanted != 1) return -2;
  pronk_pass p = *pass;
  pronk_segment segment = *pass->segment;
  p.segment = &segment;
  pronk_recurrence recurrence = pass->recurrence ? *pass->recurrence : pronk_recurrence();
  if (pass->recurrence) p.recurrence = &recurrence;
  const pronk_clusters* clusters = chain->clusters;
  const int64_t vocab = clusters ? clusters->num_best * clusters->clusters[0]->N : head->w->N;
  int32_t* order = clusters ? (int32_t*)malloc((size_t)clusters->num_clusters * sizeof(int32_t)) : nullptr;
  if (clusters && !order) return -1;
  const int32_t first_row = 0;
  int32_t token = 0;
  int32_t passes = 0;
  int32_t code = 0;
  while (passes < chain->steps) {
    code = pronk_run(ops, count, &p);
    if (code) break;
    const float* logits = p.logits;
    const int32_t* ids = chain->ids;
    if (clusters) {
      int32_t* own_ids = clusters->ids + passes * vocab;
      code = run_clusters(clusters, &p, order, own_ids);
      if (code) break;
      logits = clusters->logits;
      ids = own_ids;
    }
    float confidence = 0.0f;
    token = pronk_sample_draft(chain->sampling, logits, vocab, chain->position + passes, ids, chain->scores + passes * vocab,
                               &confidence, p.isa);
    passes++;
    if (token < 0 || !chain->on_token(token, confidence)) break;
    // Draft tokens are replayed in each later pass, which leaves the state as it is.
    if (recurrence.keeps) {
      recurrence.updates += recurrence.replayed;
      recurrence.replayed = 0;
    }
    recurrence.replayed += segment.nodes - recurrence.absorbed - recurrence.certain;
    recurrence.keeps = 0;
    recurrence.absorbed = 0;
    recurrence.certain = 0;
    recurrence.num_copies = 0;
    segment.length += segment.nodes;
    segment.nodes = 1;
    segment.computed = 0;
    segment.parents = nullptr;
    p.stream = (char*)p.stream + (p.rows - 1) * p.hidden * (p.type == PRONK_F32 ? 4 : 2);
    p.rows = 1;
    p.tokens = &token;
    p.wanted = &first_row;
  }
  free(order);
  return code ? code : passes;
}

double pronk_read(const void* data, int64_t bytes, int32_t threads) {
  ReadTask read = {(const char*)data, bytes, {0}};
  PoolLock locked;
  pool_run(threads, read_part, &read);
  double sum = 0;
  for (double thread_sum : read.sum) sum += thread_sum;
  return sum;
}

double pronk_multiply(int64_t rounds, int32_t isa, int32_t threads) {
  MultiplyTask task = {quant_kernels(isa)->multiply, rounds, {0}};
  PoolLock locked;
  pool_run(threads, multiply_part, &task);
  double products = 0;
  for (double of_thread : task.products) products += of_thread;
  return products;
}
