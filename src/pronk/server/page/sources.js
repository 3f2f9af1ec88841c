// Which colour and underline each drafter has: the same in every answer.

const PREFERRED = {
  suffix: 0,
  prompt_lookup: 1,
  draft_model: 2,
  recycling: 3,
  glide: 4,
  lookahead: 5,
  jacobi: 1,
  retrieval: 3,
  kangaroo: 4,
  medusa: 5,
};
const SLOTS = 6;
const given = new Map();

/** The class of a drafter: its own if it is free, or else the next one that is. */
export function slot(source) {
  if (!given.has(source)) {
    const taken = new Set(given.values());
    const first = PREFERRED[source] ?? 0;
    const order = [...Array(SLOTS).keys()].map((step) => (first + step) % SLOTS);
    given.set(source, order.find((each) => !taken.has(each)) ?? first);
  }
  return `s${given.get(source)}`;
}
