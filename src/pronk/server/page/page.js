// The page: the conversation, its settings, and its scroll position.

import { Candidates } from "./candidates.js";
import { Conversations, asJson, asMarkdown } from "./conversations.js";
import { button, count, make, saveFile } from "./dom.js";
import { Settings } from "./settings.js";
import { Refusal, explain, models } from "./stream.js";
import { Turn } from "./turn.js";

const $ = (id) => document.getElementById(id);
const settings = new Settings($("options"));
const conversations = new Conversations();
const candidates = new Candidates($("candidates"));
const message = $("message");
let turns = [];
let running = null; // AbortController of the answer in progress
let knownModels = [];
let onKey = null; // action to take once the user has entered a key

const page = {
  history(turn) {
    return turns.slice(0, turns.indexOf(turn)).flatMap(({ messages }) => messages);
  },
  system: () => settings.values.system.trim().toWellFormed(),
  key: () => settings.key,
  drafter: () => knownModels.find(({ id }) => id === settings.values.model)?.drafter,
  running: () => running !== null,
  marks: () => settings.values.marks,
  setBusy(controller) {
    running = controller;
    document.body.classList.toggle("busy", running !== null);
    $("send").hidden = running !== null;
    $("stop").hidden = running === null;
    save();
    showConversations();
    if (running) announce("Answering.");
    // A request may have loaded a model and unloaded another.
    else if (knownModels.length > 1 || knownModels.some(({ sampling }) => !sampling)) loadModels();
    refresh();
    follow(); // the line above the composer may have appeared
  },
  attach(answer) {
    const { onflush } = answer;
    answer.onflush = () => {
      onflush();
      page.onDraw();
    };
    candidates.attach(answer);
  },
  onDraw() {
    showComparison();
    follow();
  },
  announce,
  askKey,
  regenerate(turn, newSeed) {
    if (running) return;
    if (newSeed) settings.newSeed();
    for (const later of turns.splice(turns.indexOf(turn) + 1)) later.element.remove();
    ask(turn);
  },
  compare(turn) {
    if (running) return;
    following = turn === turns.at(-1);
    turn.compare();
    if (!following) turn.element.scrollIntoView({ block: "nearest" });
  },
};

function send() {
  const text = message.value;
  if (running || !text.trim()) return;
  const turn = new Turn(text, page);
  if (!ask(turn)) return;
  message.value = "";
  resizeMessage();
}

/** Request the answer of a new or an earlier turn. Return false, and show the settings, if a setting is invalid. */
function ask(turn) {
  const options = settings.options();
  if (!options) {
    openSettings(true);
    settings.form.reportValidity();
    return false;
  }
  if (!turns.includes(turn)) {
    turns.push(turn);
    $("conversation").append(turn.element);
  }
  following = true;
  turn.run(options);
  refresh();
  follow();
  return true;
}

function refresh() {
  document.body.classList.toggle("begun", turns.length > 0);
  $("new").disabled = turns.length === 0 || running !== null;
  showComparison();
  $("send").disabled = !message.value.trim();
  const { seed } = settings.values;
  const temperature = settings.effective("temperature");
  const drafter = settings.drafter || page.drafter();
  const shown = [drafter, temperature && `temperature ${temperature}`, `seed ${seed}`];
  $("summary").textContent = shown.filter(Boolean).join(" · ");
}

function announce(text) {
  $("status").textContent = text;
}

// Scroll position: follow the end of the conversation until the user scrolls up.

let following = true;

const distance = () => document.documentElement.scrollHeight - innerHeight - scrollY;

function follow() {
  if (following) scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
  $("latest").hidden = following || distance() < 80;
}

let lastScrollY = 0;
let lastWheelUp = -Infinity; // time of the last upward turn of the wheel
addEventListener(
  "wheel",
  ({ deltaY, timeStamp }) => {
    if (deltaY >= 0 || scrollY === 0) return;
    following = false;
    lastWheelUp = timeStamp;
  },
  { passive: true },
);
addEventListener(
  "scroll",
  ({ timeStamp }) => {
    // A page that becomes shorter scrolls up without the user, and is then at its end.
    if (distance() < 2) following ||= timeStamp - lastWheelUp > 200;
    else if (scrollY < lastScrollY) following = false;
    else if (distance() < 40) following = true;
    lastScrollY = scrollY;
    $("latest").hidden = following || distance() < 80;
  },
  { passive: true },
);
$("latest").addEventListener("click", () => {
  following = true;
  follow();
});

// Message field.

function resizeMessage() {
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight}px`;
  refresh();
}

message.addEventListener("input", resizeMessage);
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => {
  running?.abort();
  message.focus();
});
for (const starter of document.querySelectorAll(".starter")) {
  starter.addEventListener("click", () => {
    message.value = starter.textContent;
    send();
  });
}
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (running) running.abort();
  else if (candidates.open) candidates.hide();
  else if (!$("settings").hidden) openSettings(false);
  else if (!$("conversations").hidden) openConversations(false);
});

// Panels, of which at most one is open; colour theme, marks of draft tokens.

function showPanel(name, open) {
  for (const each of ["settings", "conversations"]) {
    const isOpen = open && each === name;
    $(each).hidden = !isOpen;
    $(`open-${each}`).setAttribute("aria-expanded", isOpen);
  }
  document.body.classList.toggle("with-panel", open);
  candidates.hide();
}

function openConversations(open) {
  showPanel("conversations", open);
  showConversations();
  if (open) $("close-conversations").focus();
  else $("open-conversations").focus();
}

function openSettings(open) {
  showPanel("settings", open);
  if (open) settings.form.elements.drafter.focus();
  else $("open-settings").focus();
}

$("open-settings").addEventListener("click", () => openSettings($("settings").hidden));
$("summary").addEventListener("click", () => openSettings($("settings").hidden));
$("close-settings").addEventListener("click", () => openSettings(false));
$("new-seed").addEventListener("click", () => settings.newSeed());
$("set-key").addEventListener("click", () => askKey("The page sends this key with every request.", loadModels));

const THEMES = ["auto", "dark", "light"];
$("theme").addEventListener("click", () => {
  settings.set("theme", THEMES[(THEMES.indexOf(settings.values.theme) + 1) % THEMES.length]);
});
$("marks").addEventListener("click", () => settings.set("marks", !settings.values.marks));

function apply() {
  const { theme, marks } = settings.values;
  document.documentElement.dataset.theme = theme;
  $("theme").title = `Colours: ${theme}`;
  $("theme").setAttribute("aria-label", `Colours: ${theme}`);
  $("theme").querySelector("use").setAttribute("href", `#i-${THEMES.includes(theme) ? theme : "auto"}`);
  document.body.classList.toggle("marked", marks);
  for (const turn of turns) turn.marks = marks;
  $("marks").setAttribute("aria-pressed", marks);
  showModel();
  refresh();
}

settings.onchange = apply;

// API key.

function askKey(reason, then) {
  onKey = then;
  $("key-reason").textContent = reason;
  $("key").value = "";
  $("key-dialog").showModal();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  settings.key = $("key").value.trim();
  $("key-dialog").close();
  if (knownModels.length === 0) loadModels();
  onKey?.();
});
$("key-cancel").addEventListener("click", () => $("key-dialog").close());

// Comparison of the last answer with plain decoding, above the composer; earlier answers have a button of their own.

function showComparison() {
  const last = turns.at(-1);
  const verdict = last?.verdict;
  $("comparison").hidden = !last?.comparable && !verdict;
  $("compare").hidden = running !== null;
  $("compare").textContent = verdict ? "Compare again" : "Compare with plain decoding";
  $("compared").textContent = verdict?.summary ?? "";
}

$("compare").addEventListener("click", () => page.compare(turns.at(-1)));

// Conversations stored in this browser.

function save() {
  if (turns.length > 0) $("storage-problem").hidden = conversations.save(turns);
}

/** Show the conversation of this tab, as it is stored. */
function showCurrent() {
  candidates.hide();
  turns = [];
  $("conversation").replaceChildren();
  for (const stored of conversations.current.turns) {
    const turn = new Turn(stored.message, page);
    turns.push(turn);
    turn.restore(stored);
    $("conversation").append(turn.element);
  }
  following = true;
  refresh();
  showConversations();
  follow();
}

/** Show the list of conversations in its panel, if that is open. */
function showConversations() {
  if ($("conversations").hidden) return;
  const { current, all } = conversations;
  $("conversation-actions").hidden = turns.length === 0;
  for (const each of $("conversation-actions").children) each.disabled = running !== null;
  const items = all.map(({ id, title }) => {
    const choice = button(title, "choice", () => openConversation(id));
    choice.disabled = running !== null;
    if (id === current.id) choice.setAttribute("aria-current", "true");
    return make("li", "", choice);
  });
  $("conversation-list").replaceChildren(...items);
  $("no-conversations").hidden = items.length > 0;
}

function openConversation(id) {
  conversations.open(id);
  showCurrent();
  message.focus();
}

/** Return a file name for the conversation: its title, of letters, digits and hyphens. */
function fileName(ending) {
  const words = conversations.current.title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-");
  return `${words.replace(/^-|-$/g, "") || "conversation"}.${ending}`;
}

/** Return the conversation as plain data, such as `localStorage` has it. */
const stored = () => JSON.parse(JSON.stringify({ title: conversations.current.title, turns }));

$("open-conversations").addEventListener("click", () => openConversations($("conversations").hidden));
$("close-conversations").addEventListener("click", () => openConversations(false));
$("new").addEventListener("click", () => openConversation(null));
$("export-markdown").addEventListener("click", () => saveFile(fileName("md"), asMarkdown(stored())));
$("export-json").addEventListener("click", () => saveFile(fileName("json"), asJson(stored())));
$("rename").addEventListener("click", () => {
  $("new-title").value = conversations.current.title;
  $("rename-dialog").showModal();
});
$("rename-cancel").addEventListener("click", () => $("rename-dialog").close());
$("rename-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const title = $("new-title").value.trim();
  if (title) conversations.rename(title);
  $("rename-dialog").close();
  showConversations();
});
$("delete").addEventListener("click", () => $("delete-dialog").showModal());
$("delete-cancel").addEventListener("click", () => $("delete-dialog").close());
$("delete-confirm").addEventListener("click", () => {
  conversations.remove();
  $("delete-dialog").close();
  showCurrent();
  message.focus();
});
addEventListener("pagehide", () => running && save());

async function loadModels() {
  try {
    knownModels = await models(settings.key);
  } catch (error) {
    if (error instanceof Refusal && error.status === 401) askKey(error.message, null);
    else $("model").textContent = explain(error).title;
    return;
  }
  settings.form.elements.model.replaceChildren(...modelOptions());
  if (!knownModels.some(({ id }) => id === settings.values.model)) settings.set("model", knownModels[0].id);
  settings.show();
  showModel();
  refresh();
}

/** Return an option for each model, with its state unless it is loaded. */
function modelOptions() {
  return knownModels.map(({ id, state = "loaded" }) => {
    const option = make("option", "", state === "loaded" ? id : `${id} (${state})`);
    option.value = id;
    return option;
  });
}

/** Show the name of the model, or a choice if there are several, and its context and drafter once they are known. */
function showModel() {
  const found = knownModels.find(({ id }) => id === settings.values.model);
  if (!found) return;
  const { id, max_model_len: context, drafter, error, sampling } = found;
  settings.recommend(sampling);
  const known = context ? `context ${count(context)} · ${drafter}` : "";
  let name = make("b", "", id);
  if (knownModels.length > 1) {
    name = make("select", "", ...modelOptions());
    name.setAttribute("aria-label", "Model");
    name.value = id;
    name.addEventListener("change", () => settings.set("model", name.value));
  }
  const focused = $("model").contains(document.activeElement);
  $("model").replaceChildren(name, " ", make("span", "more", error ?? known));
  if (focused) name.focus();
  document.title = `${id} · pronk`;
}

showCurrent();
apply();
loadModels();
