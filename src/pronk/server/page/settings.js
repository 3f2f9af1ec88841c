// What requests are asked with: kept in this browser, but for the key, which ends with the tab.

const DEFAULTS = {
  model: "",
  drafter: "",
  other: "",
  temperature: "0",
  top_p: "1",
  seed: "7",
  max_tokens: "256",
  system: "",
  theme: "auto",
  marks: true,
};
const STORE = "pronk.settings";
const KEY = "pronk.key";

/** Settings as the form has them: texts, so that what is half written stays as it is. */
export class Settings {
  constructor(form) {
    this.form = form;
    this.values = { ...DEFAULTS };
    try {
      const kept = JSON.parse(localStorage.getItem(STORE) ?? "{}");
      for (const [name, value] of Object.entries(DEFAULTS)) {
        if (typeof kept[name] === typeof value) this.values[name] = kept[name];
      }
    } catch {
      // Kept by another version, or not to be read: the defaults will do.
    }
    form.addEventListener("input", () => this.#read());
    form.addEventListener("submit", (event) => event.preventDefault());
    this.show();
  }

  /** Called after every change. */
  onchange = () => {};

  /** Write the values into the form. */
  show() {
    for (const field of this.form.elements) {
      if (field.name) field.value = this.values[field.name];
    }
    const { drafter } = this.form.elements;
    if (drafter.selectedIndex < 0) drafter.value = "";
    document.getElementById("other-field").hidden = drafter.value !== "other";
  }

  set(name, value) {
    this.values[name] = value;
    this.show();
    this.#keep();
  }

  newSeed() {
    this.set("seed", String(crypto.getRandomValues(new Uint32Array(1))[0]));
  }

  /** The options of a request, or nothing if the form has some that cannot be. */
  options() {
    if (!this.form.checkValidity()) return null;
    const { model, temperature, top_p, seed, max_tokens } = this.values;
    const drafter = this.drafter;
    return {
      ...(model && { model }),
      temperature: Number(temperature),
      top_p: Number(top_p),
      seed: Number(seed),
      ...(max_tokens && { max_tokens: Number(max_tokens) }),
      ...(drafter && { drafter }),
    };
  }

  get drafter() {
    return this.values.drafter === "other" ? this.values.other.trim() : this.values.drafter;
  }

  get key() {
    return kept(() => sessionStorage.getItem(KEY)) ?? this.lent ?? "";
  }

  set key(key) {
    this.lent = key;
    kept(() => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)));
  }

  #read() {
    for (const field of this.form.elements) {
      if (field.name) this.values[field.name] = field.value;
    }
    document.getElementById("other-field").hidden = this.values.drafter !== "other";
    this.#keep();
  }

  #keep() {
    kept(() => localStorage.setItem(STORE, JSON.stringify(this.values)));
    this.onchange();
  }
}

/** Browsers may forbid to keep anything; then it is kept as long as the page is open. */
function kept(action) {
  try {
    return action();
  } catch {
    return null;
  }
}
