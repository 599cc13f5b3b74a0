// One request's way through the services: a row for each hop, with when it began and how long it took.

import { html, useRef } from "./preact.js";
import { milliseconds } from "./format.js";
import { Empty } from "./parts.js";
import { usePolled } from "./polling.js";

const AGAIN_MS = 1000;
/** How often processes that did not answer are asked again once nothing is under way. */
const MAX_AGAIN = 5;
/** What each hop does, for people. */
const HOPS = {
  tokenize: "the prompt becomes tokens", route: "an engine is chosen, or waited for", queue: "it waits in the engine", prefill: "the prompt is computed",
  hand_over: "its blocks go to another engine", kv_load: "its blocks are loaded", decode: "tokens are generated", detokenize: "tokens become text",
};

/** Asks for the request's hops, again each second while something is under way, or not known as somebody did not answer. */
export function Waterfall({ id, headers }) {
  const [found, trouble] = usePolled(`console/requests/${encodeURIComponent(id)}`, headers, AGAIN_MS, useGoesOn());
  if (trouble) return html`<p class="trouble" role="status">${trouble}</p>`;
  if (!found) return html`<${Empty}>Asking the services …</${Empty}>`;
  return html`<${Hops} ...${found.answer} now=${found.at} />`;
}

/** Whether to ask once more after an answer. */
function useGoesOn() {
  const left = useRef(MAX_AGAIN);
  return (found) => found && (found.hops.some((hop) => hop.ended === null) || (found.unanswered.length > 0 && left.current-- > 0));
}

function Hops({ trace, hops, unanswered, now }) {
  const began = Math.min(...hops.map((hop) => hop.begun));
  const whole = Math.max(1e-6, Math.max(...hops.map((hop) => hop.ended ?? now)) - began);
  const open = hops.some((hop) => hop.ended === null);
  return html`<p class="facts faint"><span>${open ? "under way" : "ended"}</span><span>trace <code>${trace}</code></span></p>
    ${unanswered.length > 0 && html`<p class="trouble" role="status">${unanswered.join(", ")} did not answer: what they did is missing.</p>`}
    <div class="scroll" tabindex="0" role="region" aria-label="Hops of the request"><table class="hops">
      <thead><tr><th scope="col">Hop</th><th scope="col">Instance</th><th scope="col" class="right">After</th><th scope="col" class="right">Time</th><th scope="col"><span class="hidden">Where in the whole</span></th><th scope="col">More</th></tr></thead>
      <tbody>${hops.map((hop, index) => {
        const start = hop.begun - began;
        const taken = Math.max(0, (hop.ended ?? now) - hop.begun);
        const left = Math.min(99, (100 * start) / whole);
        const width = Math.max(0.6, Math.min(100 - left, (100 * taken) / whole));
        return html`<tr key=${index} data-hop=${hop.name}>
          <th scope="row">${hop.name}<small>${HOPS[hop.name] ?? "the whole request"}</small></th><td>${hop.instance}</td>
          <td class="right">${milliseconds(1000 * start)}</td>
          <td class="right">${milliseconds(1000 * taken)}${hop.ended === null ? " …" : ""}</td>
          <td class="span"><div class="hop ${hop.ended === null ? "open" : ""} ${HOPS[hop.name] ? "" : "whole"}" style=${{ marginLeft: `${left}%`, width: `${width}%` }}></div></td>
          <td class="faint more">${told(hop)}</td>
        </tr>`;
      })}</tbody>
    </table></div>`;
}

const SHORT = { "gen_ai.usage.input_tokens": "prompt", "gen_ai.usage.output_tokens": "tokens", "baton.outcome": "outcome", "http.response.status_code": "status" };
const LEFT_OUT = ["http.request.method", "http.route", "gen_ai.response.id", "gen_ai.request.model"];

/** What is told of a hop beside its row: its engine is its instance. */
function told({ attributes, instance }) {
  return Object.entries(attributes)
    .filter(([name, value]) => !LEFT_OUT.includes(name) && !(name === "engine" && value === instance))
    .map(([name, value]) => `${SHORT[name] ?? name.replaceAll("_", " ")} ${value}`)
    .join(" · ");
}
