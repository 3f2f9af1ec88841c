// An answer beside the same without guessing: is it the same text, and how much sooner was it there.

import { count, fixed, make, speed, visible } from "./dom.js";

/** The place of the first token that differs, or -1. */
export function difference(one, other) {
  const most = Math.min(one.tokens.length, other.tokens.length);
  for (let place = 0; place < most; place++) {
    if (one.tokens[place].id !== other.tokens[place].id) return place;
  }
  return -1;
}

export class Verdict {
  constructor(guessed, plain) {
    this.guessed = guessed;
    this.plain = plain;
    this.head = make("p", "same");
    this.gain = make("p", "gain");
    this.race = make("div", "race");
    this.note = make(
      "p",
      "note",
      "The same request, seed and options, one run after the other so that they do not disturb each other. " +
        "Times count from each first token, as this page saw them.",
    );
    this.element = make("div", "verdict", this.head, this.gain, this.race, this.note);
    this.element.setAttribute("role", "status");
    this.place = -1;
  }

  /** While the plain run goes on, and when it is over. */
  update() {
    const { guessed, plain } = this;
    if (this.place < 0) {
      this.place = difference(guessed, plain);
      if (this.place < 0 && plain.done && guessed.tokens.length !== plain.tokens.length) {
        this.place = Math.min(guessed.tokens.length, plain.tokens.length);
      }
      if (this.place >= 0) this.#mark();
    }
    this.element.classList.toggle("differs", this.place >= 0);
    this.element.classList.toggle("agrees", this.place < 0 && plain.done === true);
    this.head.textContent = this.#sentence();
    if (plain.done) this.#finish();
  }

  #sentence() {
    const { guessed, plain, place } = this;
    if (place >= 0) {
      const [here, there] = [guessed, plain].map(({ tokens }) =>
        tokens[place] ? `“${visible(tokens[place].token ?? tokens[place].text)}”` : "the end of the text",
      );
      return `The texts differ from token ${count(place + 1)} on: ${here} with guesses, ${there} without.`;
    }
    const seen = count(plain.tokens.length);
    if (!plain.done) return `Same so far: ${seen} of ${count(guessed.tokens.length)} tokens.`;
    return `Same text: all ${seen} tokens are the same, one by one.`;
  }

  #finish() {
    const [one, other] = [this.guessed.counts, this.plain.counts];
    const ratio = one.rate / other.rate;
    const passes = `${count(one.steps)} passes instead of ${count(other.steps)}`;
    const rates = `${speed(one.rate)} tokens per second instead of ${speed(other.rate)}`;
    const times = Number.isFinite(ratio) ? [make("b", "", `${fixed(ratio, 2)}×`), ` the speed: ${rates}, `] : [];
    this.gain.replaceChildren(...times, passes, ".");
    const longest = Math.max(one.seconds, other.seconds) || 1;
    this.race.replaceChildren(lane("With guesses", one, longest), lane("Plain decoding", other, longest));
  }

  #mark() {
    for (const { spans } of [this.guessed, this.plain]) spans[this.place]?.classList.add("differs");
  }
}

function lane(label, { seconds }, longest) {
  const bar = make("span", "bar", make("span", "fill"));
  bar.firstChild.style.width = `${(100 * seconds) / longest}%`;
  return make("div", "lane", make("span", "", label), bar, make("span", "share", `${fixed(seconds, 2)} s`));
}
