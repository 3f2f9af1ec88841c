// Helpers for elements and numbers. Text is never parsed as HTML, because the model's output is not trusted.

/** Return an element with a class and children; strings become text nodes. */
export function make(tag, name, ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...children);
  return element;
}

/** Return a fragment of nodes and strings, which may be more than a function takes as arguments. */
export function together(nodes) {
  const fragment = document.createDocumentFragment();
  for (const node of nodes) fragment.append(node);
  return fragment;
}

/** Return a button with a label and a click handler. */
export function button(label, name, action) {
  const element = make("button", name, label);
  element.type = "button";
  element.addEventListener("click", action);
  return element;
}

/** Copy a text, and say so on the button. Browsers have `navigator.clipboard` on secure connections only. */
export async function copy(text, pressed) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = make("textarea", "visually-hidden");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    pressed.focus();
  }
  pressed.textContent = "Copied";
  setTimeout(() => (pressed.textContent = "Copy"), 1200);
}

/** Let the user save a text as a file. */
export function saveFile(name, text) {
  const link = make("a", "");
  link.download = name;
  link.href = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  link.click();
  URL.revokeObjectURL(link.href);
}

/** Return an SVG element. */
export function draw(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const counts = new Intl.NumberFormat("en");

/** Format 1234 as 1,234. */
export const count = (number) => counts.format(number);

/** Format a number with `places` decimals; a dash if the number is not finite. */
export const fixed = (number, places) => (Number.isFinite(number) ? number.toFixed(places) : "–");

/** Format tokens per second: one decimal below 100, none above. */
export const speed = (rate) => fixed(rate, rate < 100 ? 1 : 0);

/** Return a text with visible symbols for spaces, line breaks and tabs; ∅ for the empty text. */
export const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
