// Blocks of Markdown as DOM nodes: headings, paragraphs, lists, quotes, code and tables. The model's text only ever becomes
// text nodes and addresses of links; nothing is parsed as HTML. Supported: CommonMark without reference links, underlined
// headings, HTML and entities, with the tables, strikethrough, tasks and bare links of GitHub's variant. A line break in a
// paragraph stays a line break, and images become links.

import { highlighted } from "./code.js";
import { make, together } from "./dom.js";
import { END, MAX_DEPTH, inline } from "./inline.js";

const FENCE = /^(\s*)(`{3,}(?=[^`]*$)|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=[\s\0]|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*\0?$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:( +)|\t|$)/;
const UNFINISHED = /^(?:[-_]{1,2}|[-*+]|#{1,6}|`{1,2}|~{1,2}|\d{1,9}[.)]?)$/; // a line that may become a mark of a block

/** The Markdown of one growing text in one element. */
export class Markdown {
  constructor(element) {
    this.element = element;
    this.start = 0; // beginning of the text that is parsed again: blocks before it do not change
    this.kept = 0; // number of blocks before it
  }

  /** Show `text`, which begins with the text shown before. `growing`: close the marks that are still open at its end. */
  update(text, growing) {
    text = text.replaceAll(END, "").replace(/\r\n?/g, "\n");
    const rest = text.slice(this.start);
    const lines = (growing ? unfinished(rest) : rest).split("\n");
    const found = [...blocks(lines, 0)];
    patch(this.element, found.map(({ node }) => node), this.kept);
    // The first two lines of a block decide whether it begins there (see tables), so these must be complete.
    const last = found.at(-1);
    if (!last || lines.length - last.line < 3) return;
    this.kept += found.length - 1;
    for (const line of lines.slice(0, last.line)) this.start += line.length + 1;
  }
}

/** Mark the end of a text that is still being written, without a last line that may become a mark such as `- `. */
function unfinished(text) {
  text = text.trimEnd();
  const line = text.slice(text.lastIndexOf("\n") + 1);
  const mark = line.slice(Math.max(line.lastIndexOf(" "), line.lastIndexOf(">")) + 1);
  const before = line.slice(0, line.length - mark.length);
  if (UNFINISHED.test(mark) && !/[^\s>*+\-\d.)]/.test(before)) text = text.slice(0, text.length - mark.length).trimEnd();
  return text && text + END;
}

/** Change the children of an element, from number `first` on, into `fresh`; equal ones stay, with selection and scroll. */
function patch(parent, fresh, first = 0) {
  for (const [place, node] of fresh.entries()) {
    const old = parent.childNodes[first + place];
    if (!old) parent.append(node);
    else if (old.nodeType === Node.TEXT_NODE && node.nodeType === Node.TEXT_NODE) {
      if (node.data.startsWith(old.data)) old.appendData(node.data.slice(old.length));
      else old.data = node.data;
    } else if (!old.cloneNode(false).isEqualNode(node.cloneNode(false))) old.replaceWith(node);
    else patch(old, [...node.childNodes]);
  }
  while (parent.childNodes.length > first + fresh.length) parent.lastChild.remove();
}

const isBlank = (line) => !line.trim();

/** Return the width of the white space at the beginning of a line; a tab counts 4. */
function indent(line) {
  let width = 0;
  for (const each of line) {
    if (each === " ") width += 1;
    else if (each === "\t") width += 4;
    else break;
  }
  return width;
}

/** Remove up to `width` columns of white space at the beginning of a line. */
function dedent(line, width) {
  let at = 0;
  for (let left = width; left > 0 && (line[at] === " " || line[at] === "\t"); at++) left -= line[at] === "\t" ? 4 : 1;
  return line.slice(at);
}

/** Yield the blocks of `lines`, each with the number of its first line. */
function* blocks(lines, depth) {
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const line = at;
    const read = depth < MAX_DEPTH ? kindOf(lines, at) : paragraph;
    const [node, next] = read(lines, at, depth);
    at = next;
    yield { line, node };
  }
}

const nodesOf = (lines, depth) => together([...blocks(lines, depth)].map(({ node }) => node));

/** Return the function that reads the block at a line; each returns its node and the next line. */
function kindOf(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return fenced;
  if (indent(line) > 3) return indented;
  if (HEADING.test(line)) return heading;
  if (RULE.test(line)) return (_, here) => [make("hr"), here + 1];
  if (QUOTE.test(line)) return quote;
  if (ITEM.test(line)) return list;
  return delimiters(lines, at) ? table : paragraph;
}

/** Whether a line ends the paragraph before it. A numbered list in the middle of a paragraph has to begin with 1. */
function interrupts(lines, at, inTable = false) {
  if (isBlank(lines[at])) return true;
  const kind = kindOf(lines, at);
  if (kind === indented || kind === paragraph || (kind === table && inTable)) return false;
  return kind !== list || (!/^\s*(?!1[.)])\d/.test(lines[at]) && !isBlank(lines[at].replace(ITEM, "")));
}

function paragraph(lines, at, depth) {
  let next = at + 1;
  while (next < lines.length && !(depth < MAX_DEPTH ? interrupts(lines, next) : isBlank(lines[next]))) next += 1;
  const text = lines.slice(at, next).map((line) => line.trimStart()).join("\n");
  return [make("p", "", inline(text.trimEnd())), next];
}

function heading(lines, at) {
  const level = HEADING.exec(lines[at])[1].length;
  const text = lines[at].trim().slice(level).trim().replace(/(^|\s)#+$/, "");
  return [make(`h${Math.min(6, level + 2)}`, "", inline(text)), at + 1]; // the page has headings of levels 1 and 2
}

function fenced(lines, at) {
  const [, space, marks, info] = FENCE.exec(lines[at]);
  const isEnd = (line) => {
    const found = line.replace(END, "").trim();
    return found.length >= marks.length && !found.replaceAll(marks[0], "");
  };
  let next = at + 1;
  while (next < lines.length && !isEnd(lines[next])) next += 1;
  const text = lines.slice(at + 1, next).map((line) => dedent(line, indent(space)));
  return [codeBlock(text, info.includes(END) ? "" : info.trim().split(/\s/)[0]), next + 1];
}

function indented(lines, at) {
  let next = at + 1;
  while (next < lines.length && (isBlank(lines[next]) || indent(lines[next]) > 3)) next += 1;
  const text = lines.slice(at, next).map((line) => dedent(line, 4));
  return [codeBlock(text.join("\n").trimEnd().split("\n"), ""), next];
}

/** A block of code, with its language and a button that copies it; the button works through its class. */
function codeBlock(lines, language) {
  const copy = make("button", "copy", "Copy");
  copy.type = "button";
  const pre = scrollable(make("pre", "", highlighted(lines.join("\n").replace(END, ""), language)), language || "Code");
  return make("div", "code-block", make("div", "code-head", make("span", "", language), copy), pre);
}

/** Let the keyboard scroll an element that may be wider than the page. */
function scrollable(element, label) {
  element.tabIndex = 0;
  element.setAttribute("role", "region");
  element.setAttribute("aria-label", label);
  return element;
}

function quote(lines, at, depth) {
  const inner = [];
  let next = at;
  for (; next < lines.length; next++) {
    if (QUOTE.test(lines[next])) inner.push(lines[next].replace(QUOTE, ""));
    else if (isBlank(inner.at(-1)) || interrupts(lines, next)) break;
    else inner.push(lines[next]);
  }
  return [make("blockquote", "", nodesOf(inner, depth + 1)), next];
}

function list(lines, at, depth) {
  const [, , first] = ITEM.exec(lines[at]);
  const isOrdered = first.length > 1;
  const node = make(isOrdered ? "ol" : "ul");
  if (isOrdered && parseInt(first, 10) !== 1) node.start = parseInt(first, 10);
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || indent(item[1]) > 3 || item[2].at(-1) !== first.at(-1) || RULE.test(lines[at])) break;
    const [body, next] = itemLines(lines, at, item);
    at = next;
    node.append(listItem(body, depth));
  }
  return [node, at];
}

/** Return the lines of a list item without their indentation, and the next line. */
function itemLines(lines, at, [start, space, mark, gap]) {
  const outer = indent(space);
  const width = outer + mark.length + (gap?.length <= 4 ? gap.length : 1);
  const body = [lines[at].slice(start.length)];
  for (at += 1; at < lines.length; at++) {
    const line = lines[at];
    if (isBlank(line)) body.push("");
    // Models often indent a nested list by 2 columns, also below "1. ".
    else if (indent(line) >= width || (indent(line) >= outer + 2 && ITEM.test(line))) body.push(dedent(line, width));
    else if (isBlank(body.at(-1)) || ITEM.test(line) || interrupts(lines, at)) break;
    else body.push(line);
  }
  return [body, at];
}

function listItem(body, depth) {
  const box = /^\[([ xX])\] /.exec(body[0]); // an item of a list of tasks
  if (box) body[0] = `${box[1] === " " ? "☐" : "☑"} ${body[0].slice(4)}`;
  const nodes = nodesOf(body, depth + 1);
  const first = nodes.firstChild;
  if (first?.nodeName === "P") first.replaceWith(together([...first.childNodes])); // as in a list without blank lines
  return make("li", "", nodes);
}

/** Return the cells of a row of a table. */
function cells(line) {
  const row = line.replace(END, "").trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1").split(/(?<!\\)\|/);
  if (line.endsWith(END)) row[row.length - 1] += END;
  return row.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** Return the delimiters (`:--`) below the first row of a table, or null if no table begins at this line. */
function delimiters(lines, at) {
  const [head, next] = lines.slice(at, at + 2);
  if (!head.includes("|")) return null;
  const isGrowing = (next ?? head).includes(END);
  // A line that begins like a row is shown as the first row before its delimiters are there.
  if (isGrowing && head.trim().startsWith("|") && !/[^\s|:\0-]/.test(next ?? "")) return [];
  if (!next?.includes("-") || /[^\s|:\0-]/.test(next)) return null;
  const found = cells(next).map((cell) => cell.replace(END, ""));
  return found.length === cells(head).length && found.every((cell) => /^:?-+:?$/.test(cell)) ? found : null;
}

function table(lines, at) {
  const marks = delimiters(lines, at);
  const names = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : ""));
  const row = (tag, line) => make("tr", "", together(cells(line).map((cell, column) => make(tag, names[column], inline(cell)))));
  const head = make("thead", "", row("th", lines[at]));
  const body = make("tbody");
  for (at += 2; at < lines.length && !interrupts(lines, at, true); at++) body.append(row("td", lines[at]));
  return [scrollable(make("div", "table", make("table", "", head, body)), "Table"), Math.min(at, lines.length)];
}
