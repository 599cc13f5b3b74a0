// One streamed chat: what is asked, and what of the answer has come.

import { events, refusal } from "./stream.js";

export const DEFAULTS = {
  model: "", temperature: "0.7", top_p: "1", top_k: "0", min_p: "0", max_tokens: "256", seed: "", logprobs: true, system: "",
  tools: "", toolChoice: "auto", schema: "",
};

export const EMPTY = { text: "", reasoning: "", calls: [], tokens: [] };

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

/** A field's JSON; undefined where it is empty. Raises an Error that names the field, and says what is wrong. */
export function parsed(title, text, isRight, wanted) {
  if (!text.trim()) return undefined;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`${title}: no JSON: ${error.message}`);
  }
  if (!isRight(value)) throw new Error(`${title}: ${wanted}`);
  return value;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** Files that were chosen, as {name, url} with data URIs. */
export function readPictures(files) {
  return Promise.all([...files].map((file) => new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name, url: reader.result });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  })));
}

/** A question as the API takes it: its text, with its pictures in front where it has any. */
function contentOf(prompt, pictures = []) {
  if (pictures.length === 0) return prompt;
  const media = pictures.map(({ url }) => (url.startsWith("data:video/") ? { type: "video_url", video_url: { url } } : { type: "image_url", image_url: { url } }));
  return prompt.trim() ? [...media, { type: "text", text: prompt }] : media;
}

/** The messages of a chat so far: what was asked, or the results of calls, and what was answered. */
export function messagesOf(turns) {
  return turns.flatMap(({ prompt, pictures, results, answer }) => [
    ...(results ? results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content })) : [{ role: "user", content: contentOf(prompt, pictures) }]),
    ...(answer ? [{ role: "assistant", content: answer.text, ...(answer.calls.length ? { tool_calls: answer.calls.map(callOf) } : {}) }] : []),
  ]);
}

function callOf({ id, name, arguments: text }) {
  return { id, type: "function", function: { name, arguments: text } };
}

/** The request's body; fields that are left empty are left out. Raises an Error for what is no JSON. */
export function chatBody(settings, messages) {
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const body = { model: settings.model, messages: [...system, ...messages], stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if (settings[name] !== "") body[name] = Number(settings[name]);
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  const tools = parsed("Tools", settings.tools, Array.isArray, "a list of tools, as the API takes them");
  if (tools) Object.assign(body, { tools, tool_choice: settings.toolChoice });
  const schema = parsed("Schema of the answer", settings.schema, isObject, "an object, a JSON schema");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return body;
}

/** `calls` with what a chunk adds to them. */
function withCalls(calls, parts) {
  const all = [...calls];
  for (const { index, id, function: part } of parts) {
    const call = all[index] ?? { id: "", name: "", arguments: "" };
    all[index] = { id: id ?? call.id, name: call.name + (part?.name ?? ""), arguments: call.arguments + (part?.arguments ?? "") };
  }
  return all;
}

/**
 * Asks, and calls `onChange(answer)` with each new state: {text, reasoning, calls, tokens, finish, usage, error, ttft, seconds}.
 * `calls` are the tools' that it asks for: {id, name, arguments}.
 * `tokens` are those with log-probabilities: {token, logprob, top}.
 */
export async function chat(body, headers, signal, onChange) {
  const began = performance.now();
  const seconds = () => (performance.now() - began) / 1000;
  let answer = EMPTY;
  const change = (fields) => onChange((answer = { ...answer, ...fields, seconds: seconds() }));
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: { "content-type": "application/json", ...headers }, body: JSON.stringify(body), signal,
    });
    if (!response.ok) return change({ error: await refusal(response) });
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) return change({ error: chunk.error.message });
      if (chunk.usage) change({ usage: chunk.usage });
      const choice = chunk.choices[0];
      if (!choice) continue;
      const text = choice.delta.content ?? "";
      const reasoning = choice.delta.reasoning_content ?? choice.delta.reasoning ?? "";
      const calls = choice.delta.tool_calls ?? [];
      const tokens = (choice.logprobs?.content ?? []).map(({ token, logprob, top_logprobs }) => ({ token, logprob, top: top_logprobs }));
      change({
        text: answer.text + text,
        reasoning: answer.reasoning + reasoning,
        calls: withCalls(answer.calls, calls),
        tokens: [...answer.tokens, ...tokens],
        finish: choice.finish_reason ?? answer.finish,
        ttft: answer.ttft ?? seconds(), // the first event comes with the first token, whether or not that makes a text
      });
    }
    if (!answer.finish) change({ error: "The stream ended early." });
  } catch (error) {
    change(error.name === "AbortError" ? { finish: "stopped by you" } : { error: "The gateway does not answer." });
  }
}
