// The floating-point mode of the thread, on which the bits of results depend.
#pragma once
#include <stdint.h>

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

// Arithmetic of IEEE 754 on this thread while the object exists: rounding to nearest, and subnormal numbers. Another library
// may have changed the thread's mode, such as one that was compiled with -ffast-math.
struct IeeeMode {
#if defined(__x86_64__) || defined(_M_X64)
  unsigned saved = _mm_getcsr();
  IeeeMode() { _mm_setcsr(0x1f80); }  // the initial value of MXCSR: all exceptions masked
  ~IeeeMode() { _mm_setcsr(saved); }
#elif defined(__aarch64__)
  uint64_t saved;
  IeeeMode() {
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(saved));
    __asm__ __volatile__("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
  }
  ~IeeeMode() { __asm__ __volatile__("msr fpcr, %0" : : "r"(saved) : "memory"); }
#else
  IeeeMode() {}
  ~IeeeMode() {}
#endif
};
