// One streamed answer: its tokens, grouped by forward pass, or its text as Markdown; its thoughts; and its statistics.

import { copy, make } from "./dom.js";
import { Counts, Figures } from "./figures.js";
import { Markdown } from "./markdown.js";
import { slot } from "./sources.js";

const FENCE = /^\s*```/;

export class Answer {
  #marks;

  /** `marks`: show the tokens; otherwise show the text as Markdown. */
  constructor(title, marks) {
    this.#marks = marks;
    this.tokens = []; // entries of the stream's `leaps`, merged with the log-probabilities of each token
    this.spans = []; // elements of the tokens
    this.passes = []; // elements of the forward passes
    this.content = "";
    this.thoughts = "";
    this.numThoughts = 0; // number of tokens of the thoughts, which are the first tokens of the answer
    this.stepStart = 0; // number of tokens before the last forward pass
    this.counts = new Counts(performance.now());
    this.figures = new Figures(this.counts);
    this.fenced = false; // whether the text so far ends inside a code block
    this.line = ""; // the beginning of the last line
    this.text = textElement("Answer. Arrow keys move between tokens.");
    this.rendered = new Markdown(make("div", "rendered"));
    this.body = make("div", "body", this.text, this.rendered.element);
    this.body.addEventListener("click", ({ target }) => {
      if (target.closest(".copy")) copy(target.closest(".code-block").querySelector("code").textContent, target);
    });
    this.ending = make("p", "ending");
    this.title = make("h3", "title", title);
    this.element = make("section", "answer running", this.title, this.body, this.ending, this.figures.element);
    this.element.setAttribute("aria-label", title);
    this.element.classList.toggle("with-tokens", marks);
    this.figures.onpoint = (step) => this.#highlight(step);
    this.figures.onpick = (step) => this.passes[step]?.firstChild?.focus();
  }

  /** Add a chunk of the stream, received at time `now` in milliseconds. The next animation frame draws it. */
  add({ delta, leaps, logprobs }, now) {
    if (leaps) {
      this.stepStart = this.tokens.length;
      leaps.forEach((token, index) => this.tokens.push({ ...token, ...logprobs?.content[index] }));
      this.counts.add(leaps, now);
    }
    if (delta.reasoning_content) this.#think(delta.reasoning_content);
    if (delta.content) this.#write(delta.content);
    this.frame ??= requestAnimationFrame(() => this.flush());
  }

  /** Add thoughts: all tokens so far belong to them. */
  #think(thoughts) {
    if (!this.thoughts) this.#fold();
    this.thoughts += thoughts;
    if (!this.content) this.numThoughts = this.tokens.length;
  }

  /** Add text. The last tokens belong to it, even if the same forward pass began with thoughts. */
  #write(text) {
    if (this.isThinking) {
      this.numThoughts = this.tokens.length;
      for (let length = 0; this.numThoughts > this.spans.length && length < text.length; ) {
        length += this.tokens[--this.numThoughts].text.length;
      }
      this.summary.textContent = "Thoughts";
    }
    this.content += text;
  }

  /** Whether the last tokens belong to thoughts. */
  get isThinking() {
    return this.thoughts !== "" && this.content === "";
  }

  /** Add the folded element of the thoughts. */
  #fold() {
    this.summary = make("summary", "", "Thinking…");
    this.thoughtText = textElement("Thoughts. Arrow keys move between tokens.");
    this.renderedThoughts = new Markdown(make("div", "rendered"));
    this.body.prepend(make("details", "thoughts", this.summary, this.thoughtText, this.renderedThoughts.element));
  }

  get isRunning() {
    return this.element.classList.contains("running");
  }

  /** Whether the tokens are shown; otherwise the text is shown as Markdown. */
  get marks() {
    return this.#marks;
  }

  set marks(marks) {
    if (marks === this.#marks) return;
    this.#marks = marks;
    this.element.classList.toggle("with-tokens", marks);
    this.flush();
  }

  /** Number of tokens whose place is known: that of a pass may be in the thoughts, in the text or in both. */
  get #numPlaced() {
    if (this.content || !this.isRunning) return this.tokens.length;
    return this.thoughts ? this.stepStart : 0;
  }

  /** Draw all tokens that are not drawn yet, and the Markdown if it is shown. */
  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    if (!this.content && this.thoughts && this.#numPlaced === this.tokens.length) this.numThoughts = this.tokens.length;
    const fresh = new Map(); // forward pass to its new elements, so that each pass is changed once
    while (this.spans.length < this.#numPlaced) {
      const number = this.spans.length;
      const token = this.tokens[number];
      const span = this.#span(token);
      if (number === this.numThoughts) this.#draw(fresh);
      this.spans.push(span);
      if (!fresh.has(token.step)) fresh.set(token.step, []);
      fresh.get(token.step).push(span);
    }
    this.#draw(fresh);
    if (!this.marks) {
      this.renderedThoughts?.update(this.thoughts, this.isRunning && this.isThinking);
      this.rendered.update(this.content, this.isRunning);
    }
    this.figures.update();
    this.onflush();
  }

  /** Draw and forget the new elements of passes, all in the thoughts or all in the text. */
  #draw(fresh) {
    for (const [step, spans] of fresh) {
      const home = Number(spans[0].dataset.number) < this.numThoughts ? this.thoughtText : this.text;
      if (!home.contains(this.passes[step])) paragraph(home).append((this.passes[step] = make("span", "pass")));
      const pass = this.passes[step];
      pass.append(...spans);
      if (pass.childElementCount > 1) markCount(pass);
    }
    fresh.clear();
  }

  /** Called after each drawing. */
  onflush = () => {};

  /** End the answer. `usage` is the server's, or null if the stream broke off; `ending` is a note below the text. */
  finish(usage, ending) {
    this.done = Boolean(usage);
    if (usage) this.counts.finish(usage);
    this.ending.textContent = ending;
    this.element.classList.remove("running");
    if (this.summary) this.summary.textContent = "Thoughts";
    this.flush();
    if (this.tokens.length === 0) this.figures.element.hidden = true;
  }

  /** Return what is stored of the answer: its texts, tokens and times in milliseconds since the request. */
  toJSON() {
    const { content, thoughts, numThoughts, counts } = this;
    const tokens = this.tokens.map(({ text, id, source, step }) => [text, id, source, step]);
    const { start, first, last, usage } = counts;
    const times = first && { first: first.now - start, last: last - start, firstTokens: first.tokens };
    return { content, thoughts, numThoughts, tokens, times, usage, ending: this.ending.textContent };
  }

  /** Show a stored answer, which has no candidates. */
  restore({ content, thoughts, numThoughts, tokens, times, usage, ending }) {
    const leaps = tokens.map(([text, id, source, step]) => ({ text, id, source, step }));
    this.tokens = leaps;
    if (thoughts) this.#fold();
    Object.assign(this, { content, thoughts, numThoughts });
    if (times) {
      this.counts.add(leaps, times.last);
      const first = { now: times.first, tokens: times.firstTokens };
      Object.assign(this.counts, { start: 0, first });
    }
    this.finish(usage ?? null, ending);
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
    span.tabIndex = number === 0 || number === this.numThoughts ? 0 : -1; // the first one of each text
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

/** Return an element for tokens, with a label for screen readers. */
function textElement(label) {
  const text = make("div", "text");
  text.setAttribute("role", "group");
  text.setAttribute("aria-label", label);
  text.addEventListener("copy", copyPlainText);
  return text;
}

/** Return the element for the next forward pass. Each line break begins a new one, so that layout changes stay in it. */
function paragraph(text) {
  const last = text.lastChild;
  if (last && !last.lastChild.textContent.endsWith("\n")) return last;
  return text.appendChild(make("div", "paragraph"));
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
