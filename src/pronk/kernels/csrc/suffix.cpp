// Suffix decoding: the automaton of some texts, and the tree of what followed their ends. What is computed, and why, is
// written where the same is done without a compiler: drafters/from_text/_automaton.py and _growth.py; both give the same
// trees, to the last bit of a gain. Memory is a text's only: what cannot be had is said, and the automaton is lost.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <new>

#include "pronk.h"

namespace {

const int NARROW = 8;        // a state with more edges than this finds them by a table
const int MOST_LISTED = 128;  // of a state's edges, the oldest
const int32_t NO_TOKEN = -1;

// Numbers that grow at the end; `push` says whether there was memory.
template <typename T>
struct Array {
  T* at = nullptr;
  int64_t size = 0, room = 0;

  Array() = default;
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { free(at); }

  bool push(const T& value) {
    if (size == room) {
      int64_t more = room + room / 4 + 16;
      void* moved = realloc(at, (size_t)more * sizeof(T));
      if (!moved) return false;
      at = (T*)moved, room = more;
    }
    at[size++] = value;
    return true;
  }
  T& operator[](int64_t i) { return at[i]; }
  const T& operator[](int64_t i) const { return at[i]; }
  int64_t bytes() const { return room * (int64_t)sizeof(T); }
  bool equals(const Array& other) const {
    return size == other.size && (!size || !memcmp(at, other.at, (size_t)size * sizeof(T)));
  }
};

// The edges of states that have many, by state and token; with NO_TOKEN, where the list of a state's oldest begins.
struct Table {
  struct Entry {
    int32_t state, token, edge;  // edge -1: an empty place
  };
  Entry* at = nullptr;
  int64_t size = 0, room = 0;  // a power of two

  Table() = default;
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;
  ~Table() { free(at); }

  static uint64_t place(int32_t state, int32_t token) {
    uint64_t h = (uint64_t)(uint32_t)state << 32 | (uint32_t)token;
    h = (h ^ h >> 31) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 29;
  }

  int32_t find(int32_t state, int32_t token) const {
    if (!room) return -1;
    for (uint64_t i = place(state, token);; i++) {
      const Entry& e = at[i & (uint64_t)(room - 1)];
      if (e.edge < 0 || (e.state == state && e.token == token)) return e.edge;
    }
  }

  bool add(const Entry& entry) {
    if (4 * (size + 1) > 3 * room && !grow()) return false;
    put(entry);
    size++;
    return true;
  }

  void put(const Entry& entry) {
    uint64_t i = place(entry.state, entry.token);
    while (at[i & (uint64_t)(room - 1)].edge >= 0) i++;
    at[i & (uint64_t)(room - 1)] = entry;
  }

  bool grow() {
    int64_t before = room, more = room ? 2 * room : 64;
    Entry *old = at, *made = (Entry*)malloc((size_t)more * sizeof(Entry));
    if (!made) return false;
    memset(made, 0xff, (size_t)more * sizeof(Entry));
    at = made, room = more;
    for (int64_t i = 0; i < before; i++)
      if (old[i].edge >= 0) put(old[i]);
    free(old);
    return true;
  }
};

struct Place {
  int32_t state, length;
};

}  // namespace

struct pronk_suffixes {
  int32_t max_match;
  bool broken = false;  // there was no memory in the middle of a change
  // One entry per state; state 0 is the root. The edges of a state are a list, the newest first.
  Array<int32_t> length, link, count, edges;
  Array<uint8_t> degree;  // MOST_LISTED + 1 for all above
  Array<int32_t> token, target, next;  // one entry per edge
  Table wide;
  int64_t tokens = 0;
  // The whole text so far, and the place of its longest suffix that is counted.
  int32_t last = 0;
  Place counted = {0, 0};

  int32_t find(int32_t state, int32_t wanted) const {
    if (wanted < 0) return -1;
    if (degree[state] > NARROW) return wide.find(state, wanted);
    int32_t edge = edges[state];
    while (edge >= 0 && token[edge] != wanted) edge = next[edge];
    return edge;
  }

  // The new state, or -1.
  int32_t add_state(int32_t own_length, int32_t own_link, int32_t own_count) {
    bool there = length.push(own_length) && link.push(own_link) && count.push(own_count) && edges.push(-1);
    if (!there || !degree.push(0)) return -1;
    return (int32_t)length.size - 1;
  }

  bool add_edge(int32_t state, int32_t own_token, int32_t own_target) {
    int32_t edge = (int32_t)token.size, before = edges[state];
    if (!token.push(own_token) || !target.push(own_target) || !next.push(before)) return false;
    edges[state] = edge;
    int had = degree[state];
    if (had <= MOST_LISTED) degree[state] = (uint8_t)(had + 1);
    if (had == MOST_LISTED && !wide.add({state, NO_TOKEN, before})) return false;
    if (had > NARROW) return wide.add({state, own_token, edge});
    if (had == NARROW)
      for (; edge >= 0; edge = next[edge])
        if (!wide.add({state, token[edge], edge})) return false;
    return true;
  }

  // Where the list of what is looked at of a state's edges begins: of many, the oldest.
  int32_t listed(int32_t state) const {
    return degree[state] > MOST_LISTED ? wide.find(state, NO_TOKEN) : edges[state];
  }

  // The state whose longest string is that of `state` and the edge's token, split off if it has to be; -1: no memory.
  int32_t exactly(int32_t state, int32_t edge) {
    int32_t own = target[edge], longer = length[state] + 1;
    if (length[own] == longer) return own;
    int32_t clone = add_state(longer, link[own], count[own]);
    if (clone < 0 || !copy_edges(own, clone)) return -1;
    link[own] = clone;
    int32_t wanted = token[edge];
    while (edge >= 0 && target[edge] == own) {
      target[edge] = clone;
      state = link[state];
      edge = state >= 0 ? find(state, wanted) : -1;
    }
    return clone;
  }

  bool copy_edges(int32_t from, int32_t to) {
    Array<int32_t> found;
    for (int32_t edge = edges[from]; edge >= 0; edge = next[edge])
      if (!found.push(edge)) return false;
    while (found.size) {
      int32_t edge = found[--found.size];
      if (!add_edge(to, token[edge], target[edge])) return false;
    }
    return true;
  }

  bool extend(int32_t own_token) {
    int32_t state = last, edge = find(state, own_token);
    if (edge >= 0) {
      last = exactly(state, edge);
      return last >= 0 && count_suffixes(own_token);
    }
    last = add_state(length[state] + 1, 0, 0);
    if (last < 0) return false;
    for (; state >= 0 && (edge = find(state, own_token)) < 0; state = link[state])
      if (!add_edge(state, own_token, last)) return false;
    if (state >= 0) {
      int32_t shorter = exactly(state, edge);
      if (shorter < 0) return false;
      link[last] = shorter;
    }
    return count_suffixes(own_token);
  }

  bool count_suffixes(int32_t own_token) {
    int32_t before = state_of(counted.state, counted.length);  // may have been split since it was found
    counted.length = counted.length < max_match ? counted.length + 1 : max_match + 1;
    counted.state = state_of(target[find(before, own_token)], counted.length);
    for (int32_t state = counted.state; state > 0; state = link[state]) count[state]++;
    return true;
  }

  // Where the suffix of this length is: in the state of a string one token longer, or behind its link.
  int32_t state_of(int32_t state, int32_t wanted) const {
    int32_t shorter = link[state];
    return shorter >= 0 && length[shorter] >= wanted ? shorter : state;
  }

  // The longest suffix that has a continuation.
  Place continued(Place place) const {
    while (place.state && !degree[place.state]) place = {link[place.state], length[link[place.state]]};
    return place;
  }

  Place match(const int32_t* tail, int64_t tokens) const {
    Place place = {0, 0};
    for (int64_t i = tokens > max_match ? tokens - max_match : 0; i < tokens; i++) {
      int32_t edge = find(place.state, tail[i]);
      for (; edge < 0 && place.state; edge = find(place.state, tail[i]))
        place = {link[place.state], length[link[place.state]]};
      if (edge >= 0) place = {target[edge], place.length + 1};
    }
    return continued(place);
  }

  Place follow(int32_t state, int32_t before) const {
    int32_t own = before < max_match ? before + 1 : max_match;
    return continued({state_of(state, own), own});
  }

  Place shorter(int32_t state) const {
    int32_t own = link[state] > 0 ? link[state] : 0;
    return {own, length[own]};
  }

  int64_t bytes() const {
    int64_t states = length.bytes() + link.bytes() + count.bytes() + edges.bytes() + degree.bytes();
    int64_t held = token.bytes() + target.bytes() + next.bytes() + wide.room * (int64_t)sizeof(Table::Entry);
    return (int64_t)sizeof *this + states + held;
  }
};

namespace {

// A node of the tree, and where a source knows the text above it; guesses go no deeper than `depth`.
struct Spot {
  int32_t node, source;
  Place place;
  int32_t depth;
};

struct Guess {
  double gain;
  int64_t number;  // of offering, which decides between equals
  Spot spot;
  int32_t token, state, way;

  bool before(const Guess& other) const {
    return gain > other.gain || (gain == other.gain && number < other.number);
  }
};

struct Continuation {
  int32_t token, state, times;
};

struct Node {
  int32_t token, parent, depth, way;
  double gain;
};

int32_t way_of(bool stored, int32_t length, double share) {
  int lengths = (length >= 2) + (length >= 4) + (length >= 8);
  int shares = (share >= 0.25) + (share >= 0.5) + (share >= 0.75);
  return 16 * stored + 4 * lengths + shares;
}

struct Growth {
  const pronk_sprouts* call;
  Array<Guess> heap;
  Array<Node> nodes;
  int64_t offered = 0;

  bool push(const Guess& guess) {
    if (!heap.push(guess)) return false;
    int64_t at = heap.size - 1;
    for (; at && guess.before(heap[(at - 1) / 2]); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = guess;
    return true;
  }

  Guess pop() {
    Guess best = heap[0], moved = heap[--heap.size];
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

  double rate(int32_t way, int32_t depth) {
    double* prior = &call->priors[4 * way + (depth < 4 ? depth : 4) - 1];
    if (isnan(*prior)) *prior = call->prior(way, depth);
    return (call->taken[way] + *prior * call->weight) / (call->offered[way] + call->weight);
  }

  // What follows a spot, but for `known`, which grows: what longer matches know already.
  bool offer(const Spot& spot, Array<int32_t>* known) {
    const Node above = nodes[spot.node];
    if (above.depth >= spot.depth || spot.place.length < call->min_match) return true;
    const pronk_suffixes& source = *call->sources[spot.source];
    Continuation found[MOST_LISTED];
    int64_t total = 1;
    int size = 0;
    for (int32_t edge = source.listed(spot.place.state); edge >= 0; edge = source.next[edge]) {
      Continuation each = {source.token[edge], source.target[edge], source.count[source.target[edge]]};
      total += each.times;
      // The most frequent ones in their order; among equals the newest comes first.
      int at = size;
      for (; at && found[at - 1].times < each.times; at--) found[at] = found[at - 1];
      found[at] = each;
      size++;
    }
    for (int i = 0; i < size && (i < call->width || size == 1); i++) {
      if (contains(known, found[i].token)) continue;
      if (known && !known->push(found[i].token)) return false;
      int32_t way = way_of(spot.source > 0, spot.place.length, (double)found[i].times / (double)total);
      double gain = above.gain * rate(way, above.depth + 1);
      if (gain < call->least) continue;
      if (!push({gain, ++offered, spot, found[i].token, found[i].state, way})) return false;
    }
    return true;
  }

  static bool contains(const Array<int32_t>* known, int32_t token) {
    for (int64_t i = 0; known && i < known->size; i++)
      if ((*known)[i] == token) return true;
    return false;
  }

  // The child of `parent` that carries a guess's token, new or known; the larger gain stays. -1: no memory.
  int32_t add(const Guess& guess) {
    int32_t parent = guess.spot.node;
    double gain = guess.gain < nodes[parent].gain ? guess.gain : nodes[parent].gain;
    for (int32_t i = parent + 1; i < (int32_t)nodes.size; i++) {
      Node& node = nodes[i];
      if (node.parent != parent || node.token != guess.token) continue;
      if (gain > node.gain) node.gain = gain, node.way = guess.way;
      return i;
    }
    bool there = nodes.push({guess.token, parent, nodes[parent].depth + 1, guess.way, gain});
    return there ? (int32_t)nodes.size - 1 : -1;
  }

  // The ends of the text that a source knows, the longest first.
  bool look(int32_t number) {
    const pronk_suffixes& source = *call->sources[number];
    if (source.broken) return false;
    Array<int32_t> known;
    Place place = source.match(call->tail, call->tail_tokens);
    while (place.length >= call->min_match && known.size < call->width) {
      int32_t supported = (int32_t)(call->depth_factor * place.length);
      if (supported < 1) supported = 1;
      if (supported > call->max_depth) supported = call->max_depth;
      if (!offer({0, number, place, supported}, &known)) return false;
      place = source.shorter(place.state);
    }
    return true;
  }

  bool grow() {
    if (!nodes.push({call->tail[call->tail_tokens - 1], -1, 0, 0, 1.0})) return false;
    for (int32_t number = 0; number < call->num_sources; number++)
      if (!look(number)) return false;
    for (int64_t looks = 2 * (int64_t)call->width; looks && heap.size && nodes.size <= call->width; looks--) {
      Guess guess = pop();
      int32_t node = add(guess);
      if (node < 0) return false;
      const Spot& spot = guess.spot;
      Place place = call->sources[spot.source]->follow(guess.state, spot.place.length);
      if (!offer({node, spot.source, place, spot.depth}, nullptr)) return false;
    }
    return true;
  }

  // The nodes from `node` on, the likeliest child first, of equals the one that was added first.
  void lay_out(int32_t node, int32_t parent, int32_t* placed) {
    int32_t own = (*placed)++;
    const Node& it = nodes[node];
    call->tokens[own] = it.token, call->parents[own] = parent, call->ways[own] = it.way, call->gains[own] = it.gain;
    double below = INFINITY;
    for (int32_t done = node;;) {
      int32_t best = -1;
      for (int32_t i = node + 1; i < (int32_t)nodes.size; i++) {
        if (nodes[i].parent != node || nodes[i].gain > below || (nodes[i].gain == below && i <= done)) continue;
        if (best < 0 || nodes[i].gain > nodes[best].gain) best = i;
      }
      if (best < 0) return;
      below = nodes[best].gain, done = best;
      lay_out(best, own, placed);
    }
  }
};

}  // namespace

PRONK_API pronk_suffixes* pronk_suffixes_new(int32_t max_match) {
  pronk_suffixes* made = new (std::nothrow) pronk_suffixes();
  if (!made) return nullptr;
  made->max_match = max_match;
  if (made->add_state(0, -1, 0) == 0) return made;
  delete made;
  return nullptr;
}

PRONK_API void pronk_suffixes_free(pronk_suffixes* suffixes) { delete suffixes; }

PRONK_API int32_t pronk_suffixes_extend(pronk_suffixes* suffixes, const int32_t* tokens, int64_t count) {
  for (int64_t i = 0; i < count && !suffixes->broken; i++)
    if (suffixes->extend(tokens[i]))
      suffixes->tokens++;
    else
      suffixes->broken = true;
  return suffixes->broken ? -1 : 0;
}

PRONK_API void pronk_suffixes_end_text(pronk_suffixes* suffixes) {
  suffixes->last = 0;
  suffixes->counted = {0, 0};
}

PRONK_API int64_t pronk_suffixes_tokens(const pronk_suffixes* suffixes) { return suffixes->tokens; }

PRONK_API int32_t pronk_suffixes_equal(const pronk_suffixes* a, const pronk_suffixes* b) {
  bool place = a->last == b->last && a->counted.state == b->counted.state && a->counted.length == b->counted.length;
  bool states = a->length.equals(b->length) && a->link.equals(b->link) && a->count.equals(b->count) &&
                a->edges.equals(b->edges) && a->degree.equals(b->degree);
  bool edges = a->token.equals(b->token) && a->target.equals(b->target) && a->next.equals(b->next);
  return a->max_match == b->max_match && a->broken == b->broken && place && states && edges;
}

PRONK_API int64_t pronk_suffixes_bytes(const pronk_suffixes* suffixes) { return suffixes->bytes(); }

PRONK_API int32_t pronk_suffixes_grow(const pronk_sprouts* call) {
  Growth growth;
  growth.call = call;
  if (!growth.grow()) return -1;
  int32_t placed = 0;
  growth.lay_out(0, -1, &placed);
  return placed;
}
