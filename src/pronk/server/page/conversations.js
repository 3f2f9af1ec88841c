// Conversations, stored in this browser: one entry of localStorage each, so that several tabs can write at the same time.

const PREFIX = "pronk.conversation.";
const CURRENT = "pronk.current"; // in sessionStorage: the conversation of this tab
const TITLE_LENGTH = 60;

/** The stored conversations, each `{ id, title, changed, turns }`, and the one that this tab shows. */
export class Conversations {
  constructor() {
    const stored = tryStorage(() => sessionStorage.getItem(CURRENT));
    this.current = (stored && this.find(stored)) || fresh();
  }

  /** Return the stored conversations, the one changed last first. */
  get all() {
    const keys = tryStorage(() => Object.keys(localStorage)) ?? [];
    const ids = keys.filter((key) => key.startsWith(PREFIX)).map((key) => key.slice(PREFIX.length));
    const found = ids.map((id) => this.find(id)).filter(Boolean);
    return found.sort((one, other) => other.changed - one.changed);
  }

  /** Return a stored conversation, or null. */
  find(id) {
    const found = tryStorage(() => JSON.parse(localStorage.getItem(PREFIX + id)));
    return Array.isArray(found?.turns) ? { ...found, id } : null;
  }

  /** Make a conversation the one of this tab: a new one without `id`. */
  open(id) {
    this.current = (id && this.find(id)) || fresh();
    tryStorage(() => sessionStorage.setItem(CURRENT, this.current.id));
  }

  /** Store the turns of the current conversation. Return false if the browser has no room for them. */
  save(turns) {
    const { current } = this;
    current.turns = turns;
    current.changed = Date.now();
    if (!current.renamed) current.title = titleOf(turns);
    return this.#store();
  }

  rename(title) {
    this.current.title = title;
    this.current.renamed = true;
    return this.#store();
  }

  /** Delete the current conversation, and begin a new one. */
  remove() {
    tryStorage(() => localStorage.removeItem(PREFIX + this.current.id));
    this.open(null);
  }

  #store() {
    const { current } = this;
    return (
      tryStorage(() => {
        localStorage.setItem(PREFIX + current.id, JSON.stringify(current));
        sessionStorage.setItem(CURRENT, current.id);
        return true;
      }) ?? false
    );
  }
}

/** Return a conversation as Markdown: a heading, then the message and the answer of each turn. */
export function asMarkdown({ title, turns }) {
  const parts = turns.flatMap(({ message, answer }) => [`## You\n\n${message}`, `## Answer\n\n${answer?.content ?? ""}`]);
  return `${[`# ${title}`, ...parts].join("\n\n")}\n`;
}

/** Return a conversation as JSON: its messages as `/v1/chat/completions` takes them, and the options of each answer. */
export function asJson({ title, turns }) {
  const messages = turns.flatMap(({ message, answer }) => [
    { role: "user", content: message },
    ...(answer ? [{ role: "assistant", content: answer.content }] : []),
  ]);
  const system = turns.at(-1)?.system;
  const first = system ? [{ role: "system", content: system }] : [];
  const options = turns.map((turn) => turn.options ?? {});
  return `${JSON.stringify({ title, messages: [...first, ...messages], options }, null, 1)}\n`;
}

const fresh = () => ({ id: newId(), title: "New conversation", changed: Date.now(), turns: [] });

/** Return 16 random hexadecimal digits; crypto.randomUUID exists on secure connections only. */
const newId = () => [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

const titleOf = (turns) => (turns[0]?.message.trim().split("\n")[0] ?? "").slice(0, TITLE_LENGTH) || "New conversation";

/** Return the result of a storage access, or null if the browser blocks storage or has no room. */
export function tryStorage(action) {
  try {
    return action();
  } catch {
    return null;
  }
}
