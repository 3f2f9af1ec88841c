// One turn of the conversation: the user's message, its answer, and optionally the same answer in plain decoding.

import { Answer } from "./answer.js";
import { button, copy, make } from "./dom.js";
import { Broken, Refusal, chat, explain } from "./stream.js";
import { Verdict } from "./verdict.js";

const ENDINGS = { length: "The answer reached the maximum number of tokens.", stop: "" };

export class Turn {
  /**
   * @param {string} message the user's message
   * @param {object} page callbacks of the page: history(turn) returns the messages of the turns before, key() the API key,
   *   drafter() the server's drafter, running() whether an answer is in progress; setBusy(controller) begins or, with
   *   null, ends one; system() the system prompt; marks() whether tokens are marked; attach(answer), onDraw(),
   *   announce(text), askKey(reason, then), regenerate(turn, newSeed), compare(turn)
   */
  constructor(message, page) {
    this.message = message;
    this.page = page;
    this.question = make("div", "question", make("p", "", message));
    this.answers = make("div", "answers");
    this.problem = make("div", "problem");
    this.problem.setAttribute("role", "alert");
    this.actions = make("div", "actions");
    this.element = make("article", "turn", this.question, this.answers, this.problem, this.actions);
  }

  /** The messages of this turn for later requests. */
  get messages() {
    const question = { role: "user", content: this.message };
    return this.failed ? [] : [question, { role: "assistant", content: this.answer.content }];
  }

  /** Whether there is no answer. */
  get failed() {
    return !this.answer?.tokens.length && !this.answer?.done;
  }

  /** Show tokens, or Markdown without tokens. */
  set marks(marks) {
    if (this.answer) this.answer.marks = marks || this.element.classList.contains("compared");
  }

  /** Request the answer. */
  async run(options) {
    this.#prepare(options, this.page.system());
    await this.#stream(this.answer, this.body);
  }

  /** Return what is stored of the turn. */
  toJSON() {
    const { message, options, system, answer } = this;
    return { message, options, system, answer: this.failed ? null : answer };
  }

  /** Show the stored answer of a turn, which the page has already. */
  restore({ options, system, answer }) {
    this.#prepare(options, system);
    this.page.attach(this.answer);
    if (answer) this.answer.restore(answer);
    else this.answer.finish(null, "");
    this.#offerAll();
  }

  /** Whether the answer can be compared with plain decoding. */
  get comparable() {
    const isDone = !this.failed && this.answer.tokens.length > 0 && !this.answer.isRunning;
    return isDone && this.options.drafter !== "autoregressive";
  }

  /** Begin a new answer. `options` are those of the request, without its messages. */
  #prepare(options, system) {
    this.options = options;
    this.system = system;
    const first = system ? [{ role: "system", content: system }] : [];
    const own = { role: "user", content: this.message.toWellFormed() };
    this.body = {
      ...options,
      messages: [...first, ...this.page.history(this), own],
      stream: true,
      stream_options: { include_usage: true },
      leaps: true,
      logprobs: true,
      top_logprobs: 5,
    };
    this.answer = new Answer("Answer", this.page.marks());
    this.verdict = null;
    this.answers.replaceChildren(this.answer.element);
    this.element.classList.remove("compared");
  }

  /** Request the same answer in plain decoding and show both side by side. */
  async compare() {
    const { answer } = this;
    const plain = new Answer("Plain decoding", true);
    const verdict = (this.verdict = new Verdict(answer, plain));
    answer.title.textContent = "With draft tokens";
    this.answers.replaceChildren(answer.element, plain.element, verdict.element);
    this.element.classList.add("compared");
    answer.marks = true; // a comparison is one of tokens
    plain.onflush = () => {
      verdict.update();
      // Both charts have the same scale.
      const passes = Math.max(answer.counts.passes.length, plain.counts.passes.length);
      for (const { figures } of [answer, plain]) {
        figures.minimum = { passes, tokens: answer.figures.top };
        figures.update();
      }
      this.page.onDraw();
    };
    const whole = answer.done ? {} : { max_tokens: answer.tokens.length };
    await this.#stream(plain, { ...this.body, ...whole, drafter: "autoregressive" });
    plain.flush();
  }

  async #stream(answer, body) {
    const control = new AbortController();
    this.page.setBusy(control);
    this.#offer([]);
    this.problem.replaceChildren();
    this.page.attach(answer);
    let usage = null;
    let ending = "";
    try {
      for await (const [chunk, now] of chat(body, this.page.key(), control.signal)) {
        usage = chunk.usage ?? usage;
        const [choice] = chunk.choices;
        if (!choice) continue;
        answer.add(choice, now);
        if (choice.finish_reason) ending = ENDINGS[choice.finish_reason] ?? choice.finish_reason;
      }
    } catch (error) {
      if (control.signal.aborted) ending = "Stopped.";
      else this.#fail(error);
    }
    answer.finish(usage, ending);
    this.#offerAll();
    this.page.setBusy(null);
    this.page.announce(announcement(answer, this.problem.textContent));
  }

  #fail(error) {
    const { title, detail, advice } = explain(error);
    this.problem.replaceChildren(make("p", "", make("b", "", title)));
    for (const line of [detail, advice]) if (line) this.problem.append(make("p", "", line));
    if (error instanceof Refusal && error.status === 401) this.page.askKey(error.message, () => this.page.regenerate(this));
    else if (!(error instanceof Broken || error instanceof Refusal)) console.error(error);
  }

  #offerAll() {
    const { page, answer, body } = this;
    const temperature = body.temperature === undefined ? "" : `temperature ${body.temperature}`;
    const settings = [body.drafter ?? page.drafter(), temperature, `seed ${body.seed}`];
    const offers = [];
    if (!this.failed) offers.push(button("Copy", "plain", (event) => copy(answer.content, event.target)));
    offers.push(button(this.failed ? "Try again" : "Regenerate", "plain again", () => page.regenerate(this)));
    if (!this.failed && body.temperature !== 0) {
      offers.push(button("Regenerate with a new seed", "plain again", () => page.regenerate(this, true)));
    }
    offers.push(button("Edit the message", "plain again", () => this.#edit()));
    // The last answer has this button above the composer.
    if (this.comparable) offers.push(button("Compare", "plain compare", () => page.compare(this)));
    this.#offer([...offers, make("span", "used", settings.filter(Boolean).join(" · "))]);
  }

  #offer(offers) {
    this.actions.replaceChildren(...offers);
  }

  /** Replace the message by a text field. */
  #edit() {
    const field = make("textarea", "");
    field.value = this.message;
    field.rows = Math.min(12, this.message.split("\n").length + 1);
    field.setAttribute("aria-label", "Edit the message");
    const close = () => this.question.replaceChildren(make("p", "", this.message));
    const send = () => {
      if (!field.value.trim() || this.page.running()) return;
      this.message = field.value;
      close();
      this.page.regenerate(this);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
    });
    const choices = make("div", "choices", button("Cancel", "plain", close), button("Send", "main", send));
    this.question.replaceChildren(make("div", "edited", field, choices));
    field.focus();
  }
}

/** Text for screen readers at the end of an answer. */
function announcement({ content, counts }, problem) {
  return problem || `${content} End of the answer: ${counts.tokens} tokens in ${counts.steps} forward passes.`;
}
