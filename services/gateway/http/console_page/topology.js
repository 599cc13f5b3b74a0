// The stack as it is on the bus: the ring of services by the way of a request, or all processes by host.

import { html, useState } from "./preact.js";
import { clock, compact, counted, DASH, duration, number } from "./format.js";
import { Choice, Empty, Phase, Section } from "./parts.js";

const RING = [
  ["gateway", "Gateway"],
  ["tokenizer", "Tokenizer"],
  ["coordinator", "Coordinator"],
  ["scheduler", "Engine"],
  ["detokenizer", "Detokenizer"],
];
const BESIDE = [
  ["kvstore", "KV store"],
  ["supervisor", "Supervisor"],
];

export function Topology({ state, events }) {
  const [grouping, setGrouping] = useState("by path");
  const instances = Object.entries(state.instances ?? {}).map(([name, each]) => ({ name, ...each }));
  const aside = html`<${Choice} label="Grouping" value=${grouping} options=${["by path", "by host"]} onChange=${setGrouping} />`;
  return html`
    <${Section} title="Topology" id="topology-title" aside=${aside}>
      ${instances.length === 0 && html`<${Empty}>No process has said anything yet.</${Empty}>`}
      ${grouping === "by path" ? html`<${Ring} state=${state} instances=${instances} />` : html`<${Hosts} state=${state} instances=${instances} />`}
    </${Section}>
    <${Section} title="What happened" id="events-title">
      <${Events} events=${events} />
    </${Section}>
  `;
}

function Ring({ state, instances }) {
  const of = (service) => instances.filter((each) => each.service === service);
  const beside = BESIDE.filter(([service]) => of(service).length > 0);
  return html`
    <p class="note">A request follows the arrows, and its text goes back to the gateway. On the arrows: messages that the
      services behind them handle in a second, their own heartbeats included.</p>
    <ol class="ring" aria-label="Services, by the way of a request">
      ${RING.map(([service, title]) => html`<${Column} key=${service} title=${title} state=${state} instances=${of(service)} ranks=${of("worker")} />`)}
    </ol>
    <div class="return" aria-hidden="true"></div>
    ${beside.length > 0 &&
    html`<ul class="ring beside" aria-label="Beside them">
      ${beside.map(([service, title]) => html`<${Column} key=${service} title=${title} state=${state} instances=${of(service)} ranks=${[]} plain />`)}
    </ul>`}
  `;
}

function Column({ title, state, instances, ranks, plain = false }) {
  const rates = instances.map((each) => each.messages_per_second).filter((rate) => rate !== undefined);
  const rate = rates.reduce((sum, each) => sum + each, 0);
  const ready = instances.filter((each) => each.phase === "ready").length;
  return html`<li class="column">
    ${!plain && html`<div class="arrow" aria-label="${title}: ${number(rate)} messages per second"><span>${rates.length ? compact(rate) : DASH}/s</span></div>`}
    <h3>${title} <small>${ready === instances.length ? counted(ready, "ready").replace("readys", "ready") : `${ready} of ${instances.length} ready`}</small></h3>
    <ul class="cards">
      ${instances.map((each) => html`<${Instance} key=${each.name} state=${state} instance=${each} ranks=${ranks.filter((rank) => rank.engine === each.name)} />`)}
      ${instances.length === 0 && html`<li class="card gone"><span class="phase bad"><span class="dot"></span>none</span></li>`}
    </ul>
  </li>`;
}

function Instance({ state, instance, ranks }) {
  const engine = state.engines?.[instance.name];
  const gone = instance.phase === "gone";
  const since = gone ? `${duration(state.time - instance.ended)} ago` : `up ${duration(state.time - instance.started)}`;
  return html`<li class="card ${instance.phase}" data-instance=${instance.name} data-phase=${instance.phase}>
    <div class="card-head"><strong>${instance.name}</strong><${Phase} phase=${instance.phase} why=${instance.why} /></div>
    <p class="facts">
      ${!gone && !engine && html`<span>${instance.load} in hand</span>`}
      ${!gone && engine && html`<span>${engine.running} running</span><span>${number(engine.tokens_per_second)} tokens/s</span>`}
      <span>${since}</span>
      ${instance.deaths > 0 && html`<span class="warn-text">${counted(instance.deaths, "death")} seen</span>`}
    </p>
    <p class="facts faint"><span>pid ${instance.pid}</span><span>${instance.host}</span>${instance.role && instance.role !== "mixed" && html`<span>${instance.role}</span>`}</p>
    ${instance.suspect && html`<p class="warn-text">Suspect: ${instance.suspect}</p>`}
    ${ranks.length > 0 &&
    html`<ul class="ranks">
      ${ranks.map(
        (rank) => html`<li data-instance=${rank.name} data-phase=${rank.phase}>
          <span>rank ${rank.rank} <small>pid ${rank.pid}${rank.deaths > 0 ? ` · † ${rank.deaths}` : ""}</small></span><${Phase} phase=${rank.phase} why=${rank.why} />
        </li>`,
      )}
    </ul>`}
  </li>`;
}

function Hosts({ state, instances }) {
  const hosts = [...new Set(instances.map((each) => each.host))].sort();
  return hosts.map(
    (host) => html`<div class="host" key=${host}>
      <h3>${host} <small>${counted(instances.filter((each) => each.host === host).length, "process").replace("processs", "processes")}</small></h3>
      <ul class="cards wide">
        ${instances
          .filter((each) => each.host === host)
          .map((each) => html`<${Instance} key=${each.name} state=${state} instance=${each} ranks=${[]} />`)}
      </ul>
    </div>`,
  );
}

const BAD = ["failed", "lost", "silent", "restarted", "stopped"];

function Events({ events }) {
  if (events.length === 0) return html`<${Empty}>Nothing since this page began to look.</${Empty}>`;
  const newest = events.at(-1);
  return html`
    <p class="hidden" aria-live="polite">${newest.instance} ${newest.what}</p>
    <ol class="events">
      ${[...events].reverse().map(
        (event) => html`<li key=${`${event.at}${event.instance}${event.what}`}>
          <time>${clock(event.at)}</time><strong>${event.instance}</strong>
          <span class=${BAD.some((word) => event.what.startsWith(word)) ? "bad-text" : ""}>${event.what}</span>
        </li>`,
      )}
    </ol>
  `;
}
