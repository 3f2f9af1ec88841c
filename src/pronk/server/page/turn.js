// A message, its answer, and the same answer without guessing.

import { Answer } from "./answer.js";
import { button, make } from "./dom.js";
import { Broken, Refusal, chat, explain } from "./stream.js";
import { Verdict } from "./verdict.js";

const ENDINGS = { length: "It ended at the most tokens that were asked for.", stop: "" };

export class Turn {
  /**
   * @param {string} message what the person says
   * @param {object} page what the turn asks of the page: before(turn) messages, options(), key(), busy(abort),
   *   edit(turn, message), again(turn), ask for a key, and what is told of every drawing
   */
  constructor(message, page) {
    this.message = message;
    this.page = page;
    this.said = make("div", "said", make("p", "", message));
    this.answers = make("div", "answers");
    this.problem = make("div", "problem");
    this.problem.setAttribute("role", "alert");
    this.actions = make("div", "actions");
    this.element = make("article", "turn", this.said, this.answers, this.problem, this.actions);
  }

  /** What a later message is asked after. */
  get messages() {
    const said = { role: "user", content: this.message };
    return this.failed ? [] : [said, { role: "assistant", content: this.answer.content }];
  }

  /** Whether nothing came of it. */
  get failed() {
    return !this.answer?.tokens.length && !this.answer?.done;
  }

  /** Ask for the answer. */
  async run(options) {
    const messages = [...this.page.before(this), { role: "user", content: this.message.toWellFormed() }];
    this.body = {
      ...options,
      messages,
      stream: true,
      stream_options: { include_usage: true },
      leaps: true,
      logprobs: true,
      top_logprobs: 5,
    };
    this.answer = new Answer("Answer");
    this.answers.replaceChildren(this.answer.element);
    this.element.classList.remove("compared");
    await this.#stream(this.answer, this.body);
  }

  /** The same without guessing, beside it. */
  async compare() {
    const { answer } = this;
    const plain = new Answer("Plain decoding");
    const verdict = new Verdict(answer, plain);
    answer.title.textContent = "With guesses";
    this.answers.replaceChildren(answer.element, plain.element, verdict.element);
    this.element.classList.add("compared");
    plain.onflush = () => {
      verdict.update();
      // Both strips on one scale.
      const passes = Math.max(answer.counts.passes.length, plain.counts.passes.length);
      for (const { figures } of [answer, plain]) figures.least = { passes, tokens: answer.figures.top };
      answer.figures.update();
      this.page.drawn();
    };
    const whole = answer.done ? {} : { max_tokens: answer.tokens.length };
    await this.#stream(plain, { ...this.body, ...whole, drafter: "autoregressive" });
    plain.flush();
  }

  async #stream(answer, body) {
    const control = new AbortController();
    this.page.busy(control);
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
    this.page.busy(null);
    this.page.say(spoken(answer, this.problem.textContent));
  }

  #fail(error) {
    const { title, detail, advice } = explain(error);
    this.problem.replaceChildren(make("p", "", make("b", "", title)));
    for (const line of [detail, advice]) if (line) this.problem.append(make("p", "", line));
    if (error instanceof Refusal && error.status === 401) this.page.askKey(error.message, () => this.page.again(this));
    else if (!(error instanceof Broken || error instanceof Refusal)) console.error(error);
  }

  #offerAll() {
    const { page, answer, body } = this;
    const chosen = [body.drafter ?? page.drafter(), `temperature ${body.temperature}`, `seed ${body.seed}`];
    const offers = [];
    if (!this.failed) {
      if (body.drafter !== "autoregressive" && answer.tokens.length) {
        const label = this.answers.children.length > 1 ? "Compare again" : "Beside plain decoding";
        offers.push(button(label, "plain", () => this.compare()));
      }
      offers.push(button("Copy", "plain", (event) => copy(answer.content, event.target)));
    }
    offers.push(button(this.failed ? "Try again" : "Again", "plain again", () => page.again(this)));
    if (!this.failed && body.temperature > 0) {
      offers.push(button("Again with a new seed", "plain again", () => page.again(this, true)));
    }
    offers.push(button("Edit the message", "plain again", () => this.#edit()));
    this.#offer([...offers, make("span", "chosen", chosen.filter(Boolean).join(" · "))]);
  }

  #offer(offers) {
    this.actions.replaceChildren(...offers);
  }

  /** The message becomes a field. */
  #edit() {
    const field = make("textarea", "");
    field.value = this.message;
    field.rows = Math.min(12, this.message.split("\n").length + 1);
    field.setAttribute("aria-label", "Edit the message");
    const close = () => this.said.replaceChildren(make("p", "", this.message));
    const send = () => {
      if (!field.value.trim() || this.page.running()) return;
      this.message = field.value;
      close();
      this.page.again(this);
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
    this.said.replaceChildren(make("div", "edited", field, choices));
    field.focus();
  }
}

/** For those who listen: an answer as a whole, when it is complete. */
function spoken({ content, counts }, problem) {
  return problem || `${content} End of the answer: ${counts.tokens} tokens in ${counts.steps} passes.`;
}

/** Without a secure connection browsers have no clipboard but the old one. */
async function copy(text, pressed) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = make("textarea", "unseen");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    pressed.focus();
  }
  const { textContent: label } = pressed;
  pressed.textContent = "Copied";
  setTimeout(() => (pressed.textContent = label), 1200);
}
