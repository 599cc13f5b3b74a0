// Server-sent events over fetch, which unlike EventSource can send a key; and JSON merge patches (RFC 7386).

const RETRY_MS = 1500;
const SILENCE_MS = 8000;

/** The events of a response's body, as {event, data}, until it ends. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const event = { event: "message", data: "" };
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) event.event = line.slice(7);
          else if (line.startsWith("data: ")) event.data += line.slice(6);
        }
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** `document` with `patch` applied; objects that do not change stay the same objects. */
export function patched(document, patch) {
  const result = { ...document };
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete result[name];
    else if (isObject(value)) result[name] = patched(isObject(result[name]) ? result[name] : {}, value);
    else result[name] = value;
  }
  return result;
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** What a response that is no success says, for people. */
export async function refusal(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `${response.status} ${response.statusText}`;
}

/** Follows the document of `/console/events`; `onDocument(document)` gets each state of it. */
export function followDocument(headers, signal, onDocument, onTrouble) {
  let document = {};
  const take = (event, data) => onDocument((document = event === "snapshot" ? data : patched(document, data)));
  return follow("console/events", headers, signal, take, onTrouble);
}

/**
 * Follows a stream of this server until `signal` aborts, and connects again where it ends or falls silent.
 * `onEvent(event, data)` gets each event; `onTrouble({status, text})` whatever is in the way, null where it is gone.
 */
export async function follow(path, headers, signal, onEvent, onTrouble) {
  while (!signal.aborted) {
    const attempt = new AbortController();
    const stop = () => attempt.abort();
    signal.addEventListener("abort", stop);
    let silence = setTimeout(stop, SILENCE_MS);
    try {
      const response = await fetch(path, { headers, signal: attempt.signal, cache: "no-store" });
      if (!response.ok) {
        onTrouble({ status: response.status, text: await refusal(response) });
        if (response.status === 401 || response.status === 403) return;
      } else {
        for await (const { event, data } of events(response)) {
          clearTimeout(silence);
          silence = setTimeout(stop, SILENCE_MS);
          onTrouble(null);
          onEvent(event, JSON.parse(data));
        }
        onTrouble({ status: 0, text: "The stream ended. Connecting again …" });
      }
    } catch {
      if (!signal.aborted) onTrouble({ status: 0, text: "The gateway does not answer. Trying again …" });
    } finally {
      clearTimeout(silence);
      signal.removeEventListener("abort", stop);
    }
    if (!signal.aborted) await new Promise((done) => setTimeout(done, RETRY_MS));
  }
}
