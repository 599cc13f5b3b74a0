// Chats with a model, with one or two settings side by side.

import { html, useEffect, useRef, useState } from "./preact.js";
import { DEFAULTS, chat, chatBody } from "./chat.js";
import { milliseconds, number, percent } from "./format.js";
import { Choice, Section } from "./parts.js";
import { Tokens } from "./tokens.js";

const FIELDS = [
  ["temperature", "Temperature", 0, 2, 0.1],
  ["top_p", "Top p", 0.01, 1, 0.01],
  ["top_k", "Top k", -1, 1000, 1],
  ["min_p", "Min p", 0, 1, 0.01],
  ["max_tokens", "Max. tokens", 1, 1_000_000, 1],
  ["seed", "Seed", 0, 2 ** 31, 1],
];
const SIDES = ["A", "B"];

export function Playground({ state, headers }) {
  const models = Object.entries(state.models ?? {}).flatMap(([name, card]) => (card.generates ? [name, ...card.loras] : []));
  const [layout, setLayout] = useState("one");
  const [settings, setSettings] = useState({ A: { ...DEFAULTS }, B: { ...DEFAULTS, temperature: "0" } });
  const [turns, setTurns] = useState({ A: [], B: [] });
  const [prompt, setPrompt] = useState("");
  const [running, setRunning] = useState(0);
  const stopping = useRef(null);
  const sides = layout === "one" ? ["A"] : SIDES;

  useEffect(() => () => stopping.current?.abort(), []);

  const send = async (event) => {
    event.preventDefault();
    if (!prompt.trim() || running) return;
    const ending = (stopping.current = new AbortController());
    setPrompt("");
    setRunning(sides.length);
    await Promise.all(sides.map((side) => ask(side, prompt, ending.signal)));
  };

  const ask = async (side, text, signal) => {
    const chosen = { ...settings[side], model: settings[side].model || models[0] || "" };
    const past = turns[side];
    const messages = past.flatMap((turn) => [{ role: "user", content: turn.prompt }, { role: "assistant", content: turn.answer.text }]);
    const body = chatBody(chosen, [...messages, { role: "user", content: text }]);
    const show = (answer) => setTurns((all) => ({ ...all, [side]: [...past, { prompt: text, answer }] }));
    show({ text: "", reasoning: "", tokens: [] });
    await chat(body, headers, signal, show);
    setRunning((count) => count - 1);
  };

  const change = (side, name, value) => setSettings((all) => ({ ...all, [side]: { ...all[side], [name]: value } }));
  const aside = html`<${Choice} label="Settings side by side" value=${layout} options=${["one", "two"]} onChange=${setLayout} />`;
  return html`<${Section} title="Playground" id="playground-title" aside=${aside}>
    <div class="sides ${layout}">
      ${sides.map((side) => html`<div class="panel side" key=${side} role="group" aria-label="Setting ${side}" data-side=${side}>
        <${Settings} side=${side} settings=${settings[side]} models=${models} onChange=${(name, value) => change(side, name, value)} />
        <div class="turns">${turns[side].map((turn, index) => html`<${Turn} key=${index} turn=${turn} busy=${running > 0 && index === turns[side].length - 1} />`)}</div>
      </div>`)}
    </div>
    <form class="panel composer" onSubmit=${send}>
      <label for="prompt" class="hidden">Message</label>
      <textarea id="prompt" rows="2" placeholder="Write a message. Enter sends it, Shift + Enter begins a new line." value=${prompt} onInput=${(event) => setPrompt(event.target.value)}
        onKeyDown=${(event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event); }}></textarea>
      <div class="buttons">
        ${running > 0 ? html`<button type="button" class="danger" onClick=${() => stopping.current.abort()}>Stop</button>` : html`<button type="submit" disabled=${!prompt.trim() || models.length === 0}>Send</button>`}
        <button type="button" class="quiet" disabled=${running > 0} onClick=${() => setTurns({ A: [], B: [] })}>Clear</button>
      </div>
    </form>
  </${Section}>`;
}

function Settings({ side, settings, models, onChange }) {
  return html`<details class="settings" open><summary>Setting ${side}</summary><div class="fields">
    <label class="wide">Model <select value=${settings.model || models[0]} onChange=${(event) => onChange("model", event.target.value)}>
      ${models.map((name) => html`<option value=${name} selected=${name === (settings.model || models[0])}>${name}</option>`)}
    </select></label>
    ${FIELDS.map(([name, title, min, max, step]) => html`<label>${title}
      <input type="number" name=${name} min=${min} max=${max} step=${step} value=${settings[name]} placeholder="none" onInput=${(event) => onChange(name, event.target.value)} /></label>`)}
    <label class="wide">System prompt <textarea rows="1" value=${settings.system} onInput=${(event) => onChange("system", event.target.value)}></textarea></label>
    <label class="check"><input type="checkbox" checked=${settings.logprobs} onChange=${(event) => onChange("logprobs", event.target.checked)} /> Log-probabilities by token</label>
  </div></details>`;
}

function Turn({ turn, busy }) {
  const { prompt, answer } = turn;
  const rate = answer.usage && answer.seconds > answer.ttft ? (answer.usage.completion_tokens - 1) / (answer.seconds - answer.ttft) : undefined;
  return html`<article class="turn">
    <p class="asked">${prompt}</p>
    ${answer.reasoning && html`<details class="reasoning"><summary>Reasoning</summary><p>${answer.reasoning}</p></details>`}
    ${answer.tokens.length > 0 ? html`<${Tokens} tokens=${answer.tokens} text=${answer.text} />` : html`<p class="answered">${answer.text}</p>`}
    ${answer.error && html`<p class="trouble" role="alert">${answer.error}</p>`}
    <p class="facts faint" role="status">
      ${busy && !answer.finish && !answer.error && html`<span>writing …</span>`}
      ${answer.finish && html`<span>finish: ${answer.finish}</span>`}
      ${answer.usage && html`<span>${number(answer.usage.completion_tokens)} tokens</span>`}
      ${answer.ttft !== undefined && html`<span>first after ${milliseconds(1000 * answer.ttft)}</span>`}
      ${rate !== undefined && html`<span>${number(rate)} tokens/s</span>`}
      ${answer.tokens.length > 0 && html`<span>mean probability ${percent(meanProbability(answer.tokens))}</span>`}
    </p>
  </article>`;
}

function meanProbability(tokens) {
  return Math.exp(tokens.reduce((sum, { logprob }) => sum + logprob, 0) / tokens.length);
}
