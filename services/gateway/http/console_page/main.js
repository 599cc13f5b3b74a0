// The page: follows the stream, keeps a short history for lines, and shows one view at a time by the address's hash.

import { html, render, useEffect, useState } from "./preact.js";
import { Act } from "./act.js";
import { Engines } from "./engines.js";
import { clock, number } from "./format.js";
import { Latency } from "./latency.js";
import { Playground } from "./playground.js";
import { followDocument } from "./stream.js";
import { Requests } from "./requests.js";
import { Topology } from "./topology.js";

const VIEWS = {
  topology: ["Topology", Topology],
  engines: ["Engines", Engines],
  requests: ["Requests", Requests],
  latency: ["Latency", Latency],
  act: ["Act", Act],
  playground: ["Playground", Playground],
};
const HISTORY = 120;
const MAX_EVENTS = 200;
const SAME_EVENT_SECONDS = 0.5;
const KEY = "baton.console.key";

function Console() {
  const [key, setKey] = useState(sessionStorage.getItem(KEY) ?? "");
  const [state, setState] = useState(null);
  const [history, setHistory] = useState({});
  const [began, setBegan] = useState(null);
  const [events, setEvents] = useState([]);
  const [trouble, setTrouble] = useState(null);
  const [view, setView] = useState(currentView());

  useEffect(() => {
    const changed = () => setView(currentView());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);

  useEffect(() => {
    const ending = new AbortController();
    let lost = false;
    const take = (document) => {
      setState(document);
      setEvents((known) => remembered(known, document.events ?? []));
      setHistory((known) => extended(known, document));
      setBegan((known) => known ?? { models: document.latency, keys: document.latency_by_key, pools: document.pools });
    };
    const troubled = (trouble) => {
      setTrouble(trouble);
      if (trouble && !lost) setEvents((known) => remembered(known, [{ at: Date.now() / 1000, instance: "this page", what: "lost its gateway" }]));
      lost = trouble !== null;
    };
    followDocument(authorization(key), ending.signal, take, troubled);
    return () => ending.abort();
  }, [key]);

  const useKey = (given) => {
    sessionStorage.setItem(KEY, given);
    setTrouble(null);
    setKey(given);
  };
  const [, View] = VIEWS[view];
  return html`
    <a class="skip" href="#main" onClick=${toMain}>To the content</a>
    <${Head} state=${state} trouble=${trouble} view=${view} />
    <main id="main" tabindex="-1">
      ${trouble && trouble.status === 401 && html`<${KeyForm} text=${trouble.text} sent=${key !== ""} onKey=${useKey} />`}
      ${trouble && trouble.status !== 401 && html`<p class="trouble" role="alert">${trouble.text}${state && ` What is shown is as of ${clock(state.time)}.`}</p>`}
      ${!state && !trouble && html`<p class="note" role="status">Listening to the stack …</p>`}
      ${state && !(trouble && [401, 403].includes(trouble.status)) && html`<div class=${trouble ? "stale" : ""}>
        <${View} state=${state} events=${events} history=${history} began=${began} headers=${authorization(key)} />
      </div>`}
    </main>
  `;
}

function Head({ state, trouble, view }) {
  const totals = state?.totals ?? {};
  const live = state && !trouble;
  const engines = Object.keys(state?.engines ?? {}).length;
  return html`<header class="top">
    <div class="brand"><img src="console/icon.svg" alt="" width="26" height="26" /><h1>Baton</h1>
      <span class="phase ${live ? "good" : "bad"}"><span class="dot" aria-hidden="true"></span>${live ? "live" : trouble ? "not connected" : "connecting"}</span>
    </div>
    <nav aria-label="Views">
      ${Object.entries(VIEWS).map(([name, [title]]) => html`<a href="#${name}" aria-current=${name === view ? "page" : undefined}>${title}</a>`)}
    </nav>
    ${state &&
    html`<p class="totals ${live ? "" : "stale"}">
      <span><b>${number(totals.tokens_per_second)}</b> tokens/s</span>
      <span><b>${number(totals.running)}</b> running</span>
      <span><b>${number(totals.waiting)}</b> waiting</span>
      <span><b>${number(engines)}</b> ${engines === 1 ? "engine" : "engines"}</span>
    </p>`}
    ${state?.not_serving && html`<p class="trouble" role="alert">Requests are refused: ${state.not_serving}.</p>`}
  </header>`;
}

function KeyForm({ text, sent, onKey }) {
  const submit = (event) => {
    event.preventDefault();
    onKey(new FormData(event.target).get("key").trim());
  };
  return html`<form class="panel key-form" onSubmit=${submit}>
    <h2>An operator's key</h2>
    <p>${sent ? text : "This server has API keys. The console needs one with the scope admin; it is kept in this tab only."}</p>
    <label>API key <input name="key" type="password" autocomplete="off" required /></label>
    <button type="submit">Open the console</button>
  </form>`;
}

function currentView() {
  const name = location.hash.slice(1);
  return name in VIEWS ? name : "topology";
}

function toMain(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

function authorization(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** The figures of each engine in the last minutes, a point for each state. */
function extended(history, state) {
  const next = {};
  for (const [name, engine] of Object.entries(state.engines ?? {})) {
    const { tokens_per_second, running, kv_share } = engine;
    next[name] = [...(history[name] ?? []), { tokens_per_second, running, kv_share }].slice(-HISTORY);
  }
  return next;
}

/** What happened, in the order of time. A gateway's list begins when it is looked at; this page outlives gateways, and goes on with the next one's. */
function remembered(known, events) {
  const same = (one, other) => one.instance === other.instance && one.what === other.what && Math.abs(one.at - other.at) < SAME_EVENT_SECONDS;
  const fresh = events.filter((event) => !known.some((one) => same(one, event)));
  return fresh.length === 0 ? known : [...known, ...fresh].sort((one, other) => one.at - other.at).slice(-MAX_EVENTS);
}

const place = document.getElementById("console");
place.replaceChildren();
render(html`<${Console} />`, place);
