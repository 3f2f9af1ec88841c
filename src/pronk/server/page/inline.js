// Markdown within a block as DOM nodes: emphasis, code, links and line breaks. See markdown.js.

import { make, together } from "./dom.js";

export const END = "\0"; // stands at the end of a text that is still being written
export const MAX_DEPTH = 12; // levels of nested blocks, and of nested emphasis; deeper marks stay text

const MARK =
  /\\([!-/:-@[-`{-~\n])|(`+)|(\*+|_+|~~)|(!?\[)|(\])|<((?:https?:\/\/|mailto:)[^\s<>\0]*)>|(<br ?\/?>|\n)|(https?:\/\/[^\s<>\0[\]`"*|]+)/g;
const TARGET = /\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
const BLANK = /^\s?$/; // a space, or the beginning or end of the text
const SIGN = /^[\p{P}\p{S}]$/u;
const TAGS = { "*": ["em", "strong"], _: ["em", "strong"], "~": [null, "del"] };

/** Return a link, or only its content unless the address is of the web or of e-mail. */
function link(address, shown) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!["http:", "https:", "mailto:"].includes(url?.protocol)) return make("span", "", shown);
  const node = make("a", "", shown);
  for (const inner of node.querySelectorAll("a")) inner.replaceWith(together([...inner.childNodes]));
  Object.assign(node, { href: url.href, target: "_blank", rel: "noopener noreferrer" });
  return node;
}

/** Return a fragment with the nodes of a text without blocks. */
export function inline(text) {
  return new Inline(text).read();
}

class Inline {
  constructor(text) {
    this.growing = text.endsWith(END);
    let stop = text.length - this.growing;
    while (this.growing && stop > 0 && "*_~`[\\".includes(text[stop - 1])) stop -= 1; // marks that may be incomplete
    this.text = text.slice(0, stop);
    this.out = []; // entries {node, depth}, or open marks, which are text until they are closed: {mark, count, at}
    this.open = { "*": [], _: [], "~": [], "[": [] }; // open marks, each in the order of the text
    this.ticks = new Map(); // number of backticks to the beginning of the last such run
    for (const { 0: run, index } of this.text.matchAll(/`+/g)) this.ticks.set(run.length, index);
  }

  read() {
    const { text } = this;
    let at = 0;
    const marks = new RegExp(MARK);
    for (let match; (match = marks.exec(text)); at = marks.lastIndex) {
      const [, escaped, ticks, run, opening, closing, address, lineBreak, url] = match;
      const before = text.slice(at, match.index);
      this.#text(lineBreak === "\n" ? before.trimEnd() : before);
      if (escaped) this.#add(escaped === "\n" ? make("br") : escaped);
      else if (ticks) marks.lastIndex = this.#code(ticks, match.index);
      else if (run) this.#emphasis(run, match.index);
      else if (opening) this.#push({ mark: "[", shown: opening });
      else if (closing) marks.lastIndex = this.#link(match.index);
      else if (address) this.#add(link(address, address.replace(/^mailto:/, "")));
      else if (lineBreak) this.#add(make("br"));
      else marks.lastIndex = this.#url(url, match.index);
    }
    this.#text(text.slice(at));
    for (let number = 0; this.growing && number < MAX_DEPTH; number++) {
      const opener = ["*", "_", "~"].map((each) => this.open[each].at(-1)).reduce(later, undefined);
      if (opener) this.#wrap(opener, Math.min(2, opener.count));
    }
    return content(this.out);
  }

  #text(text) {
    if (text) this.#add(text);
  }

  #add(node, depth = 0) {
    this.out.push({ node, depth });
  }

  /** Add a mark that may open something. */
  #push(entry) {
    const opener = { ...entry, at: this.out.length, depth: 0 };
    this.out.push(opener);
    this.open[entry.mark].push(opener);
  }

  /** Add a code span; return where the text goes on. */
  #code(ticks, at) {
    const start = at + ticks.length;
    let stop = this.text.length;
    let next = stop;
    if (this.ticks.get(ticks.length) > at) {
      const runs = /`+/g;
      runs.lastIndex = start;
      let run;
      do run = runs.exec(this.text);
      while (run[0].length !== ticks.length);
      [stop, next] = [run.index, runs.lastIndex];
    } else if (!this.growing) {
      this.#text(ticks);
      return start;
    }
    const code = this.text.slice(start, stop).replaceAll("\n", " ");
    const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
    this.#add(make("code", "", isPadded ? code.slice(1, -1) : code));
    return next;
  }

  /** Close and open emphasis with a run of marks. */
  #emphasis(run, at) {
    const [mark] = run;
    const [before, after] = [this.text[at - 1] ?? "", this.text[at + run.length] ?? ""];
    // As in CommonMark, `_` in a word is text. Unlike there, `*` needs no space beside punctuation, which Chinese lacks.
    const canOpen = !BLANK.test(after) && (mark !== "_" || BLANK.test(before) || SIGN.test(before));
    const canClose = !BLANK.test(before) && (mark !== "_" || BLANK.test(after) || SIGN.test(after));
    let count = run.length;
    while (canClose && count > 0 && this.open[mark].length) {
      const opener = this.open[mark].at(-1);
      const size = Math.min(2, count, opener.count);
      this.#wrap(opener, size);
      count -= size;
    }
    const shown = mark.repeat(count);
    if (count && canOpen) this.#push({ mark, count, shown });
    else this.#text(shown);
  }

  /** Wrap all after an open mark in the element for `size` of its characters. */
  #wrap(opener, size) {
    const { mark, at } = opener;
    this.#forget(at);
    const depth = 1 + this.out.slice(at + 1).reduce((most, each) => Math.max(most, each.depth), 0);
    if (depth > MAX_DEPTH) {
      for (const openers of Object.values(this.open)) openers.length = 0; // all open marks enclose this depth
      this.#text(mark.repeat(size));
      return;
    }
    const inner = this.out.splice(at + 1);
    opener.count -= size;
    opener.shown = mark.repeat(opener.count);
    if (!opener.count) this.open[mark].pop();
    if (inner.length) this.#add(make(TAGS[mark][size - 1], "", content(inner)), depth);
  }

  /** Leave open marks after a place in the output as text. */
  #forget(at) {
    for (const openers of Object.values(this.open)) while (openers.length && openers.at(-1).at > at) openers.pop();
  }

  /** Add a link at its closing bracket; return where the text goes on. */
  #link(at) {
    const opener = this.open["["].pop();
    TARGET.lastIndex = at + 1;
    const target = opener && TARGET.exec(this.text);
    const isCut = opener && this.growing && this.text[at + 1] === "(" && !/[\s)]/.test(this.text.slice(at + 2, at + 2000));
    if (!target && !isCut) {
      this.#text("]");
      return at + 1;
    }
    this.#forget(opener.at);
    const inner = this.out.splice(opener.at).slice(1);
    const isImage = opener.shown === "![";
    this.open["["].splice(0, this.open["["].length - isImage); // links have no links in them, only images
    const address = target ? target[1] : "";
    const depth = 1 + inner.reduce((most, each) => Math.max(most, each.depth), 0);
    this.#add(link(address, isImage && !inner.length ? "image" : content(inner)), depth);
    return target ? TARGET.lastIndex : this.text.length;
  }

  /** Add a link for a bare address, without punctuation at its end; return where the text goes on. */
  #url(url, at) {
    let stop = url.length;
    const isOpen = url.includes("(");
    while (".,;:!?'_~".includes(url[stop - 1]) || (url[stop - 1] === ")" && !isOpen)) stop -= 1;
    this.#add(link(url.slice(0, stop), url.slice(0, stop)));
    return at + stop;
  }
}

/** Return a fragment of entries of the output. */
const content = (entries) => together(entries.map((entry) => entry.node ?? entry.shown));

const later = (one, other) => (!one || other?.at > one.at ? other : one);
