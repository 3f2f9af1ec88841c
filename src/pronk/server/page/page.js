// The page: a conversation, what it is asked with, and where it is scrolled to.

import { Candidates } from "./candidates.js";
import { count, make } from "./dom.js";
import { Settings } from "./settings.js";
import { Refusal, explain, models } from "./stream.js";
import { Turn } from "./turn.js";

const $ = (id) => document.getElementById(id);
const settings = new Settings($("options"));
const candidates = new Candidates($("candidates"));
const message = $("message");
let turns = [];
let running = null; // what stops the answer that is being written
let known = []; // models
let after = null; // what to do once there is a key

const page = {
  before(turn) {
    const system = settings.values.system.trim();
    const earlier = turns.slice(0, turns.indexOf(turn)).flatMap(({ messages }) => messages);
    return [...(system ? [{ role: "system", content: system.toWellFormed() }] : []), ...earlier];
  },
  key: () => settings.key,
  drafter: () => known.find(({ id }) => id === settings.values.model)?.drafter,
  running: () => running !== null,
  busy(control) {
    running = control;
    document.body.classList.toggle("busy", running !== null);
    $("send").hidden = running !== null;
    $("stop").hidden = running === null;
    if (running) say("Answering.");
    refresh();
  },
  attach(answer) {
    const { onflush } = answer;
    answer.onflush = () => {
      onflush();
      page.drawn();
    };
    candidates.attach(answer);
  },
  drawn: follow,
  say,
  askKey,
  again(turn, reseed) {
    if (running) return;
    if (reseed) settings.newSeed();
    for (const later of turns.splice(turns.indexOf(turn) + 1)) later.element.remove();
    ask(turn);
  },
};

function send() {
  const text = message.value;
  if (running || !text.trim()) return;
  const turn = new Turn(text, page);
  if (!ask(turn)) return;
  message.value = "";
  fit();
}

/** Ask for the answer of a turn, a new one or one again; says whether the settings allow it. */
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
  $("clear").disabled = turns.length === 0 || running !== null;
  $("send").disabled = !message.value.trim();
  const { temperature, seed } = settings.values;
  const drafter = settings.drafter || page.drafter();
  $("summary").textContent = [drafter, `temperature ${temperature}`, `seed ${seed}`].filter(Boolean).join(" · ");
}

function say(text) {
  $("status").textContent = text;
}

// Where it is scrolled to: at the end as long as nobody scrolls up.

let following = true;

const distance = () => document.documentElement.scrollHeight - innerHeight - scrollY;

function follow() {
  if (following) scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
  $("latest").hidden = following || distance() < 80;
}

let seen = 0;
let lifted = -Infinity; // when somebody last turned the wheel upward
addEventListener(
  "wheel",
  ({ deltaY, timeStamp }) => {
    if (deltaY >= 0 || scrollY === 0) return;
    following = false;
    lifted = timeStamp;
  },
  { passive: true },
);
addEventListener(
  "scroll",
  ({ timeStamp }) => {
    // A page that becomes shorter scrolls up by itself, and is at its end then.
    if (distance() < 2) following ||= timeStamp - lifted > 200;
    else if (scrollY < seen) following = false;
    else if (distance() < 40) following = true;
    seen = scrollY;
    $("latest").hidden = following || distance() < 80;
  },
  { passive: true },
);
$("latest").addEventListener("click", () => {
  following = true;
  follow();
});

// The message.

function fit() {
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight}px`;
  refresh();
}

message.addEventListener("input", fit);
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
});

// Settings, colours, marks.

function openSettings(open) {
  $("settings").hidden = !open;
  $("open-settings").setAttribute("aria-expanded", open);
  document.body.classList.toggle("with-settings", open);
  candidates.hide();
  if (open) settings.form.elements.drafter.focus();
  else $("open-settings").focus();
}

$("open-settings").addEventListener("click", () => openSettings($("settings").hidden));
$("summary").addEventListener("click", () => openSettings($("settings").hidden));
$("close-settings").addEventListener("click", () => openSettings(false));
$("new-seed").addEventListener("click", () => settings.newSeed());
$("set-key").addEventListener("click", () => askKey("Requests are made with it.", loadModels));

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
  $("marks").setAttribute("aria-pressed", marks);
  refresh();
}

settings.onchange = apply;

// The key.

function askKey(why, then) {
  after = then;
  $("key-why").textContent = why;
  $("key").value = "";
  $("key-dialog").showModal();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  settings.key = $("key").value.trim();
  $("key-dialog").close();
  if (known.length === 0) loadModels();
  after?.();
});
$("key-cancel").addEventListener("click", () => $("key-dialog").close());

// Clearing.

$("clear").addEventListener("click", () => $("clear-dialog").showModal());
$("clear-cancel").addEventListener("click", () => $("clear-dialog").close());
$("clear-confirm").addEventListener("click", () => {
  for (const turn of turns) turn.element.remove();
  turns = [];
  candidates.hide();
  $("clear-dialog").close();
  refresh();
  message.focus();
});

async function loadModels() {
  try {
    known = await models(settings.key);
  } catch (error) {
    if (error instanceof Refusal && error.status === 401) askKey(error.message, null);
    else $("model").textContent = explain(error).title;
    return;
  }
  const { model } = settings.form.elements;
  model.replaceChildren(...known.map(({ id }) => make("option", "", id)));
  if (!known.some(({ id }) => id === settings.values.model)) settings.set("model", known[0].id);
  settings.show();
  showModel();
  refresh();
}

function showModel() {
  const found = known.find(({ id }) => id === settings.values.model);
  if (!found) return;
  const { id, max_model_len: context, drafter } = found;
  const more = make("span", "more", `context ${count(context)} · ${drafter}`);
  $("model").replaceChildren(make("b", "", id), " ", more);
  document.title = `${id} · pronk`;
}

apply();
loadModels();
