// One streamed chat: what is asked, and what of the answer has come.

import { events, refusal } from "./stream.js";

export const DEFAULTS = {
  model: "", temperature: "0.7", top_p: "1", top_k: "0", min_p: "0", max_tokens: "256", seed: "", logprobs: true, system: "",
};

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

/** The request's body; fields that are left empty are left out. */
export function chatBody(settings, messages) {
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const body = { model: settings.model, messages: [...system, ...messages], stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if (settings[name] !== "") body[name] = Number(settings[name]);
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

/**
 * Asks, and calls `onChange(answer)` with each new state: {text, reasoning, tokens, finish, usage, error, ttft, seconds}.
 * `tokens` are those with log-probabilities: {token, logprob, top}.
 */
export async function chat(body, headers, signal, onChange) {
  const began = performance.now();
  const seconds = () => (performance.now() - began) / 1000;
  let answer = { text: "", reasoning: "", tokens: [] };
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
      const tokens = (choice.logprobs?.content ?? []).map(({ token, logprob, top_logprobs }) => ({ token, logprob, top: top_logprobs }));
      change({
        text: answer.text + text,
        reasoning: answer.reasoning + reasoning,
        tokens: [...answer.tokens, ...tokens],
        finish: choice.finish_reason ?? answer.finish,
        ttft: answer.ttft ?? (text || reasoning || tokens.length ? seconds() : undefined),
      });
    }
    if (!answer.finish) change({ error: "The stream ended early." });
  } catch (error) {
    change(error.name === "AbortError" ? { finish: "stopped by you" } : { error: "The gateway does not answer." });
  }
}
