// Colour and underline of each drafter, the same in every answer.

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
const assigned = new Map();

/** Return the CSS class of a drafter: the preferred one, or the next free one if that is taken. */
export function slot(source) {
  if (!assigned.has(source)) {
    const taken = new Set(assigned.values());
    const first = PREFERRED[source] ?? 0;
    const order = [...Array(SLOTS).keys()].map((step) => (first + step) % SLOTS);
    assigned.set(source, order.find((each) => !taken.has(each)) ?? first);
  }
  return `s${assigned.get(source)}`;
}
