// Card with the target's most likely candidates at a token; opens by pointer, touch or focus.

import { count, fixed, make, visible } from "./dom.js";
import { slot } from "./sources.js";

const GAP = 8;

export class Candidates {
  constructor(element) {
    this.element = element;
    addEventListener("resize", () => this.hide());
  }

  /** Open the card for tokens of an answer under the pointer or with focus; arrow keys move the focus. */
  attach(answer) {
    const { body } = answer;
    const number = (event) => event.target.closest?.(".token")?.dataset.number;
    body.addEventListener("pointerover", (event) => {
      if (event.pointerType === "mouse" && number(event)) this.show(answer, Number(number(event)));
    });
    body.addEventListener("pointerleave", (event) => {
      const focused = body.querySelector(".token:focus-visible");
      if (event.pointerType !== "mouse") return;
      if (focused) this.show(answer, Number(focused.dataset.number));
      else this.hide();
    });
    body.addEventListener("click", (event) => {
      // A click that ends a selection must not move the focus.
      if (number(event) && getSelection().isCollapsed) this.#focus(answer, Number(number(event)));
    });
    body.addEventListener("focusin", (event) => number(event) && this.show(answer, Number(number(event))));
    body.addEventListener("focusout", () => this.hide());
    body.addEventListener("keydown", (event) => this.#key(answer, event));
  }

  show(answer, number) {
    this.hide();
    const span = answer.spans[number];
    this.span = span;
    span.classList.add("shown");
    span.setAttribute("role", "note");
    span.setAttribute("aria-describedby", this.element.id);
    this.element.replaceChildren(...card(answer, answer.tokens[number]));
    this.element.hidden = false;
    this.#place(span.getClientRects()[0] ?? span.getBoundingClientRect());
  }

  hide() {
    this.span?.classList.remove("shown");
    this.span?.removeAttribute("aria-describedby");
    this.span = null;
    this.element.hidden = true;
  }

  get open() {
    return !this.element.hidden;
  }

  /** Place the card below the token, or above if the space below is too small, within the window. */
  #place(at) {
    const { offsetWidth: width, offsetHeight: height, style } = this.element;
    const floor = document.querySelector(".dock").getBoundingClientRect().top;
    const left = Math.max(GAP, Math.min(at.left - 12, document.documentElement.clientWidth - width - GAP));
    const below = at.bottom + GAP;
    const top = below + height <= floor || at.top - height - GAP < 0 ? below : at.top - height - GAP;
    style.left = `${left + scrollX}px`;
    style.top = `${top + scrollY}px`;
  }

  #focus(answer, number) {
    const span = answer.spans[number];
    if (!span) return;
    const folded = span.closest("details");
    if (folded) folded.open = true;
    for (const each of answer.body.querySelectorAll('.token[tabindex="0"]')) each.tabIndex = -1;
    span.tabIndex = 0;
    span.focus();
  }

  #key(answer, event) {
    if (!event.target.dataset.number || event.ctrlKey || event.metaKey || event.altKey) return;
    const number = Number(event.target.dataset.number);
    const { step } = answer.tokens[number];
    const firstOf = (pass) => answer.tokens.findIndex((token) => token.step === pass);
    const target = {
      ArrowRight: () => number + 1,
      ArrowLeft: () => number - 1,
      ArrowDown: () => firstOf(step + 1),
      ArrowUp: () => firstOf(step - 1),
      Home: () => 0,
      End: () => answer.tokens.length - 1,
    }[event.key];
    if (!target) return;
    event.preventDefault();
    this.#focus(answer, target());
  }
}

function card(answer, token) {
  const { source, step, text } = token;
  const pass = answer.tokens.filter((each) => each.step === step);
  const index = pass.indexOf(token) + 1;
  const origin = make("span", "", source === null ? "chosen by the target model" : "drafted by ");
  if (source !== null) origin.append(make("span", `token draft ${slot(source)}`, source));
  const name = `forward pass ${count(step + 1)}`;
  const where = pass.length > 1 ? `token ${index} of ${pass.length} in ${name}` : `the only token of ${name}`;
  const head = make("p", "head", make("code", "", visible(token.token ?? text)), origin, make("small", "", where));
  const rows = (token.top_logprobs ?? []).map((each) => row(each, same(each, token)));
  if (rows.length && !token.top_logprobs.some((each) => same(each, token))) rows.push(row(token, true));
  return [head, make("ol", "", ...rows)];
}

const same = (one, other) => one.token === other.token && String(one.bytes) === String(other.bytes);

function row({ token, logprob }, chosen) {
  const share = Math.exp(logprob);
  const bar = make("span", "bar", make("span", "fill"));
  bar.firstChild.style.width = `${100 * share}%`;
  const item = make("li", chosen ? "chosen" : "", make("code", "", visible(token)), bar, make("span", "share", percent(share)));
  if (chosen) item.append(make("span", "visually-hidden", "chosen token"));
  return item;
}

const percent = (share) => (share < 0.0005 ? "< 0.1 %" : `${fixed(100 * share, 1)} %`);
