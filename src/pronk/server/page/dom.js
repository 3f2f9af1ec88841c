// Elements, made without ever reading text as HTML: what a model writes is not to be trusted.

/** An element with a class and children; texts become text. */
export function make(tag, name, ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...children);
  return element;
}

/** A button that says what it does. */
export function button(label, name, action) {
  const element = make("button", name, label);
  element.type = "button";
  element.addEventListener("click", action);
  return element;
}

/** An element of SVG. */
export function draw(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const counts = new Intl.NumberFormat("en");

/** 1234 as 1,234. */
export const count = (number) => counts.format(number);

/** A number with as many places, or a dash if there is none yet. */
export const fixed = (number, places) => (Number.isFinite(number) ? number.toFixed(places) : "–");

/** A speed: a place behind the point where it says something. */
export const speed = (rate) => fixed(rate, rate < 100 ? 1 : 0);

/** A text whose spaces and ends of lines are seen. */
export const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
