// What operators do, through the same operations as `baton drain`, `undrain` and `scale`, and `/abort_requests`.

import { html, useState } from "./preact.js";
import { duration, number } from "./format.js";
import { Empty, Phase, Section } from "./parts.js";
import { refusal } from "./stream.js";

const SCALABLE = ["engines", "prefill", "decode", "tokenizer", "encoder", "detokenizer", "coordinator", "gateway"];
const OF_A_MODEL = ["engines", "prefill", "decode", "tokenizer", "encoder"];
const DRAINABLE = ["gateway", "tokenizer", "coordinator", "scheduler", "detokenizer"];

export function Act({ state, headers }) {
  const [said, setSaid] = useState(null);
  const [busy, setBusy] = useState("");

  /** Asks the gateway; says what came of it. `again`: what to offer where it is refused as a conflict. */
  const ask = async (name, path, body, sentence, again) => {
    setBusy(name);
    try {
      const response = await fetch(path, {
        method: "POST",
        headers: { "content-type": "application/json", ...headers },
        body: JSON.stringify(body),
      });
      if (response.ok) setSaid({ good: true, text: sentence(await response.json()) });
      else setSaid({ good: false, text: await refusal(response), again: response.status === 409 ? again : undefined });
    } catch {
      setSaid({ good: false, text: "The gateway does not answer." });
    } finally {
      setBusy("");
    }
  };

  const drain = (instance, force = false) =>
    ask(instance, "admin/drain", { instance, force }, (answer) => `${instance} drains: it finishes ${answer.load} and takes no more.`, {
      label: `Drain ${instance} anyway`,
      run: () => drain(instance, true),
    });
  const undrain = (instance) => ask(instance, "admin/undrain", { instance }, () => `${instance} takes requests again.`);
  const cancel = (id) => ask(id, "abort_requests", { request_ids: [id] }, (answer) => (answer.aborted ? `${id} is cancelled.` : `${id} had ended.`));
  const scale = (service, count, model, host) =>
    ask("scale", "admin/scale", { service, count, model, host }, ({ started, stopping }) => {
      const parts = [started.length && `starting ${started.join(", ")}`, stopping.length && `draining and stopping ${stopping.join(", ")}`];
      return `${service} = ${count}${model ? ` of ${model}` : ""}${host ? ` on ${host}` : ""}: ${parts.filter(Boolean).join("; ") || "nothing to change"}.`;
    });

  const strike = (instance, fault, seconds) =>
    ask("strike", "admin/strike", { instance, fault, seconds }, ({ pid }) =>
      fault === "kill" ? `${instance}, process ${pid}, was killed.` : `${instance}, process ${pid}, stands still for ${duration(seconds)}.`);

  return html`
    <div class="outcome" role="status" aria-live="polite">
      ${said && html`<p class="said ${said.good ? "good" : "bad"}">${said.text} ${said.again && html`<button class="danger" onClick=${said.again.run}>${said.again.label}</button>`}</p>`}
    </div>
    <${Section} title="Instances" id="act-instances"><${Instances} state=${state} busy=${busy} onDrain=${drain} onUndrain=${undrain} /></${Section}>
    <${Section} title="Scale" id="act-scale"><${Scale} state=${state} busy=${busy === "scale"} onScale=${scale} /></${Section}>
    <${Section} title="Break something" id="act-strike"><${Strike} state=${state} busy=${busy === "strike"} onStrike=${strike} /></${Section}>
    <${Section} title="Cancel a request" id="act-cancel"><${Requests} state=${state} busy=${busy} onCancel=${cancel} /></${Section}>
  `;
}

function Instances({ state, busy, onDrain, onUndrain }) {
  const shown = Object.entries(state.instances ?? {})
    .filter(([, each]) => DRAINABLE.includes(each.service) && each.phase !== "gone")
    .sort(([, one], [, other]) => DRAINABLE.indexOf(one.service) - DRAINABLE.indexOf(other.service));
  return html`<p class="note">A drained instance finishes what it has, and takes nothing new until it is undrained.</p>
    <div class="scroll" tabindex="0" role="region" aria-labelledby="act-instances"><table>
      <thead><tr><th scope="col">Instance</th><th scope="col">Phase</th><th scope="col" class="right">In hand</th><th scope="col"><span class="hidden">Action</span></th></tr></thead>
      <tbody>${shown.map(([name, each]) => html`<tr key=${name}>
        <th scope="row">${name} <small>${each.host}</small></th>
        <td><${Phase} phase=${each.phase} /></td>
        <td class="right">${number(each.load)}</td>
        <td class="right">${["draining", "standby"].includes(each.phase)
          ? html`<button disabled=${busy === name} onClick=${() => onUndrain(name)} aria-label="Undrain ${name}">Undrain</button>`
          : html`<button class="quiet" disabled=${busy === name} onClick=${() => onDrain(name)} aria-label="Drain ${name}">Drain</button>`}</td>
      </tr>`)}</tbody>
    </table></div>`;
}

/** The host that joined with this process; "" for the first host's, whose names have no host before them. */
const hostOf = (name) => name.match(/^(.+)-(?:engine|prefill|decode|tokenizer|encoder|detokenizer|coordinator|gateway|kvstore)-\d+(?:-rank\d+)?$/)?.[1] ?? "";

/** How many of a pool there are to be; where several models are served, of which of them, and of several hosts, on which. */
function Scale({ state, busy, onScale }) {
  const [service, setService] = useState("engines");
  const [chosen, setChosen] = useState("");
  const [place, setPlace] = useState("");
  const [count, setCount] = useState("");
  const roles = { engines: "mixed", prefill: "prefill", decode: "decode" };
  const named = Object.entries(state.instances ?? {});
  const all = named.map(([, each]) => each);
  const models = [...new Set(all.map((each) => each.model).filter(Boolean))].sort();
  // With several models names begin with these, and there is one host.
  const hosts = models.length > 1 ? [] : [...new Set(named.map(([name]) => hostOf(name)).filter(Boolean))].sort();
  const host = hosts.includes(place) ? place : "";
  const ofAModel = models.length > 1 && OF_A_MODEL.includes(service);
  const model = ofAModel ? (models.includes(chosen) ? chosen : models[0]) : null;
  const there = named.filter(
    ([name, each]) =>
      (!hosts.length || hostOf(name) === host) &&
      each.phase !== "gone" &&
      (roles[service] ? each.role === roles[service] : each.service === service) &&
      (model === null || each.model === model),
  ).length;
  const submit = (event) => {
    event.preventDefault();
    onScale(service, Number(count === "" ? there : count), model, host || null);
  };
  return html`<form class="panel row" onSubmit=${submit}>
    <label>Pool <select value=${service} onChange=${(event) => { setService(event.target.value); setCount(""); }}>
      ${SCALABLE.map((name) => html`<option value=${name} selected=${name === service}>${name}</option>`)}
    </select></label>
    ${ofAModel && html`<label>Model <select value=${model} onChange=${(event) => { setChosen(event.target.value); setCount(""); }}>
      ${models.map((name) => html`<option value=${name} selected=${name === model}>${name}</option>`)}
    </select></label>`}
    ${hosts.length > 0 && html`<label>Host <select value=${host} onChange=${(event) => { setPlace(event.target.value); setCount(""); }}>
      ${["", ...hosts].map((name) => html`<option value=${name} selected=${name === host}>${name || "the first"}</option>`)}
    </select></label>`}
    <label>Instances <input type="number" min="0" max="256" value=${count === "" ? there : count} onInput=${(event) => setCount(event.target.value)} /></label>
    <button type="submit" disabled=${busy}>Scale</button>
    <span class="faint">${there} there now</span>
  </form>`;
}

const FAULTS = { kill: "Kill", pause: "Pause" };

/** A fault for one process, by its supervisor; asked twice. */
function Strike({ state, busy, onStrike }) {
  const [fault, setFault] = useState("kill");
  const [chosen, setChosen] = useState("");
  const [seconds, setSeconds] = useState("5");
  const [sure, setSure] = useState(false);
  const names = Object.entries(state.instances ?? {})
    .filter(([, each]) => each.phase !== "gone" && each.service !== "supervisor")
    .map(([name]) => name);
  const instance = names.includes(chosen) ? chosen : names[0];
  const change = (set) => (event) => {
    set(event.target.value);
    setSure(false);
  };
  const submit = (event) => {
    event.preventDefault();
    if (sure) onStrike(instance, fault, Number(seconds));
    setSure(!sure);
  };
  return html`<p class="note">Its supervisor kills a process, or lets it stand still for a while, as faults of <code>baton chaos</code> do: no stream is to be lost by it. Of a gateway the connections end.</p>
  <form class="panel row" onSubmit=${submit}>
    <label>Process <select value=${instance} onChange=${change(setChosen)}>${names.map((name) => html`<option value=${name} selected=${name === instance}>${name}</option>`)}</select></label>
    <label>Fault <select value=${fault} onChange=${change(setFault)}>${Object.keys(FAULTS).map((name) => html`<option value=${name} selected=${name === fault}>${name}</option>`)}</select></label>
    ${fault === "pause" && html`<label>Seconds <input type="number" min="0.1" max="60" step="0.1" required value=${seconds} onInput=${change(setSeconds)} /></label>`}
    ${sure
      ? html`<button type="submit" class="danger" disabled=${busy}>${FAULTS[fault]} ${instance} now</button><button type="button" class="quiet" onClick=${() => setSure(false)}>Leave it</button>`
      : html`<button type="submit" class="quiet" disabled=${busy || !instance}>${FAULTS[fault]} …</button>`}
  </form>`;
}

function Requests({ state, busy, onCancel }) {
  const requests = Object.entries(state.requests ?? {});
  if (requests.length === 0) return html`<${Empty}>No request is open.</${Empty}>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-labelledby="act-cancel"><table>
    <thead><tr><th scope="col">Request</th><th scope="col">State</th><th scope="col" class="right">Age</th><th scope="col" class="right">Tokens</th><th scope="col"><span class="hidden">Action</span></th></tr></thead>
    <tbody>${requests.map(([id, each]) => html`<tr key=${id}>
      <th scope="row"><code title=${id}>${id.slice(0, 20)}</code><small>${each.kind} · ${each.model} · ${each.gateway}</small></th>
      <td>${each.state}</td><td class="right">${duration(state.time - each.started)}</td><td class="right">${number(each.tokens)}</td>
      <td class="right"><button class="quiet" disabled=${busy === id} onClick=${() => onCancel(id)} aria-label="Cancel ${id}">Cancel</button></td>
    </tr>`)}</tbody>
  </table></div>`;
}
