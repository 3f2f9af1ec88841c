// Choices of tokens by a request's options: the target's token after each node of the accepted path of a token tree, and
// draft tokens. The bits of the target's tokens are those of pronk.sampling.sampler, whose steps these are: penalties,
// temperature, top-k, top-p, min-p, noise, argmax.

#include <algorithm>
#include <functional>
#include <stdlib.h>

#include "common.h"
#include "ieee_mode.h"

using namespace pronk;

namespace {
#include "noise.inc"

const float MAX_LOGIT = 1e8f;        // `_MAX_LOGIT` of pronk.sampling.logits_processors
// Numbers of the highest scores that top-p sorts before it sorts all: a few tokens usually reach it.
const int64_t FEW_CANDIDATES = 32, NUM_CANDIDATES = 512;
// Number of scores that one step of a loop over the vocabulary compares with a bound, before it looks at each of them.
const int64_t BLOCK = 64;

// The tokens that top-k, top-p and min-p keep: those with a score above `lowest`, and the first `num_equal` tokens whose
// score is `lowest`; none with a score below `floor`.
struct Kept {
  float lowest = -__builtin_inff();
  int64_t num_equal = INT64_MAX;
  float floor = -__builtin_inff();
};

// Memory of one call.
struct Scratch {
  float* scores;            // [vocab] logits of a node after penalties, divided by the temperature
  float *candidates, *best;  // [vocab] scores after top-k; the highest scores
};

// Call `visit` with 0, 1, …, count - 1. Inner loops have a constant length, so that the compiler vectorizes them.
template <typename Visit>
inline void for_each(int64_t count, Visit visit) {
  int64_t from = 0;
  for (; from + BLOCK <= count; from += BLOCK)
    for (int64_t i = 0; i < BLOCK; i++) visit(from + i);
  for (; from < count; from++) visit(from);
}

// Return whether one of `count` scores, at most BLOCK, is at least `bound`.
inline bool reaches(const float* scores, int64_t count, float bound) {
  int reached = 0;
  for_each(count, [&](int64_t i) { reached |= scores[i] >= bound; });
  return reached;
}

// Copy finite logits; return false if one is not finite.
bool copy_finite(const float* logits, int64_t vocab, float* copy) {
  uint32_t not_finite = 0;
  for_each(vocab, [&](int64_t i) {
    uint32_t bits;
    memcpy(&bits, logits + i, 4);
    not_finite |= (bits & 0x7f800000u) == 0x7f800000u;
    copy[i] = logits[i];
  });
  return !not_finite;
}

void divide(float* scores, int64_t count, float divisor) {
  for_each(count, [=](int64_t i) { scores[i] /= divisor; });
}

// Return the largest of scores, at least one, none of which is NaN.
float find_largest(const float* scores, int64_t count) {
  float lanes[BLOCK];
  for (int64_t i = 0; i < BLOCK; i++) lanes[i] = scores[0];
  int64_t from = 0;
  for (; from + BLOCK <= count; from += BLOCK)
    for (int64_t i = 0; i < BLOCK; i++) lanes[i] = scores[from + i] > lanes[i] ? scores[from + i] : lanes[i];
  for (; from < count; from++) lanes[0] = scores[from] > lanes[0] ? scores[from] : lanes[0];
  return *std::max_element(lanes, lanes + BLOCK);
}

// Return whether one of 8 tokens is in the text.
inline bool any_in_text(const pronk_sampling* sampling, int64_t token) {
  uint64_t in_prompt;
  memcpy(&in_prompt, sampling->in_prompt + token, 8);
  int32_t counts = 0;
  for (int i = 0; i < 8; i++) counts |= sampling->counts[token + i];
  return in_prompt || counts;
}

// Return the logit `x` of a token after the penalties of pronk.sampling.logits_processors.Penalties.
inline float penalized(const pronk_sampling* sampling, int64_t token, float x) {
  int32_t count = sampling->counts[token];
  if (sampling->repetition != 1.0 && (sampling->in_prompt[token] || count > 0)) {
    const float repetition = (float)sampling->repetition;
    x = x > 0.0f ? x / repetition : x * repetition;
    x = x > MAX_LOGIT ? MAX_LOGIT : x;
    x = x < -MAX_LOGIT ? -MAX_LOGIT : x;
  }
  if (count > 0) {
    x -= (float)sampling->frequency * (float)count;
    x -= (float)sampling->presence;
  }
  return x;
}

// Apply the penalties to the logits of all tokens.
void penalize(const pronk_sampling* sampling, int64_t vocab, float* logits) {
  for (int64_t token = 0; token < vocab; token++) {
    if (token % 8 == 0) {
      while (token + 8 <= vocab && !any_in_text(sampling, token)) token += 8;
      if (token >= vocab) break;
    }
    logits[token] = penalized(sampling, token, logits[token]);
  }
}

// Apply the penalties to the logits of the tokens `ids` (null: 0, 1, …), except those that are banned.
void penalize_draft(const pronk_sampling* sampling, int64_t vocab, const int32_t* ids, float* logits) {
  for (int64_t i = 0; i < vocab; i++)
    if (logits[i] != -__builtin_inff()) logits[i] = penalized(sampling, ids ? ids[i] : i, logits[i]);
}

// Write the `count` highest of `size` scores to `best` [size], the highest first.
void find_highest(const float* scores, int64_t size, int64_t count, float* best) {
  // Scores are collected until `full` are there; then only the highest stay, and lower ones are left out from then on.
  const int64_t full = std::min(size, 2 * count + BLOCK);
  int64_t found = 0;
  float bound = -__builtin_inff();
  auto keep_highest = [&] {
    std::nth_element(best, best + count - 1, best + found, std::greater<float>());
    found = count;
    bound = best[count - 1];
  };
  for (int64_t from = 0; from < size; from += BLOCK) {
    int64_t length = std::min(BLOCK, size - from);
    if (!reaches(scores + from, length, bound)) continue;
    if (found + length > full) keep_highest();
    for (int64_t i = from; i < from + length; i++)
      if (scores[i] >= bound) best[found++] = scores[i];
  }
  if (found > count) keep_highest();
  std::sort(best, best + count, std::greater<float>());
}

// Keep the first `count` of the sorted scores `best`.
void keep_first(const float* best, int64_t count, Kept* kept) {
  kept->lowest = best[count - 1];
  kept->num_equal = std::count(best, best + count, kept->lowest);
}

// Write the scores of the kept tokens to `out`, by ascending token; return their number.
int64_t gather(const float* scores, int64_t vocab, Kept kept, float* out) {
  int64_t count = 0;
  for (int64_t from = 0; from < vocab; from += BLOCK) {
    int64_t length = std::min(BLOCK, vocab - from);
    if (!reaches(scores + from, length, kept.lowest)) continue;
    for (int64_t i = from; i < from + length; i++)
      if (scores[i] > kept.lowest || (scores[i] == kept.lowest && kept.num_equal-- > 0)) out[count++] = scores[i];
  }
  return count;
}

// Keep the likeliest tokens whose probabilities together reach `top_p`.
void keep_top_p(const float* scores, int64_t size, double top_p, const Sampling* kernels, float* best, Kept* kept) {
  const float largest = find_largest(scores, size);
  const double total = kernels->exp_total(scores, size, largest);
  for (int64_t count : {std::min(FEW_CANDIDATES, size), std::min(NUM_CANDIDATES, size), size}) {
    find_highest(scores, size, count, best);
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) {
      sum += exact_exp((double)best[i] - (double)largest) / total;
      if (sum >= top_p || i == size - 1) return keep_first(best, i + 1, kept);
    }
  }
}

// Return which tokens top-k, top-p and min-p keep.
Kept truncate(const float* scores, int64_t vocab, int64_t top_k, double top_p, float log_min_p, const Sampling* kernels,
              Scratch scratch) {
  Kept kept;
  int64_t count = vocab;
  if (top_k > 0 && top_k < vocab) {
    find_highest(scores, vocab, top_k, scratch.best);
    keep_first(scratch.best, top_k, &kept);
    count = gather(scores, vocab, kept, scratch.candidates);
    scores = scratch.candidates;
  }
  if (top_p < 1.0) keep_top_p(scores, count, top_p, kernels, scratch.best, &kept);
  if (log_min_p > -__builtin_inff()) kept.floor = find_largest(scores, count) + log_min_p;
  return kept;
}

// Return the first kept token with the largest score plus noise.
int64_t sample_kept(const float* scores, int64_t vocab, Kept kept, uint64_t key) {
  static const NoiseBound noise_bound;
  const float bound = std::max(kept.lowest, kept.floor);
  double best = -__builtin_inf();
  int64_t best_token = -1;
  for (int64_t from = 0; from < vocab; from += BLOCK) {
    int64_t length = std::min(BLOCK, vocab - from);
    if (!reaches(scores + from, length, bound)) continue;
    for (int64_t token = from; token < from + length; token++) {
      if (!(scores[token] >= bound)) continue;
      if (scores[token] == kept.lowest && kept.num_equal-- <= 0) continue;
      uint64_t hash = hash_token(key, (uint64_t)token);
      // If the score with noise cannot reach the best one, skip the two logarithms.
      if ((double)scores[token] + noise_bound.bound[hash >> 56] < best) continue;
      double value = (double)scores[token] + gumbel(hash);
      if (value > best) {
        best = value;
        best_token = token;
      }
    }
  }
  return best_token;
}

// Whether the options leave out tokens.
inline bool truncates(const pronk_sampling* sampling) {
  return sampling->top_k > 0 || sampling->top_p < 1.0 || sampling->log_min_p > -__builtin_inff();
}

// Return the target's token at a position, or -1 if a logit is not finite.
int64_t choose_token(const pronk_sampling* sampling, const float* logits, int64_t vocab, int64_t position,
                     const Sampling* kernels, Scratch scratch) {
  const uint64_t key = hash_token(sampling->key, (uint64_t)position);
  if (sampling->counts) {
    if (!copy_finite(logits, vocab, scratch.scores)) return -1;
    penalize(sampling, vocab, scratch.scores);
    logits = scratch.scores;
  }
  if (sampling->temperature == 0.0f || !truncates(sampling))
    return kernels->sample(logits, vocab, sampling->temperature, key);
  if (!sampling->counts && !copy_finite(logits, vocab, scratch.scores)) return -1;
  float* scores = scratch.scores;
  divide(scores, vocab, sampling->temperature);
  Kept kept = truncate(scores, vocab, sampling->top_k, sampling->top_p, sampling->log_min_p, kernels, scratch);
  return sample_kept(scores, vocab, kept, key);
}

// Whether no logit is NaN or plus infinity, and one is finite.
bool has_draft_token(const float* logits, int64_t vocab) {
  float largest = -__builtin_inff();
  bool is_valid = true;
  for (int64_t i = 0; i < vocab; i++) {
    is_valid &= logits[i] < __builtin_inff();
    largest = logits[i] > largest ? logits[i] : largest;
  }
  return is_valid && largest > -__builtin_inff();
}

// Divide logits by the temperature, and ban the tokens that top-k, top-p and min-p leave out. Returns whether there was
// memory for it.
bool truncate_draft(const pronk_sampling* sampling, int64_t vocab, const Sampling* kernels, float* scores) {
  float* memory = (float*)malloc((size_t)(2 * vocab) * sizeof(float));
  if (!memory) return false;
  Scratch scratch = {nullptr, memory, memory + vocab};
  divide(scores, vocab, sampling->temperature);
  Kept kept = truncate(scores, vocab, sampling->top_k, sampling->top_p, sampling->log_min_p, kernels, scratch);
  free(memory);
  const float bound = std::max(kept.lowest, kept.floor);
  for (int64_t i = 0; i < vocab; i++) {
    bool keeps = scores[i] >= bound && (scores[i] != kept.lowest || kept.num_equal-- > 0);
    if (!keeps) scores[i] = -__builtin_inff();
  }
  return true;
}
}  // namespace

int64_t pronk_truncate(const float* scores, int64_t vocab, int64_t top_k, double top_p, float log_min_p, int64_t* ids,
                       int32_t isa) {
  IeeeMode mode;
  float* memory = (float*)malloc((size_t)(2 * vocab) * sizeof(float));
  if (!memory) return -2;
  Scratch scratch = {nullptr, memory, memory + vocab};
  Kept kept = truncate(scores, vocab, top_k, top_p, log_min_p, isa_kernels(isa, false)->sampling, scratch);
  free(memory);
  const float bound = std::max(kept.lowest, kept.floor);
  int64_t count = 0;
  for (int64_t from = 0; from < vocab; from += BLOCK) {
    int64_t length = std::min(BLOCK, vocab - from);
    if (!reaches(scores + from, length, bound)) continue;
    for (int64_t token = from; token < from + length; token++)
      if (scores[token] >= bound && (scores[token] != kept.lowest || kept.num_equal-- > 0)) ids[count++] = token;
  }
  return count;
}

void pronk_likeliest(const float* logits, int64_t rows, int64_t vocab, int64_t count, int32_t* ids, float* largest) {
  for (int64_t row = 0; row < rows; row++) {
    const float* x = logits + row * vocab;
    int32_t* token = ids + row * count;
    float* best = largest + row * count;
    int64_t found = 0;
    for (int64_t from = 0; from < vocab; from += BLOCK) {
      int64_t length = std::min(BLOCK, vocab - from);
      if (found == count && !reaches(x + from, length, best[count - 1])) continue;
      for (int64_t i = from; i < from + length; i++) {
        float value = x[i] == x[i] ? x[i] : -__builtin_inff();
        if (found == count && !(value > best[count - 1])) continue;
        int64_t place = found < count ? found++ : count - 1;
        for (; place > 0 && value > best[place - 1]; place--) {
          best[place] = best[place - 1];
          token[place] = token[place - 1];
        }
        best[place] = value;
        token[place] = (int32_t)i;
      }
    }
  }
}

int32_t pronk_verify(const pronk_sampling* sampling, const float* logits, int64_t vocab, int64_t position,
                     const int32_t* tokens, const int32_t* parents, int32_t nodes, int32_t* path, int32_t isa) {
  IeeeMode mode;
  float* memory = (float*)malloc((size_t)(3 * vocab) * sizeof(float));
  if (!memory) return -2;
  Scratch scratch = {memory, memory + vocab, memory + 2 * vocab};
  const Sampling* kernels = isa_kernels(isa, false)->sampling;
  int32_t node = 0, accepted = 0;
  int64_t token;
  while (true) {
    token = choose_token(sampling, logits + node * vocab, vocab, position + accepted, kernels, scratch);
    if (token < 0) break;
    int32_t child = node + 1;
    while (child < nodes && !((parents ? parents[child] : child - 1) == node && tokens[child] == token)) child++;
    if (child >= nodes) break;
    if (sampling->counts) sampling->counts[token]++;
    path[accepted++] = node = child;
  }
  for (int32_t i = 0; sampling->counts && i < accepted; i++) sampling->counts[tokens[path[i]]]--;
  free(memory);
  if (token < 0) return -1;
  path[accepted] = (int32_t)token;
  return accepted;
}

int32_t pronk_sample_draft(const pronk_sampling* sampling, const float* logits, int64_t vocab, int64_t position,
                           const int32_t* ids, float* scores, float* confidence, int32_t isa) {
  IeeeMode mode;
  const Sampling* kernels = isa_kernels(isa, false)->sampling;
  const uint64_t key = hash_token(sampling->key, (uint64_t)position);
  const bool has_noise = sampling->temperature != 0.0f;
  float temperature = sampling->temperature;
  if (sampling->counts || (has_noise && truncates(sampling))) {
    if (!has_draft_token(logits, vocab)) return -1;
    memcpy(scores, logits, (size_t)vocab * sizeof(float));
    logits = scores;
    if (sampling->counts) penalize_draft(sampling, vocab, ids, scores);
    if (has_noise && truncates(sampling)) {
      if (!truncate_draft(sampling, vocab, kernels, scores)) return -2;
      temperature = 1.0f;
    }
  }
  return kernels->sample_draft(logits, vocab, temperature, has_noise ? &key : nullptr, ids, scores, confidence);
}
