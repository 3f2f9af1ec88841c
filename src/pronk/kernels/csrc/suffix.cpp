// A suffix automaton (it maps every substring of its texts to its count and the tokens after it) and draft trees of
// such tokens; compiled to a library of its own. The Python fallback, drafting/from_text/_growth.py, explains the
// algorithm and builds bit-identical trees. `suffixes.py` mirrors `pronk_suffix_tree` and checks version
// and size. If an allocation fails, the call returns an error and the automaton is unusable.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <new>

#include "export.h"

struct pronk_suffixes;

// Arguments and results of pronk_suffixes_grow. A source is an automaton. A match is a suffix of the text that occurs
// in a source; the tokens after its occurrences there become draft tokens. A draft token belongs to one of 32
// acceptance buckets (bucket_of). Its acceptance probability is estimated as (accepted + prior * weight) /
// (offered + weight); `prior` depends on bucket and depth. A node's gain is the product of these along its path.
struct pronk_suffix_tree {
  pronk_suffixes* const* sources;  // automaton of the text, then automata of earlier outputs
  const int32_t* appended;  // [num_appended] the text's tokens from number `first_appended` on, up to its end. The tokens
                            // among them that the text's automaton lacks are appended before the tree grows. The
                            // automaton has at least `first_appended` tokens
  int64_t first_appended, num_appended;
  const int32_t* tail;      // [tail_tokens] last tokens of the text, at least one; the text's last token is the root
  int32_t num_sources, tail_tokens;
  int32_t width, max_depth; // maximum number of draft tokens; maximum depth of a draft token
  int32_t min_match;        // minimum length of a match in tokens
  double depth_factor;      // a match of n tokens yields draft tokens at depths up to depth_factor * n
  double min_gain;          // draft tokens with a smaller gain are dropped
  double weight;            // weight of the prior: it counts like this number of verified draft tokens
  const double *offered, *accepted;  // [32] per bucket: number of draft tokens verified so far; number accepted
  double* priors;           // [32, 4] cache by bucket and depth (1, 2, 3, 4 and more); NaN: not computed yet
  double (*prior)(int32_t bucket, int32_t depth);  // computes a prior; the result is stored in `priors`
  // Results by node, [width + 1] each: the root first, parents before their children.
  int32_t *tokens, *parents, *buckets;
  double* gains;
};

namespace {
const int MAX_CHAINED_EDGES = 8;   // maximum edges of a state that `find` looks up in its list; with more, in EdgeTable
const int MAX_LISTED_EDGES = 128;  // maximum edges of a state that yield draft tokens: the oldest ones
const int32_t NO_TOKEN = -1;

// Growable array; `push` returns false if memory is exhausted.
template <typename T>
struct Array {
  T* at = nullptr;
  int64_t size = 0, capacity = 0;

  Array() = default;
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { free(at); }

  bool push(const T& value) {
    if (size == capacity) {
      int64_t new_capacity = capacity + capacity / 4 + 16;
      void* moved = realloc(at, (size_t)new_capacity * sizeof(T));
      if (!moved) return false;
      at = (T*)moved, capacity = new_capacity;
    }
    at[size++] = value;
    return true;
  }
  T& operator[](int64_t i) { return at[i]; }
  const T& operator[](int64_t i) const { return at[i]; }
  int64_t bytes() const { return capacity * (int64_t)sizeof(T); }
  bool equals(const Array& other) const {
    return size == other.size && (!size || !memcmp(at, other.at, (size_t)size * sizeof(T)));
  }
};

// Hash table of the edges of states with more than MAX_CHAINED_EDGES edges, by state and token. The entry of NO_TOKEN
// is the newest of a state's MAX_LISTED_EDGES oldest edges, the head of their list; states with fewer edges have none.
struct EdgeTable {
  struct Entry {
    int32_t state, token, edge;  // edge: index of the edge; -1 if the entry is unused
  };
  Entry* at = nullptr;
  int64_t size = 0, capacity = 0;  // used entries; all entries, a power of two

  EdgeTable() = default;
  EdgeTable(const EdgeTable&) = delete;
  EdgeTable& operator=(const EdgeTable&) = delete;
  ~EdgeTable() { free(at); }

  static uint64_t hash(int32_t state, int32_t token) {
    uint64_t h = (uint64_t)(uint32_t)state << 32 | (uint32_t)token;
    h = (h ^ h >> 31) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 29;
  }

  // Return the index of the edge, or -1 if there is none.
  int32_t find(int32_t state, int32_t token) const {
    if (!capacity) return -1;
    for (uint64_t i = hash(state, token);; i++) {
      const Entry& e = at[i & (uint64_t)(capacity - 1)];
      if (e.edge < 0 || (e.state == state && e.token == token)) return e.edge;
    }
  }

  bool add(const Entry& entry) {
    if (4 * (size + 1) > 3 * capacity && !grow()) return false;
    put(entry);
    size++;
    return true;
  }

  void put(const Entry& entry) {
    uint64_t i = hash(entry.state, entry.token);
    while (at[i & (uint64_t)(capacity - 1)].edge >= 0) i++;
    at[i & (uint64_t)(capacity - 1)] = entry;
  }

  bool grow() {
    int64_t before = capacity, new_capacity = capacity ? 2 * capacity : 64;
    Entry *old = at, *entries = (Entry*)malloc((size_t)new_capacity * sizeof(Entry));
    if (!entries) return false;
    memset(entries, 0xff, (size_t)new_capacity * sizeof(Entry));
    at = entries, capacity = new_capacity;
    for (int64_t i = 0; i < before; i++)
      if (old[i].edge >= 0) put(old[i]);
    free(old);
    return true;
  }
};

// A suffix of the text that occurs in an automaton: the suffix's state there, and its number of tokens.
struct Match {
  int32_t state, length;
};
}  // namespace

// A suffix automaton over one or more texts; occurrences of substrings of up to max_match + 1 tokens are counted.
struct pronk_suffixes {
  int32_t max_match;
  bool broken = false;  // an allocation failed in the middle of a change
  // One entry per state; state 0 is the root. `length`: tokens of the state's longest string; `link`: suffix link, -1
  // for the root; `count`: number of occurrences; `edges`: newest edge, the head of the state's linked list of edges.
  Array<int32_t> length, link, count, edges;
  Array<uint8_t> degree;  // number of edges, at most MAX_LISTED_EDGES + 1
  Array<int32_t> token, target, next;  // per edge: its token, the state it leads to, the next edge in the list (or -1)
  EdgeTable edge_table;
  int64_t tokens = 0;  // number of tokens of all texts
  int32_t last = 0;    // state of the whole current text
  Match counted = {0, 0};  // longest suffix of the current text of at most max_match + 1 tokens

  // Return the edge of a state for a token, or -1.
  int32_t find(int32_t state, int32_t wanted) const {
    if (wanted < 0) return -1;
    if (degree[state] > MAX_CHAINED_EDGES) return edge_table.find(state, wanted);
    int32_t edge = edges[state];
    while (edge >= 0 && token[edge] != wanted) edge = next[edge];
    return edge;
  }

  // Add a state without edges. Returns the state, or -1 if memory is exhausted.
  int32_t add_state(int32_t new_length, int32_t new_link, int32_t new_count) {
    bool ok = length.push(new_length) && link.push(new_link) && count.push(new_count) && edges.push(-1);
    if (!ok || !degree.push(0)) return -1;
    return (int32_t)length.size - 1;
  }

  bool add_edge(int32_t state, int32_t new_token, int32_t new_target) {
    int32_t edge = (int32_t)token.size, before = edges[state];
    if (!token.push(new_token) || !target.push(new_target) || !next.push(before)) return false;
    edges[state] = edge;
    int had = degree[state];
    if (had <= MAX_LISTED_EDGES) degree[state] = (uint8_t)(had + 1);
    if (had == MAX_LISTED_EDGES && !edge_table.add({state, NO_TOKEN, before})) return false;
    if (had > MAX_CHAINED_EDGES) return edge_table.add({state, new_token, edge});
    if (had == MAX_CHAINED_EDGES)
      for (; edge >= 0; edge = next[edge])
        if (!edge_table.add({state, token[edge], edge})) return false;
    return true;
  }

  // Return the head of the list of a state's MAX_LISTED_EDGES oldest edges (of all edges, if there are fewer).
  int32_t first_listed(int32_t state) const {
    return degree[state] > MAX_LISTED_EDGES ? edge_table.find(state, NO_TOKEN) : edges[state];
  }

  // Return the state whose longest string is that of `state` plus the edge's token; clone the edge's target if its
  // longest string is longer. Returns -1 if memory is exhausted.
  int32_t split_state(int32_t state, int32_t edge) {
    int32_t child = target[edge], longer = length[state] + 1;
    if (length[child] == longer) return child;
    int32_t clone = add_state(longer, link[child], count[child]);
    if (clone < 0 || !copy_edges(child, clone)) return -1;
    link[child] = clone;
    int32_t wanted = token[edge];
    while (edge >= 0 && target[edge] == child) {
      target[edge] = clone;
      state = link[state];
      edge = state >= 0 ? find(state, wanted) : -1;
    }
    return clone;
  }

  // Add copies of a state's edges to another state, in the same order. Returns false if memory is exhausted.
  bool copy_edges(int32_t from, int32_t to) {
    Array<int32_t> newest_first;
    for (int32_t edge = edges[from]; edge >= 0; edge = next[edge])
      if (!newest_first.push(edge)) return false;
    while (newest_first.size) {
      int32_t edge = newest_first[--newest_first.size];
      if (!add_edge(to, token[edge], target[edge])) return false;
    }
    return true;
  }

  // Append a token to the current text. Returns false if memory is exhausted.
  bool extend(int32_t new_token) {
    int32_t state = last, edge = find(state, new_token);
    if (edge >= 0) {
      last = split_state(state, edge);
      return last >= 0 && count_suffixes(new_token);
    }
    last = add_state(length[state] + 1, 0, 0);
    if (last < 0) return false;
    for (; state >= 0 && (edge = find(state, new_token)) < 0; state = link[state])
      if (!add_edge(state, new_token, last)) return false;
    if (state >= 0) {
      int32_t shorter = split_state(state, edge);
      if (shorter < 0) return false;
      link[last] = shorter;
    }
    return count_suffixes(new_token);
  }

  // Count one more occurrence of each suffix of the current text of at most max_match + 1 tokens.
  bool count_suffixes(int32_t new_token) {
    int32_t before = state_of(counted.state, counted.length);  // not counted.state, which may have been split meanwhile
    counted.length = counted.length < max_match ? counted.length + 1 : max_match + 1;
    counted.state = state_of(target[find(before, new_token)], counted.length);
    for (int32_t state = counted.state; state > 0; state = link[state]) count[state]++;
    return true;
  }

  // Return the state of the suffix of `wanted` tokens of a string in `state`; that string has at most one token more.
  int32_t state_of(int32_t state, int32_t wanted) const {
    int32_t shorter = link[state];
    return shorter >= 0 && length[shorter] >= wanted ? shorter : state;
  }

  // Return the longest suffix of a match that is followed by a token somewhere in the automaton.
  Match continued(Match match) const {
    while (match.state && !degree[match.state]) match = {link[match.state], length[link[match.state]]};
    return match;
  }

  // Return the longest suffix of `tail`, up to max_match tokens, that is followed by a token in the automaton.
  Match longest_match(const int32_t* tail, int64_t tokens) const {
    Match match = {0, 0};
    for (int64_t i = tokens > max_match ? tokens - max_match : 0; i < tokens; i++) {
      int32_t edge = find(match.state, tail[i]);
      for (; edge < 0 && match.state; edge = find(match.state, tail[i]))
        match = {link[match.state], length[link[match.state]]};
      if (edge >= 0) match = {target[edge], match.length + 1};
    }
    return continued(match);
  }

  // Append a token to a match of `length_before` tokens and return the new match; the token's edge leads to `state`.
  Match follow(int32_t state, int32_t length_before) const {
    int32_t new_length = length_before < max_match ? length_before + 1 : max_match;
    return continued({state_of(state, new_length), new_length});
  }

  // Return the longest suffix of the strings of `state` that belongs to another state and so occurs more often.
  Match shorter(int32_t state) const {
    int32_t suffix = link[state] > 0 ? link[state] : 0;
    return {suffix, length[suffix]};
  }

  int64_t bytes() const {
    int64_t states = length.bytes() + link.bytes() + count.bytes() + edges.bytes() + degree.bytes();
    int64_t edge_bytes = token.bytes() + target.bytes() + next.bytes();
    return (int64_t)sizeof *this + states + edge_bytes + edge_table.capacity * (int64_t)sizeof(EdgeTable::Entry);
  }
};

namespace {
// A node of the draft tree, and a match (in call->sources[source]) of the text up to this node. Tokens that follow the
// match may be added below the node, up to tree depth `depth`.
struct Site {
  int32_t node, source;
  Match match;
  int32_t depth;
};

// A draft token that may be added below site.node; `state` is the target of its edge.
struct Candidate {
  double gain;
  int64_t number;  // number of the candidate in order of insertion; of equal gains, the smaller number comes first
  Site site;
  int32_t token, state, bucket;

  bool before(const Candidate& other) const {
    return gain > other.gain || (gain == other.gain && number < other.number);
  }
};

// A token that follows a match, the target of its edge, and how often it follows the match.
struct Continuation {
  int32_t token, state, count;
};

struct Node {
  int32_t token, parent, depth, bucket;
  double gain;
};

// Return one of 2 * 4 * 4 acceptance buckets, by source (`stored`: an earlier output, else the text itself), `length`
// of the match, and `share` of the token among all occurrences of tokens after the match.
int32_t bucket_of(bool stored, int32_t length, double share) {
  int lengths = (length >= 2) + (length >= 4) + (length >= 8);
  int shares = (share >= 0.25) + (share >= 0.5) + (share >= 0.75);
  return 16 * stored + 4 * lengths + shares;
}

// The growth of one draft tree. `heap` is a binary heap of the candidates, the largest gain first.
struct Growth {
  const pronk_suffix_tree* call;
  Array<Candidate> heap;
  Array<Node> nodes;
  int64_t num_candidates = 0;

  bool push(const Candidate& candidate) {
    if (!heap.push(candidate)) return false;
    int64_t at = heap.size - 1;
    for (; at && candidate.before(heap[(at - 1) / 2]); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = candidate;
    return true;
  }

  Candidate pop() {
    Candidate best = heap[0], moved = heap[--heap.size];
    int64_t at = 0;
    for (int64_t child = 1; child < heap.size; child = 2 * at + 1) {
      if (child + 1 < heap.size && heap[child + 1].before(heap[child])) child++;
      if (!heap[child].before(moved)) break;
      heap[at] = heap[child];
      at = child;
    }
    if (heap.size) heap[at] = moved;
    return best;
  }

  // Estimated acceptance probability, see pronk_suffix_tree.
  double rate(int32_t bucket, int32_t depth) {
    double* prior = &call->priors[4 * bucket + (depth < 4 ? depth : 4) - 1];
    if (isnan(*prior)) *prior = call->prior(bucket, depth);
    return (call->accepted[bucket] + *prior * call->weight) / (call->offered[bucket] + call->weight);
  }

  // Add the tokens that follow a match as candidates, except those in `excluded` (they follow longer matches); then add
  // them to `excluded`. Returns false if memory is exhausted.
  bool add_candidates(const Site& site, Array<int32_t>* excluded) {
    const Node above = nodes[site.node];
    if (above.depth >= site.depth || site.match.length < call->min_match) return true;
    const pronk_suffixes& source = *call->sources[site.source];
    Continuation sorted[MAX_LISTED_EDGES];
    int64_t total = 1;  // starts at 1, so that the share of a single occurrence is 1 / 2
    int size = 0;
    for (int32_t edge = source.first_listed(site.match.state); edge >= 0; edge = source.next[edge]) {
      int32_t after = source.target[edge];
      Continuation continuation = {source.token[edge], after, source.count[after]};
      total += continuation.count;
      // Insertion sort by count; among equal counts the newest edge comes first.
      int at = size;
      for (; at && sorted[at - 1].count < continuation.count; at--) sorted[at] = sorted[at - 1];
      sorted[at] = continuation;
      size++;
    }
    for (int i = 0; i < size && (i < call->width || size == 1); i++) {
      if (contains(excluded, sorted[i].token)) continue;
      if (excluded && !excluded->push(sorted[i].token)) return false;
      int32_t bucket = bucket_of(site.source > 0, site.match.length, (double)sorted[i].count / (double)total);
      double gain = above.gain * rate(bucket, above.depth + 1);
      if (gain < call->min_gain) continue;
      if (!push({gain, ++num_candidates, site, sorted[i].token, sorted[i].state, bucket})) return false;
    }
    return true;
  }

  static bool contains(const Array<int32_t>* excluded, int32_t token) {
    for (int64_t i = 0; excluded && i < excluded->size; i++)
      if ((*excluded)[i] == token) return true;
    return false;
  }

  // Add the candidate's token below its node, or keep the larger gain of an existing child with this token. Returns the
  // child, or -1 if memory is exhausted.
  int32_t add(const Candidate& candidate) {
    int32_t parent = candidate.site.node;
    double gain = candidate.gain < nodes[parent].gain ? candidate.gain : nodes[parent].gain;
    for (int32_t i = parent + 1; i < (int32_t)nodes.size; i++) {
      Node& node = nodes[i];
      if (node.parent != parent || node.token != candidate.token) continue;
      if (gain > node.gain) node.gain = gain, node.bucket = candidate.bucket;
      return i;
    }
    bool ok = nodes.push({candidate.token, parent, nodes[parent].depth + 1, candidate.bucket, gain});
    return ok ? (int32_t)nodes.size - 1 : -1;
  }

  // Add the tokens that follow matches in source `number`, longest match first, as candidates below the root.
  bool add_matches(int32_t number) {
    const pronk_suffixes& source = *call->sources[number];
    if (source.broken) return false;
    Array<int32_t> excluded;
    Match match = source.longest_match(call->tail, call->tail_tokens);
    while (match.length >= call->min_match && excluded.size < call->width) {
      int32_t depth_limit = (int32_t)(call->depth_factor * match.length);
      if (depth_limit < 1) depth_limit = 1;
      if (depth_limit > call->max_depth) depth_limit = call->max_depth;
      if (!add_candidates({0, number, match, depth_limit}, &excluded)) return false;
      match = source.shorter(match.state);
    }
    return true;
  }

  // Compute `nodes`. Returns false if memory is exhausted or a source is broken.
  bool grow() {
    if (!nodes.push({call->tail[call->tail_tokens - 1], -1, 0, 0, 1.0})) return false;
    for (int32_t number = 0; number < call->num_sources; number++)
      if (!add_matches(number)) return false;
    // A candidate adds no node if another source has proposed its token, so also limit the candidates, to 2 * width.
    for (int64_t left = 2 * (int64_t)call->width; left && heap.size && nodes.size <= call->width; left--) {
      Candidate candidate = pop();
      int32_t node = add(candidate);
      if (node < 0) return false;
      const Site& site = candidate.site;
      Match match = call->sources[site.source]->follow(candidate.state, site.match.length);
      if (!add_candidates({node, site.source, match, site.depth}, nullptr)) return false;
    }
    return true;
  }

  // Write the subtree of `node` to the results in depth-first order: children with larger gain first, then in order
  // of insertion. `placed`: number of nodes written so far.
  void write_nodes(int32_t node, int32_t parent, int32_t* placed) {
    int32_t number = (*placed)++;
    const Node& from = nodes[node];
    call->tokens[number] = from.token, call->parents[number] = parent;
    call->buckets[number] = from.bucket, call->gains[number] = from.gain;
    double below = INFINITY;
    for (int32_t written = node;;) {
      int32_t best = -1;
      for (int32_t i = node + 1; i < (int32_t)nodes.size; i++) {
        if (nodes[i].parent != node || nodes[i].gain > below || (nodes[i].gain == below && i <= written)) continue;
        if (best < 0 || nodes[i].gain > nodes[best].gain) best = i;
      }
      if (best < 0) return;
      below = nodes[best].gain, written = best;
      write_nodes(best, number, placed);
    }
  }
};
}  // namespace

PRONK_API int32_t pronk_suffixes_version(void) { return 2; }
PRONK_API void pronk_suffixes_sizes(int32_t sizes[1]) { sizes[0] = sizeof(pronk_suffix_tree); }

// Create an automaton for matches of up to `max_match` tokens; null if memory is exhausted.
PRONK_API pronk_suffixes* pronk_suffixes_new(int32_t max_match) {
  pronk_suffixes* suffixes = new (std::nothrow) pronk_suffixes();
  if (!suffixes) return nullptr;
  suffixes->max_match = max_match;
  if (suffixes->add_state(0, -1, 0) == 0) return suffixes;
  delete suffixes;
  return nullptr;
}

PRONK_API void pronk_suffixes_free(pronk_suffixes* suffixes) { delete suffixes; }

// Append `tokens`, each at least 0, to the current text. Returns 0, or -1 if memory is exhausted.
PRONK_API int32_t pronk_suffixes_extend(pronk_suffixes* suffixes, const int32_t* tokens, int64_t count) {
  for (int64_t i = 0; i < count && !suffixes->broken; i++)
    if (suffixes->extend(tokens[i]))
      suffixes->tokens++;
    else
      suffixes->broken = true;
  return suffixes->broken ? -1 : 0;
}

// End the current text. Later tokens belong to a new text; no substring spans both.
PRONK_API void pronk_suffixes_end_text(pronk_suffixes* suffixes) {
  suffixes->last = 0;
  suffixes->counted = {0, 0};
}

PRONK_API int64_t pronk_suffixes_tokens(const pronk_suffixes* suffixes) { return suffixes->tokens; }

// Whether two automata were built from the same texts.
PRONK_API int32_t pronk_suffixes_equal(const pronk_suffixes* a, const pronk_suffixes* b) {
  bool match = a->last == b->last && a->counted.state == b->counted.state && a->counted.length == b->counted.length;
  bool states = a->length.equals(b->length) && a->link.equals(b->link) && a->count.equals(b->count) &&
                a->edges.equals(b->edges) && a->degree.equals(b->degree);
  bool edges = a->token.equals(b->token) && a->target.equals(b->target) && a->next.equals(b->next);
  return a->max_match == b->max_match && a->broken == b->broken && match && states && edges;
}

PRONK_API int64_t pronk_suffixes_bytes(const pronk_suffixes* suffixes) { return suffixes->bytes(); }

// Append tokens to the text's automaton, then grow a draft tree. Returns its number of nodes including the root, or -1 if
// memory is exhausted.
PRONK_API int32_t pronk_suffixes_grow(const pronk_suffix_tree* call) {
  pronk_suffixes* text = call->sources[0];
  const int64_t known = text->tokens - call->first_appended;
  const int64_t missing = call->num_appended - known;
  if (missing > 0 && pronk_suffixes_extend(text, call->appended + known, missing)) return -1;
  Growth growth;
  growth.call = call;
  if (!growth.grow()) return -1;
  int32_t placed = 0;
  growth.write_nodes(0, -1, &placed);
  return placed;
}
