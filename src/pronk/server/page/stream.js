// Asks the server, reads its stream of events, and says in plain words what went wrong.

/** What the server refuses, or says of a failure in the midst of an answer. */
export class Refusal extends Error {
  constructor(status, { message, code, param } = {}) {
    super(message || `the server answered with status ${status}`);
    Object.assign(this, { status, code, param });
  }
}

/** The connection failed, or ended before the answer did. */
export class Broken extends Error {}

async function request(path, { key, body, signal }) {
  const headers = { ...(key && { Authorization: `Bearer ${key}` }), ...(body && { "Content-Type": "application/json" }) };
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Broken("The server does not answer. Is it still running, and is the network there?");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Refusal(response.status, said?.error);
}

/** The models that there are. */
export async function models(key) {
  return (await (await request("v1/models", { key })).json()).data;
}

/** The chunks of an answer as they come, each with the time at which it came. */
export async function* chat(body, key, signal) {
  const response = await request("v1/chat/completions", { key, body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (signal.aborted) throw error;
      throw new Broken("The connection broke before the answer was complete.");
    });
    if (done) throw new Broken("The connection ended before the answer was complete.");
    const now = performance.now();
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refusal(0, chunk.error);
      yield [chunk, now];
    }
  }
}

const ADVICE = {
  context_length_exceeded: "Shorten the message, or clear the conversation.",
  body_too_large: "Shorten the message, or clear the conversation.",
  cache_too_small: "Shorten the message, or ask for fewer tokens.",
  drafter_not_allowed: "Choose another drafter in the settings.",
  overloaded: "Others are being answered; try again in a moment.",
  too_many_connections: "Others are being answered; try again in a moment.",
  timeout: "The answer took longer than the server allows; ask for fewer tokens.",
  draining: "The server is being stopped.",
  unsupported_by_tokenizer: "This model was not made for conversations.",
  invalid_api_key: "Give a key in the settings.",
};

/** What to tell a person of an error: what happened, and what to do. */
export function explain(error) {
  if (error instanceof Broken) return { title: error.message, detail: "", advice: "Try again." };
  if (error instanceof Refusal) {
    const title = error.status === 0 ? "The server failed while it answered." : "The server refused the request.";
    const where = { drafter: "Choose another drafter in the settings." }[error.param];
    return { title, detail: error.message, advice: ADVICE[error.code] ?? where ?? "" };
  }
  return { title: "The page could not read the answer.", detail: String(error?.message ?? error), advice: "" };
}
