// One streamed answer: its tokens, grouped by forward pass, and its statistics.

import { make } from "./dom.js";
import { Counts, Figures } from "./figures.js";
import { slot } from "./sources.js";

const FENCE = /^\s*```/;

export class Answer {
  constructor(title) {
    this.tokens = []; // entries of the stream's `leaps`, merged with the log-probabilities of each token
    this.spans = []; // elements of the tokens
    this.passes = []; // elements of the forward passes
    this.content = "";
    this.counts = new Counts(performance.now());
    this.figures = new Figures(this.counts);
    this.fenced = false; // whether the text so far ends inside a code block
    this.line = ""; // the beginning of the last line
    this.text = make("div", "text");
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", "Answer. Arrow keys move between tokens.");
    this.text.addEventListener("copy", copyPlainText);
    this.ending = make("p", "ending");
    this.title = make("h3", "title", title);
    this.element = make("section", "answer running", this.title, this.text, this.ending, this.figures.element);
    this.element.setAttribute("aria-label", title);
    this.figures.onpoint = (step) => this.#highlight(step);
    this.figures.onpick = (step) => this.passes[step]?.firstChild?.focus();
  }

  /** Add a chunk of the stream, received at time `now` in milliseconds. The next animation frame draws it. */
  add({ delta, leaps, logprobs }, now) {
    if (!leaps) return;
    this.content += delta.content ?? "";
    leaps.forEach((token, index) => this.tokens.push({ ...token, ...logprobs?.content[index] }));
    this.counts.add(leaps, now);
    this.frame ??= requestAnimationFrame(() => this.flush());
  }

  /** Draw all tokens that are not drawn yet. */
  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const fresh = new Map(); // forward pass to its new elements, so that each pass is changed once
    while (this.spans.length < this.tokens.length) {
      const token = this.tokens[this.spans.length];
      const span = this.#span(token);
      this.spans.push(span);
      if (!fresh.has(token.step)) fresh.set(token.step, []);
      fresh.get(token.step).push(span);
    }
    for (const [step, spans] of fresh) {
      if (!this.passes[step]) this.#paragraph().append((this.passes[step] = make("span", "pass")));
      const pass = this.passes[step];
      pass.append(...spans);
      if (pass.childElementCount > 1) markCount(pass);
    }
    this.figures.update();
    this.onflush();
  }

  /** Called after each drawing. */
  onflush = () => {};

  /** End the answer. `usage` is the server's, or null if the stream broke off; `ending` is a note below the text. */
  finish(usage, ending) {
    this.done = Boolean(usage);
    if (usage) this.counts.finish(usage);
    this.ending.textContent = ending;
    this.element.classList.remove("running");
    this.flush();
    if (this.tokens.length === 0) this.figures.element.hidden = true;
  }

  /** The element for the next forward pass. Each line break starts a new one, so that layout changes stay in the last. */
  #paragraph() {
    const last = this.text.lastChild;
    if (last && !last.lastChild.textContent.endsWith("\n")) return last;
    return this.text.appendChild(make("div", "paragraph"));
  }

  #span(token) {
    const number = this.spans.length;
    const span = make("span", "token", token.text);
    const kinds = [
      ...(token.source === null ? [] : ["draft", slot(token.source)]),
      this.#isCode(token.text) && "code",
      token.text === "" && "empty",
      token.text.startsWith("\n") && "newline",
    ];
    span.classList.add(...kinds.filter(Boolean));
    span.dataset.number = number;
    span.tabIndex = number === 0 ? 0 : -1;
    return span;
  }

  /** Whether a token is part of a code block. Call once per token, in the order of the text. */
  #isCode(text) {
    const before = this.fenced;
    const lines = (this.line + text).split("\n");
    this.line = lines.pop().slice(0, 80);
    for (const line of lines) if (FENCE.test(line)) this.fenced = !this.fenced;
    return before || this.fenced || FENCE.test(this.line);
  }

  #highlight(step) {
    this.highlighted?.classList.remove("lit");
    this.highlighted = this.passes[step];
    this.highlighted?.classList.add("lit");
  }
}

/** Mark a forward pass of several tokens with their number, before a line break in its last token. */
function markCount(pass) {
  pass.classList.add("several");
  pass.querySelector(".count")?.remove();
  const figure = make("i", "count");
  figure.dataset.count = pass.childElementCount;
  const last = pass.lastChild;
  const text = last.textContent;
  const place = text.includes("\n") ? text.indexOf("\n") : text.length;
  last.replaceChildren(text.slice(0, place), figure, text.slice(place));
}

/** Copy the text itself: browsers would add a line break for each paragraph element. */
function copyPlainText(event) {
  const range = getSelection().getRangeAt(0);
  if (!event.currentTarget.contains(range.commonAncestorContainer)) return;
  event.clipboardData.setData("text/plain", range.cloneContents().textContent);
  event.preventDefault();
}
