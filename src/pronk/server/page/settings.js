// Settings of requests, stored in this browser; the API key is stored until the tab is closed.

import { tryStorage } from "./conversations.js";

const DEFAULTS = {
  model: "",
  drafter: "",
  other: "",
  temperature: "",
  top_p: "",
  seed: "7",
  max_tokens: "",
  system: "",
  theme: "auto",
  marks: false,
};
const STORE = "pronk.settings";
const KEY = "pronk.key";

/**
 * Settings as strings of the form fields, so that incomplete input is preserved. An empty temperature or top p means
 * the value recommended for the model; its field shows this value, if it is known.
 */
export class Settings {
  #recommended = {};

  constructor(form) {
    this.form = form;
    this.values = { ...DEFAULTS };
    try {
      const stored = JSON.parse(localStorage.getItem(STORE) ?? "{}");
      for (const [name, value] of Object.entries(DEFAULTS)) {
        if (typeof stored[name] === typeof value) this.values[name] = stored[name];
      }
    } catch {
      // Storage is blocked or has an unknown format: use the defaults.
    }
    form.addEventListener("input", () => this.#read());
    form.addEventListener("submit", (event) => event.preventDefault());
    this.show();
  }

  /** Called after every change. */
  onchange = () => {};

  /** Set the sampling options recommended for the model, as in /v1/models; undefined until it was loaded. */
  recommend({ temperature, top_p } = {}) {
    const { temperature: shownTemperature, top_p: shownTopP } = this.#recommended;
    if (temperature === shownTemperature && top_p === shownTopP) return; // keep what is being typed
    this.#recommended = { temperature, top_p };
    this.show();
  }

  /** Return the value that a field shows: what was set, or what is recommended. */
  effective(name) {
    return this.values[name] || String(this.#recommended[name] ?? "");
  }

  /** Write the values into the form. */
  show() {
    for (const field of this.form.elements) {
      if (field.name) field.value = this.effective(field.name);
    }
    const { drafter } = this.form.elements;
    if (drafter.selectedIndex < 0) drafter.value = "";
    document.getElementById("other-field").hidden = drafter.value !== "other";
  }

  set(name, value) {
    this.values[name] = value;
    this.show();
    this.#store();
  }

  newSeed() {
    this.set("seed", String(crypto.getRandomValues(new Uint32Array(1))[0]));
  }

  /** Return the options of a request, or null if a form field is invalid. */
  options() {
    if (!this.form.checkValidity()) return null;
    const { model, seed, max_tokens } = this.values;
    const temperature = this.effective("temperature");
    const top_p = this.effective("top_p");
    const drafter = this.drafter;
    return {
      ...(model && { model }),
      ...(temperature && { temperature: Number(temperature) }),
      ...(top_p && { top_p: Number(top_p) }),
      seed: Number(seed),
      ...(max_tokens && { max_tokens: Number(max_tokens) }),
      ...(drafter && { drafter }),
    };
  }

  get drafter() {
    return this.values.drafter === "other" ? this.values.other.trim() : this.values.drafter;
  }

  get key() {
    return tryStorage(() => sessionStorage.getItem(KEY)) ?? this.currentKey ?? "";
  }

  set key(key) {
    this.currentKey = key;
    tryStorage(() => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)));
  }

  #read() {
    for (const { name, value } of this.form.elements) {
      if (name) this.values[name] = value === String(this.#recommended[name] ?? "") ? "" : value;
    }
    document.getElementById("other-field").hidden = this.values.drafter !== "other";
    this.#store();
  }

  #store() {
    tryStorage(() => localStorage.setItem(STORE, JSON.stringify(this.values)));
    this.onchange();
  }
}
