// Merges of a SentencePiece BPE: a text's characters become tokens, and pairs of neighbours that together are a token
// are merged, the pair of the best rank first. Compiled into the library of the suffix automaton. The index of a
// vocabulary's texts is the only memory, because a pair is looked up by the text that it makes: Gemma 3 has 262,144
// tokens and 515,000 merges. `merges.py` is the interface in Python.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <new>

#include "export.h"

namespace {
const int32_t NONE = -1;

struct Text {
  const uint8_t* bytes;
  int32_t size;
};

// A token of the text that is being merged. Tokens are a linked list, so that merging moves none.
struct Symbol {
  int32_t id;
  int32_t previous, next;  // numbers of symbols; -1 at the ends
  int32_t characters;      // length of the token; 0: merged into the symbol before it
};

// A pair of neighbours that are a token together. Order of merges: the score of the joined token, the length of the
// first token and of the second one, the id, and the place in the text.
struct Pair {
  int32_t rank, first, second, id, place;

  // Whether `other` is merged before this pair: the order of std::push_heap, whose top is the largest element.
  bool operator<(const Pair& other) const {
    if (rank != other.rank) return rank > other.rank;
    if (first != other.first) return first < other.first;
    if (second != other.second) return second < other.second;
    if (id != other.id) return id > other.id;
    return place > other.place;
  }
};

int32_t character_size(uint8_t lead) { return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4; }

int32_t count_characters(Text text) {
  int32_t count = 0;
  for (int32_t i = 0; i < text.size; i++) count += (text.bytes[i] & 0xC0) != 0x80;
  return count;
}
}  // namespace

// A vocabulary and the index of its texts: a hash table with open addressing.
struct pronk_merges {
  const uint8_t* bytes;
  const int32_t *starts, *stops, *ranks;
  int32_t unknown;       // id of the token for characters without one; -1: they are left out
  uint64_t seed;         // odd and random, so that no file can choose texts whose hashes collide
  int32_t longest;       // bytes of the longest token
  uint64_t mask;         // number of entries - 1
  int32_t* entries;      // id of a token; -1: empty
  int32_t fallback[256]; // token of each byte; -1: none

  Text text(int32_t id) const { return {bytes + starts[id], stops[id] - starts[id]}; }

  uint64_t hash(uint64_t state, Text part) const {
    for (int32_t i = 0; i < part.size; i++) {
      state = (state ^ part.bytes[i]) * seed;
      state ^= state >> 29;
    }
    return state;
  }

  // Return the entry of the token with the text `first` + `second`, or the empty entry where it belongs.
  int32_t* find_entry(Text first, Text second) const {
    uint64_t slot = hash(hash(seed, first), second) & mask;
    for (;; slot = (slot + 1) & mask) {
      if (entries[slot] == NONE) return &entries[slot];
      Text own = text(entries[slot]);
      if (own.size == first.size + second.size && !memcmp(own.bytes, first.bytes, first.size) &&
          !memcmp(own.bytes + first.size, second.bytes, second.size))
        return &entries[slot];
    }
  }

  int32_t find(Text first, Text second) const {
    return first.size + second.size > longest ? NONE : *find_entry(first, second);
  }

  int32_t find(Text whole) const { return find(whole, {whole.bytes, 0}); }
};

namespace {
// One text while it is merged. A text of n bytes has at most n symbols: a character has a token, or one for each byte.
// Each symbol adds at most one pair to the heap, and a merge removes one and adds at most two: there are at most 2 n.
struct Word {
  const pronk_merges* merges;
  Symbol* symbols;
  Pair* heap;
  int64_t count = 0;  // of symbols
  int64_t pairs = 0;  // in the heap

  void add(int32_t id) {
    int32_t number = (int32_t)count++;
    symbols[number] = {id, number - 1, NONE, count_characters(merges->text(id))};
    if (number) symbols[number - 1].next = number;
  }

  void split(Text text) {
    bool skipped = false;  // whether characters without tokens precede; together they become one unknown token
    for (int32_t at = 0; at < text.size;) {
      Text character = {text.bytes + at, std::min(character_size(text.bytes[at]), text.size - at)};
      at += character.size;
      int32_t id = merges->find(character);
      if (id != NONE) {
        if (skipped) add(merges->unknown);
        skipped = false;
        add(id);
      } else if (has_bytes(character)) {
        for (int32_t i = 0; i < character.size; i++) add(merges->fallback[character.bytes[i]]);
      } else {
        skipped = merges->unknown != NONE;
      }
    }
    if (skipped) add(merges->unknown);
  }

  bool has_bytes(Text character) const {
    for (int32_t i = 0; i < character.size; i++)
      if (merges->fallback[character.bytes[i]] == NONE) return false;
    return true;
  }

  // Return the token that a symbol and its successor make; -1: none.
  int32_t joined(int32_t place) const {
    const Symbol& first = symbols[place];
    if (first.next == NONE) return NONE;
    return merges->find(merges->text(first.id), merges->text(symbols[first.next].id));
  }

  void push(int32_t place) {
    int32_t id = joined(place);
    if (id == NONE) return;
    const Symbol& first = symbols[place];
    heap[pairs++] = {merges->ranks[id], first.characters, symbols[first.next].characters, id, place};
    std::push_heap(heap, heap + pairs);
  }

  void merge() {
    for (int32_t place = 0; place < count; place++) push(place);
    while (pairs) {
      std::pop_heap(heap, heap + pairs);
      Pair best = heap[--pairs];
      Symbol& first = symbols[best.place];
      // An earlier merge may have taken a symbol of this pair.
      if (!first.characters || joined(best.place) != best.id) continue;
      Symbol& second = symbols[first.next];
      first.id = best.id;
      first.characters += second.characters;
      first.next = second.next;
      second.characters = 0;
      if (first.next != NONE) symbols[first.next].previous = best.place;
      if (first.previous != NONE) push(first.previous);
      push(best.place);
    }
  }
};
}  // namespace

PRONK_API int32_t pronk_merges_version(void) { return 1; }
PRONK_API void pronk_merges_sizes(int32_t*) {}

// Free an index.
PRONK_API void pronk_merges_free(pronk_merges* merges) {
  free(merges->entries);
  delete merges;
}

// Index a vocabulary. Token i has the bytes from starts[i] to stops[i] - 1 of `bytes`, which are UTF-8; an empty token is
// left out. All arrays are read as long as the index exists. A token with a smaller rank is merged first. Returns null if
// memory is exhausted. `repeated` receives a token whose text an earlier token has; -1: there is none.
PRONK_API pronk_merges* pronk_merges_new(const uint8_t* bytes, const int32_t* starts, const int32_t* stops,
                                         const int32_t* ranks, int32_t count, int32_t unknown, uint64_t seed,
                                         int32_t* repeated) {
  pronk_merges* merges = new (std::nothrow) pronk_merges();
  if (!merges) return nullptr;
  merges->bytes = bytes;
  merges->starts = starts;
  merges->stops = stops;
  merges->ranks = ranks;
  merges->unknown = unknown;
  merges->seed = seed | 1;
  uint64_t size = 1;
  while (size < (uint64_t)count * 3 / 2 + 1) size *= 2;
  merges->mask = size - 1;
  merges->entries = (int32_t*)malloc(size * sizeof(int32_t));
  if (!merges->entries) {
    delete merges;
    return nullptr;
  }
  std::fill(merges->entries, merges->entries + size, NONE);
  *repeated = NONE;
  for (int32_t id = 0; id < count; id++) {
    Text text = merges->text(id);
    if (!text.size) continue;
    merges->longest = std::max(merges->longest, text.size);
    int32_t* entry = merges->find_entry(text, {text.bytes, 0});
    if (*entry != NONE) *repeated = id;
    *entry = id;
  }
  const char* digits = "0123456789ABCDEF";
  for (int32_t byte = 0; byte < 256; byte++) {
    const uint8_t name[] = {'<', '0', 'x', (uint8_t)digits[byte >> 4], (uint8_t)digits[byte & 15], '>'};
    merges->fallback[byte] = merges->find({name, sizeof name});
  }
  // Without a token of the byte 0, no character becomes tokens of its bytes.
  if (merges->fallback[0] == NONE) std::fill(merges->fallback, merges->fallback + 256, NONE);
  return merges;
}

// Return the token with a text; -1: there is none.
PRONK_API int32_t pronk_merges_find(const pronk_merges* merges, const uint8_t* bytes, int32_t size) {
  return size ? merges->find({bytes, size}) : NONE;
}

// Write the tokens of a text of `size` bytes to `ids` [size]. Returns their number; -1 if memory is exhausted.
PRONK_API int64_t pronk_merges_encode(const pronk_merges* merges, const uint8_t* bytes, int32_t size, int32_t* ids) {
  Word word;
  word.merges = merges;
  word.symbols = (Symbol*)malloc(((size_t)size + 1) * sizeof(Symbol));
  word.heap = (Pair*)malloc((2 * (size_t)size + 1) * sizeof(Pair));
  int64_t count = -1;
  if (word.symbols && word.heap) {
    word.split({bytes, size});
    word.merge();
    count = 0;
    for (int32_t place = word.count ? 0 : NONE; place != NONE; place = word.symbols[place].next)
      ids[count++] = word.symbols[place].id;
  }
  free(word.symbols);
  free(word.heap);
  return count;
}
