// Requests to the server, its stream of events, and messages for errors.

/** An error response of the server, or an error event in a stream (status 0). */
export class Refusal extends Error {
  constructor(status, { message, code, param } = {}) {
    super(message || `the server answered with status ${status}`);
    Object.assign(this, { status, code, param });
  }
}

/** The connection failed, or ended before the end of the answer. */
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
    throw new Broken("The server does not answer. Check that the server runs and that the network works.");
  }
  if (response.ok) return response;
  const refusal = await response.json().catch(() => null);
  throw new Refusal(response.status, refusal?.error);
}

/** Return the server's models. */
export async function models(key) {
  return (await (await request("v1/models", { key })).json()).data;
}

/** Yield the chunks of an answer, each with the time of its arrival in milliseconds. */
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
  cache_too_small: "Shorten the message, or request fewer tokens.",
  drafter_not_allowed: "Choose another drafter in the settings.",
  overloaded: "The server is busy; try again in a moment.",
  too_many_connections: "The server is busy; try again in a moment.",
  timeout: "The answer took longer than the server allows; request fewer tokens.",
  draining: "The server is shutting down.",
  unsupported_by_tokenizer: "This model does not support conversations.",
  invalid_api_key: "Enter an API key in the settings.",
};

/** Return a title, a detail and an advice for an error. */
export function explain(error) {
  if (error instanceof Broken) return { title: error.message, detail: "", advice: "Try again." };
  if (error instanceof Refusal) {
    const title = error.status === 0 ? "The server failed during the answer." : "The server refused the request.";
    const where = { drafter: "Choose another drafter in the settings." }[error.param];
    return { title, detail: error.message, advice: ADVICE[error.code] ?? where ?? "" };
  }
  return { title: "The page could not read the answer.", detail: String(error?.message ?? error), advice: "" };
}
