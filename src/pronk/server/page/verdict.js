// Comparison of an answer with plain decoding: whether the texts are equal, and the speeds.

import { count, fixed, make, speed, visible } from "./dom.js";

/** Return the index of the first token that differs, or -1. */
export function difference(one, other) {
  const most = Math.min(one.tokens.length, other.tokens.length);
  for (let place = 0; place < most; place++) {
    if (one.tokens[place].id !== other.tokens[place].id) return place;
  }
  return -1;
}

export class Verdict {
  constructor(drafted, plain) {
    this.drafted = drafted;
    this.plain = plain;
    this.head = make("p", "same");
    this.gain = make("p", "gain");
    this.race = make("div", "race");
    this.note = make("p", "note");
    this.element = make("div", "verdict", this.head, this.gain, this.race, this.note);
    this.element.setAttribute("role", "status");
    this.place = -1;
  }

  /** A few words for the line above the composer: whether the texts are equal, and the gain. */
  get summary() {
    if (this.place >= 0) return "The texts differ.";
    if (!this.plain.done) return this.head.textContent;
    const speedup = fixed(this.drafted.counts.rate / this.plain.counts.rate, 2);
    return `The same text, at ${speedup}× the speed.`;
  }

  /** Update during plain decoding and at its end. */
  update() {
    const { drafted, plain } = this;
    if (this.place < 0) {
      this.place = difference(drafted, plain);
      if (this.place < 0 && plain.done && drafted.tokens.length !== plain.tokens.length) {
        this.place = Math.min(drafted.tokens.length, plain.tokens.length);
      }
      if (this.place >= 0) this.#mark();
    }
    this.element.classList.toggle("differs", this.place >= 0);
    this.element.classList.toggle("agrees", this.place < 0 && plain.done === true);
    this.head.textContent = this.#sentence();
    if (plain.done) this.#finish();
  }

  #sentence() {
    const { drafted, plain, place } = this;
    if (place >= 0) {
      const [here, there] = [drafted, plain].map(({ tokens }) =>
        tokens[place] ? `“${visible(tokens[place].token ?? tokens[place].text)}”` : "the end of the text",
      );
      return `The texts differ from token ${count(place + 1)} on: ${here} with draft tokens, ${there} in plain decoding.`;
    }
    const seen = count(plain.tokens.length);
    if (!plain.done) return `Same text so far: ${seen} of ${count(drafted.tokens.length)} tokens.`;
    return `Same text: all ${seen} tokens are equal.`;
  }

  #finish() {
    const [one, other] = [this.drafted.counts, this.plain.counts];
    // If one answer arrived in a single read, only the time from its request on is known: then both times begin at the request.
    const fromRequest = (one.fromRequest ||= other.fromRequest);
    other.fromRequest = fromRequest;
    this.note.textContent =
      "Both answers have the same prompt, seed and options, and were generated one after the other. " +
      `Each time is measured by this page, from the ${fromRequest ? "request" : "first token"} on.`;
    const ratio = one.rate / other.rate;
    const passes = `${count(one.steps)} forward passes instead of ${count(other.steps)}`;
    const rates = `${speed(one.rate)} tokens per second instead of ${speed(other.rate)}`;
    const times = Number.isFinite(ratio) ? [make("b", "", `${fixed(ratio, 2)}×`), ` the speed: ${rates}, `] : [];
    this.gain.replaceChildren(...times, passes, ".");
    const longest = Math.max(one.seconds, other.seconds) || 1;
    this.race.replaceChildren(lane("With draft tokens", one, longest), lane("Plain decoding", other, longest));
  }

  #mark() {
    for (const { spans } of [this.drafted, this.plain]) spans[this.place]?.classList.add("differs");
  }
}

function lane(label, { seconds }, longest) {
  const bar = make("span", "bar", make("span", "fill"));
  bar.firstChild.style.width = `${(100 * seconds) / longest}%`;
  return make("div", "lane", make("span", "", label), bar, make("span", "share", `${fixed(seconds, 2)} s`));
}
