// One answer as it comes: its tokens, the passes that they came with, and what it took.

import { make } from "./dom.js";
import { Counts, Figures } from "./figures.js";
import { slot } from "./sources.js";

const FENCE = /^\s*```/;

export class Answer {
  constructor(title) {
    this.tokens = []; // leaps with the likeliest of each
    this.spans = [];
    this.passes = []; // elements
    this.content = "";
    this.counts = new Counts(performance.now());
    this.figures = new Figures(this.counts);
    this.fenced = false;
    this.line = ""; // the beginning of the last one
    this.text = make("div", "text");
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", "Answer. Arrow keys go from token to token.");
    this.text.addEventListener("copy", copyPlainly);
    this.ending = make("p", "ending");
    this.title = make("h3", "title", title);
    this.element = make("section", "answer running", this.title, this.text, this.ending, this.figures.element);
    this.element.setAttribute("aria-label", title);
    this.figures.onpoint = (step) => this.#light(step);
    this.figures.onpick = (step) => this.passes[step]?.firstChild?.focus();
  }

  /** A chunk has come, at a time; it is drawn with the next frame. */
  add({ delta, leaps, logprobs }, now) {
    if (!leaps) return;
    this.content += delta.content ?? "";
    leaps.forEach((leap, place) => this.tokens.push({ ...leap, ...logprobs?.content[place] }));
    this.counts.add(leaps, now);
    this.frame ??= requestAnimationFrame(() => this.flush());
  }

  /** Draw what has come. */
  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const fresh = new Map(); // tokens of each pass, so that each is appended to once
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
      if (pass.childElementCount > 1) number(pass);
    }
    this.figures.update();
    this.onflush();
  }

  /** Called after something was drawn. */
  onflush = () => {};

  /** It is over: with the server's usage, if it came to its end, and with a word on the end. */
  finish(usage, ending) {
    this.done = Boolean(usage);
    if (usage) this.counts.finish(usage);
    this.ending.textContent = ending;
    this.element.classList.remove("running");
    this.flush();
    if (this.tokens.length === 0) this.figures.element.hidden = true;
  }

  /** Where the next pass goes: a block of its own after the end of a line, so that only the last one is laid out again. */
  #paragraph() {
    const last = this.text.lastChild;
    if (last && !last.lastChild.textContent.endsWith("\n")) return last;
    return this.text.appendChild(make("div", "paragraph"));
  }

  #span(token) {
    const number = this.spans.length;
    const span = make("span", "token", token.text);
    const kinds = [
      ...(token.source === null ? [] : ["guess", slot(token.source)]),
      this.#isCode(token.text) && "code",
      token.text === "" && "none",
      token.text.startsWith("\n") && "newline",
    ];
    span.classList.add(...kinds.filter(Boolean));
    span.dataset.number = number;
    span.tabIndex = number === 0 ? 0 : -1;
    return span;
  }

  /** Whether a token belongs to a block of code; tokens are asked in their order. */
  #isCode(text) {
    const before = this.fenced;
    const lines = (this.line + text).split("\n");
    this.line = lines.pop().slice(0, 80);
    for (const line of lines) if (FENCE.test(line)) this.fenced = !this.fenced;
    return before || this.fenced || FENCE.test(this.line);
  }

  #light(step) {
    this.lit?.classList.remove("lit");
    this.lit = this.passes[step];
    this.lit?.classList.add("lit");
  }
}

/** A pass with several tokens is a leap; their number stands where it lands, in front of the end of a line. */
function number(pass) {
  pass.classList.add("leap");
  pass.querySelector(".count")?.remove();
  const figure = make("i", "count");
  figure.dataset.count = pass.childElementCount;
  const last = pass.lastChild;
  const text = last.textContent;
  const place = text.includes("\n") ? text.indexOf("\n") : text.length;
  last.replaceChildren(text.slice(0, place), figure, text.slice(place));
}

/** Ends of lines are in the text; that its paragraphs are blocks would give them twice. */
function copyPlainly(event) {
  const range = getSelection().getRangeAt(0);
  if (!event.currentTarget.contains(range.commonAncestorContainer)) return;
  event.clipboardData.setData("text/plain", range.cloneContents().textContent);
  event.preventDefault();
}
