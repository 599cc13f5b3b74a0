// Chats with a model, with one or two settings side by side.

import { html, useEffect, useRef, useState } from "./preact.js";
import { DEFAULTS, EMPTY, chat, chatBody, messagesOf, readPictures } from "./chat.js";
import { milliseconds, number, percent } from "./format.js";
import { Microphone } from "./microphone.js";
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
const PICTURES = "image/png,image/jpeg,image/webp,image/gif";
const VIDEOS = "video/mp4,video/webm";

export function Playground({ state, headers }) {
  const models = Object.entries(state.models ?? {}).flatMap(([name, card]) => (card.generates ? [name, ...card.loras] : []));
  const takes = (kind) => Object.values(state.models ?? {}).some((card) => card[kind]);
  const hearing = Object.entries(state.models ?? {}).find(([, card]) => card.hears)?.[0];
  const [layout, setLayout] = useState("one");
  const [settings, setSettings] = useState({ A: { ...DEFAULTS }, B: { ...DEFAULTS, temperature: "0" } });
  const [turns, setTurns] = useState({ A: [], B: [] });
  const [prompt, setPrompt] = useState("");
  const [pictures, setPictures] = useState([]);
  const [trouble, setTrouble] = useState("");
  const [running, setRunning] = useState(0);
  const stopping = useRef(null);
  const sides = layout === "one" ? ["A"] : SIDES;

  useEffect(() => () => stopping.current?.abort(), []);

  const send = async (event) => {
    event.preventDefault();
    if ((!prompt.trim() && pictures.length === 0) || running) return;
    const ending = (stopping.current = new AbortController());
    setPrompt("");
    setPictures([]);
    setRunning(sides.length);
    await Promise.all(sides.map((side) => ask(side, { prompt, pictures }, ending.signal)));
  };

  const choose = async ({ target }) => {
    const chosen = await readPictures(target.files);
    target.value = "";
    setPictures((all) => [...all, ...chosen]);
  };

  const heard = (text) => {
    setTrouble("");
    setPrompt((before) => (before.trim() ? `${before.trimEnd()} ${text}` : text));
  };

  /** Asks with a new turn: {prompt, pictures}, or {results} of the calls of the last answer. */
  const ask = async (side, turn, signal) => {
    const chosen = { ...settings[side], model: settings[side].model || models[0] || "" };
    const past = turns[side];
    const show = (answer) => setTurns((all) => ({ ...all, [side]: [...past, { ...turn, answer }] }));
    show(EMPTY);
    try {
      await chat(chatBody(chosen, messagesOf([...past, turn])), headers, signal, show);
    } catch (error) {
      show({ ...EMPTY, error: error.message });
    }
    setRunning((count) => count - 1);
  };

  const answerCalls = (side, results) => {
    const ending = (stopping.current = new AbortController());
    setRunning(1);
    ask(side, { results }, ending.signal);
  };

  const change = (side, name, value) => setSettings((all) => ({ ...all, [side]: { ...all[side], [name]: value } }));
  const aside = html`<${Choice} label="Settings side by side" value=${layout} options=${["one", "two"]} onChange=${setLayout} />`;
  return html`<${Section} title="Playground" id="playground-title" aside=${aside}>
    <div class="sides ${layout}">
      ${sides.map((side) => html`<div class="panel side" key=${side} role="group" aria-label="Setting ${side}" data-side=${side}>
        <${Settings} side=${side} settings=${settings[side]} models=${models} onChange=${(name, value) => change(side, name, value)} />
        <div class="turns">${turns[side].map((turn, index) => html`<${Turn} key=${index} turn=${turn} busy=${running > 0 && index === turns[side].length - 1}
          onResults=${running === 0 && index === turns[side].length - 1 ? (results) => answerCalls(side, results) : null} />`)}</div>
      </div>`)}
    </div>
    <form class="panel composer" onSubmit=${send}>
      <label for="prompt" class="hidden">Message</label>
      ${pictures.length > 0 && html`<div class="pictures"><${Pictures} pictures=${pictures} />
        <button type="button" class="quiet" onClick=${() => setPictures([])}>Without</button></div>`}
      <textarea id="prompt" rows="2" placeholder="Write a message. Enter sends it, Shift + Enter begins a new line." value=${prompt} onInput=${(event) => setPrompt(event.target.value)}
        onKeyDown=${(event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event); }}></textarea>
      ${trouble && html`<p class="trouble" role="alert">${trouble}</p>`}
      <div class="buttons">
        ${takes("images") && html`<label class="choose">${takes("videos") ? "Pictures, videos" : "Pictures"} <input type="file" name="pictures" accept=${takes("videos") ? `${PICTURES},${VIDEOS}` : PICTURES} multiple onChange=${choose} /></label>`}
        ${hearing && html`<${Microphone} model=${hearing} headers=${headers} onText=${heard} onTrouble=${setTrouble} />`}
        ${running > 0 ? html`<button type="button" class="danger" onClick=${() => stopping.current.abort()}>Stop</button>` : html`<button type="submit" disabled=${(!prompt.trim() && pictures.length === 0) || models.length === 0}>Send</button>`}
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
  </div>
  <details class="more-settings"><summary>Tools and structured output</summary><div class="fields">
    <label class="whole">Tools, a JSON list <textarea name="tools" rows="3" spellcheck="false" value=${settings.tools} placeholder=${TOOLS} onInput=${(event) => onChange("tools", event.target.value)}></textarea></label>
    <label>Choice <select name="toolChoice" value=${settings.toolChoice} onChange=${(event) => onChange("toolChoice", event.target.value)}>
      ${["auto", "required", "none"].map((name) => html`<option value=${name} selected=${name === settings.toolChoice}>${name}</option>`)}
    </select></label>
    <label class="whole">Schema of the answer, a JSON schema <textarea name="schema" rows="3" spellcheck="false" value=${settings.schema} placeholder=${SCHEMA} onInput=${(event) => onChange("schema", event.target.value)}></textarea></label>
  </div></details></details>`;
}

const TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]';
const SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}';

/** The calls that an answer asks for; with `onResults` fields for what they gave. */
function Calls({ calls, onResults }) {
  const submit = (event) => {
    event.preventDefault();
    const given = new FormData(event.target);
    onResults(calls.map(({ id }, index) => ({ id, content: given.get(`result-${index}`) })));
  };
  return html`<form class="calls" onSubmit=${submit}>
    ${calls.map((call, index) => html`<div class="call" data-call=${call.name}>
      <p><span class="faint">calls</span> <code>${call.name}(${call.arguments})</code></p>
      ${onResults && html`<label>Result of ${call.name} <input name="result-${index}" required autocomplete="off" /></label>`}
    </div>`)}
    ${onResults && html`<button type="submit" class="quiet">Send ${calls.length === 1 ? "the result" : "the results"}</button>`}
  </form>`;
}

function Pictures({ pictures }) {
  return pictures.map(({ name, url }) => (url.startsWith("data:video/") ? html`<span class="video">${name}</span>` : html`<img src=${url} alt=${name} title=${name} />`));
}

function Turn({ turn, busy, onResults }) {
  const { prompt, pictures = [], results, answer } = turn;
  const rate = answer.usage && answer.seconds > answer.ttft ? (answer.usage.completion_tokens - 1) / (answer.seconds - answer.ttft) : undefined;
  return html`<article class="turn">
    ${results ? results.map(({ content }) => html`<p class="asked"><span class="faint">result</span> <code>${content}</code></p>`) : html`<p class="asked">${pictures.length > 0 && html`<span class="pictures"><${Pictures} pictures=${pictures} /></span>`}${prompt}</p>`}
    ${answer.reasoning && html`<details class="reasoning"><summary>Reasoning</summary><p>${answer.reasoning}</p></details>`}
    ${answer.tokens.length > 0 ? html`<${Tokens} tokens=${answer.tokens} text=${answer.text} />` : html`<p class="answered">${answer.text}</p>`}
    ${answer.calls.length > 0 && html`<${Calls} calls=${answer.calls} onResults=${answer.finish ? onResults : null} />`}
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
