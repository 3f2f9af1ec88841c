// Statistics of an answer: numbers, a legend of its drafters, and a chart of the tokens per forward pass.

import { count, draw, fixed, make, speed } from "./dom.js";
import { slot } from "./sources.js";

const COLUMNS = 240; // maximum columns of the chart; in longer answers a column is the mean of several passes

/** Counts of a streamed answer; at its end they are replaced by the server's usage. */
export class Counts {
  constructor(start) {
    this.start = start; // time of the request in milliseconds
    this.fromRequest = false; // whether times are measured from the request on instead of the first tokens
    this.tokens = this.accepted = 0;
    this.passes = []; // for each forward pass: drafter, or null for the target, to its number of tokens
    this.sources = new Map([[null, 0]]);
  }

  /** Add the tokens of a chunk, received at time `now` in milliseconds. */
  add(leaps, now) {
    for (const { source, step } of leaps) {
      this.passes[step] ??= new Map();
      for (const each of [this.passes[step], this.sources]) each.set(source, (each.get(source) ?? 0) + 1);
      this.accepted += source !== null;
    }
    this.tokens += leaps.length;
    this.first ??= { now, tokens: 0 };
    if (now === this.first.now) this.first.tokens += leaps.length; // a read of the stream may have several chunks
    this.last = now;
  }

  finish(usage) {
    this.usage = usage;
    this.fromRequest = this.last === this.first?.now;
    Object.assign(this, { tokens: usage.completion_tokens, accepted: usage.accepted, drafted: usage.drafted });
  }

  get steps() {
    return this.usage?.steps ?? this.passes.length;
  }

  get perPass() {
    return this.tokens / this.steps;
  }

  /**
   * Seconds from the first read of the stream to the last. If the whole answer arrived in one read, or if
   * `fromRequest` is set, the seconds from the request to the last read.
   */
  get seconds() {
    return (this.last - (this.fromRequest ? this.start : this.first?.now)) / 1000;
  }

  /** Tokens per second after the first read, whose time includes the prefill; or after the request, see `seconds`. */
  get rate() {
    const tokens = this.tokens - (this.fromRequest ? 0 : this.first?.tokens);
    return this.seconds > 0 ? tokens / this.seconds : NaN;
  }
}

export class Figures {
  constructor(counts) {
    this.counts = counts;
    this.minimum = { passes: 48, tokens: 2 }; // smallest width and height of the chart
    this.strip = draw("svg", { class: "strip", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.layers = new Map();
    this.one = this.strip.appendChild(draw("path", { class: "one" }));
    this.mean = this.strip.appendChild(draw("path", { class: "mean" }));
    this.maxLabel = make("span", "max-label");
    this.oneLabel = make("span", "one-label", "1");
    this.chart = make("div", "chart", this.maxLabel, this.oneLabel, this.strip);
    this.chart.setAttribute("role", "img");
    this.legend = make("ul", "legend");
    this.values = {};
    const row = make("summary", "numbers", ...MAIN.map((name) => this.#number(name)));
    const others = make("p", "numbers", ...OTHERS.map((name) => this.#number(name)));
    this.element = make("details", "figures", row, others, this.chart, this.legend);
    this.chart.addEventListener("pointermove", (event) => this.onpoint(this.#passAt(event)));
    this.chart.addEventListener("pointerleave", () => this.onpoint(null));
    this.chart.addEventListener("click", (event) => this.onpick(this.#passAt(event)));
    this.update();
  }

  /** Called with the index of the forward pass under the pointer, or null. */
  onpoint = () => {};

  /** Called with the index of a clicked forward pass. */
  onpick = () => {};

  #number(name) {
    this.values[name] = make("b", name);
    return make("span", `number of-${name}`, this.values[name], " ", make("span", "label", LABELS[name]));
  }

  update() {
    const { counts, values } = this;
    const { usage } = counts;
    const cached = usage?.prompt_tokens_details.cached_tokens ?? 0;
    values.perPass.textContent = fixed(counts.perPass, 2);
    values.tokens.textContent = count(counts.tokens);
    values.passes.textContent = count(counts.steps);
    values.rate.textContent = speed(counts.rate);
    values.accepted.textContent = count(counts.accepted) + (usage ? ` of ${count(counts.drafted)}` : "");
    values.prompt.textContent = usage ? count(usage.prompt_tokens) : "–";
    values.prompt.parentNode.lastChild.textContent = cached ? `prompt tokens, ${count(cached)} cached` : LABELS.prompt;
    values.wait.textContent = counts.first ? duration(counts.first.now - counts.start) : "–";
    this.#updateLegend();
    this.#updateStrip();
  }

  #updateLegend() {
    const { sources } = this.counts;
    for (const [source, tokens] of sources) {
      let item = this.legend.querySelector(`[data-source="${CSS.escape(source ?? "")}"]`);
      if (!item) {
        const swatch = make("span", source === null ? "swatch target" : `swatch draft ${slot(source)}`, "abc");
        swatch.setAttribute("aria-hidden", "true");
        item = make("li", "", swatch, ` ${source ?? "target model"} `, make("b"));
        item.dataset.source = source ?? "";
        this.legend.append(item);
      }
      item.lastChild.textContent = count(tokens);
    }
  }

  #updateStrip() {
    const { passes, sources } = this.counts;
    const bin = (this.bin = Math.ceil(Math.max(passes.length, this.minimum.passes) / COLUMNS));
    this.columns = Math.max(Math.ceil(passes.length / bin), Math.ceil(this.minimum.passes / bin));
    const sizes = passes.map((pass) => [...pass.values()].reduce((sum, each) => sum + each, 0));
    const most = sizes.reduce((largest, each) => Math.max(largest, each), this.minimum.tokens);
    this.top = most;
    this.strip.setAttribute("viewBox", `0 0 ${this.columns} ${most}`);
    const heights = new Float64Array(this.columns);
    for (const source of sources.keys()) {
      let path = "";
      for (let column = 0; column * bin < passes.length; column++) {
        const here = passes.slice(column * bin, (column + 1) * bin);
        const height = here.reduce((sum, pass) => sum + (pass.get(source) ?? 0), 0) / here.length;
        if (height) path += `M${column + 0.1} ${most - heights[column]}v${-height}h.8v${height}z`;
        heights[column] += height;
      }
      this.#layer(source).setAttribute("d", path);
    }
    const mean = this.counts.perPass || 0;
    this.one.setAttribute("d", `M0 ${most - 1}H${this.columns}`);
    this.mean.setAttribute("d", `M0 ${most - mean}H${this.columns}`);
    this.maxLabel.textContent = most;
    this.oneLabel.style.bottom = `${100 / most}%`;
    this.chart.setAttribute("aria-label", `Tokens per forward pass: ${fixed(mean, 2)} on average, ${most} at most`);
  }

  #layer(source) {
    if (!this.layers.has(source)) {
      const path = draw("path", { class: source === null ? "target" : slot(source) });
      this.strip.insertBefore(path, this.one);
      this.layers.set(source, path);
    }
    return this.layers.get(source);
  }

  #passAt(event) {
    const box = this.strip.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * this.columns);
    return Math.min(column * this.bin, this.counts.passes.length - 1);
  }
}

const MAIN = ["perPass", "rate", "tokens"]; // the figures of the row that is always shown
const OTHERS = ["passes", "accepted", "prompt", "wait"];
const LABELS = {
  perPass: "tokens per pass",
  rate: "tokens/s",
  tokens: "tokens",
  passes: "forward passes",
  accepted: "draft tokens accepted",
  prompt: "prompt tokens",
  wait: "time to first token",
};

const duration = (milliseconds) =>
  milliseconds < 995 ? `${fixed(milliseconds, 0)} ms` : `${fixed(milliseconds / 1000, 1)} s`;
