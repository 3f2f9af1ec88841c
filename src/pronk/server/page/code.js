// Highlighted source code. highlight.min.js is the unchanged ES module of highlight.js 11.12.0 (package
// @highlightjs/cdn-assets, BSD 3-Clause: highlight.LICENSE.txt). Its tree of scopes becomes elements here; its HTML is not used.

import { make } from "./dom.js";
import hljs from "./highlight.min.js";

const MAX_LENGTH = 20_000; // characters; a longer text stays plain, because a growing text is highlighted once per frame

/** Return a `code` element with `text`, highlighted if `language` is the name or an alias of a known language. */
export function highlighted(text, language) {
  const code = make("code", "");
  if (!hljs.getLanguage(language) || text.length > MAX_LENGTH) {
    code.append(text);
    return code;
  }
  let current = code;
  hljs.highlight(text, { language, ignoreIllegals: true })._emitter.walk({
    addText: (part) => current.append(part),
    openNode({ scope }) {
      if (scope) current = current.appendChild(make("span", className(scope)));
    },
    closeNode({ scope }) {
      if (scope) current = current.parentNode;
    },
  });
  return code;
}

/** Return the class of a scope such as `title.function`. */
const className = (scope) => `hljs-${scope.split(".")[0]}`;
