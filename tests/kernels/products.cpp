// Compute matrix products on another processor or an emulator: products CASES OUT. Each case of the file CASES is a
// Case, the packed weights, their codebook, and the input rows; the outputs of all cases go to OUT. The program prints which tiles of
// quantized weights the processor gets. test_arm.py writes and reads the files.
#include <stdio.h>
#include <stdlib.h>

#include "common.h"

struct Case {
  pronk_weights w;
  int64_t bytes, codebook_bytes, rows, threads;  // bytes of the packed weights, and of their codebook
  int64_t activation;                            // pronk_activation
};

static void* read_bytes(FILE* file, size_t bytes) {
  void* data = malloc(bytes);
  if ((bytes && !data) || fread(data, 1, bytes, file) != bytes) {
    fprintf(stderr, "products: the file of cases is incomplete\n");
    exit(2);
  }
  return data;
}

int main(int count, char** arguments) {
  FILE* cases = count == 3 ? fopen(arguments[1], "rb") : nullptr;
  FILE* out = cases ? fopen(arguments[2], "wb") : nullptr;
  if (!out) {
    fprintf(stderr, "usage: products CASES OUT\n");
    return 2;
  }
  Case c;
  while (fread(&c, sizeof c, 1, cases) == 1) {
    c.w.data = read_bytes(cases, (size_t)c.bytes);
    c.w.codebook = read_bytes(cases, (size_t)c.codebook_bytes);
    c.w.bias = nullptr;
    c.w.order = nullptr;
    float* x = (float*)read_bytes(cases, (size_t)(c.rows * c.w.K) * 4);
    float* y = (float*)malloc((size_t)(c.rows * c.w.N) * 4);
    pronk_op op = {};
    op.kind = PRONK_LINEAR;
    op.output = PRONK_LOGITS;
    op.scale = 1.0f;
    op.activation = (int32_t)c.activation;
    op.w = &c.w;
    pronk_pass pass = {};
    pass.rows = c.rows;
    pass.hidden = (int32_t)c.w.K;
    pass.isa = pronk_detect();
    pass.threads = (int32_t)c.threads;
    pass.stream = x;
    pass.logits = y;
    int32_t code = pronk_run(&op, 1, &pass);
    if (code || fwrite(y, 4, (size_t)(c.rows * c.w.N), out) != (size_t)(c.rows * c.w.N)) {
      fprintf(stderr, "products: error %d\n", code);
      return 1;
    }
    free(x);
    free(y);
    free((void*)c.w.data);
    free((void*)c.w.codebook);
  }
  const pronk::QuantKernels* tiles = pronk::quant_kernels(pronk_detect());
  puts(tiles == &pronk::quant_i8mm ? "i8mm" : tiles == &pronk::quant_dot ? "dot" : "portable");
  return fclose(out) ? 1 : 0;
}
