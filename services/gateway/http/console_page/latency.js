// How long clients waited, by model or API key: histograms over the last minutes or since the gateways' start, and what share of
// them was within a target.

import { html, useState } from "./preact.js";
import { clock, milliseconds, number, roundTime } from "./format.js";
import { observations, quantile, range, since, within } from "./histogram.js";
import { Choice, Empty, Figure, Section } from "./parts.js";

const LATENCIES = [
  ["ttft", "Time to first token", "From a request's arrival at a gateway to its first token."],
  ["itl", "Between two deltas", "Between two parts of one answer as they are sent: inter-token latency."],
  ["tpot", "Time per output token", "Of each answer, the mean time of its tokens after the first."],
  ["e2e", "Whole answer", "From a request's arrival to its end."],
];
const TARGETS = { ttft: 0.5, itl: 0.1, tpot: 0.1, e2e: 10 };
const GROUPS = { "by model": ["latency", "models"], "by API key": ["latency_by_key", "keys"] };
const WINDOWS = { "since opened": "page", "since start": "start" };

export function Latency({ state, began }) {
  const [window, setWindow] = useState("since opened");
  const [grouping, setGrouping] = useState("by model");
  const [field, part] = GROUPS[grouping];
  const models = Object.entries(state[field] ?? {});
  const sinceOpened = WINDOWS[window] === "page";
  const aside = html`<span class="choices"><${Choice} label="Groups" value=${grouping} options=${Object.keys(GROUPS)} onChange=${setGrouping} />
    <${Choice} label="Time" value=${window} options=${Object.keys(WINDOWS)} onChange=${setWindow} /></span>`;
  return html`<${Section} title="Latency" id="latency-title" aside=${aside}>
    <p class="note">What clients of all gateways saw. Quantiles are read from the buckets of the metrics, so that they are as fine as these.</p>
    ${models.length === 0 && html`<${Empty}>${part === "keys" ? "No request with an API key has ended yet." : "No request has ended yet."}</${Empty}>`}
    ${models.map(([model, histograms]) => html`<div key=${model}>
      <h3 class="model">${model}</h3>
      <div class="engines">
        ${LATENCIES.map(([name, title, text]) => {
          const now = histograms[name];
          const shown = now && sinceOpened ? since(began?.[part]?.[model]?.[name], now) : now;
          return shown && html`<${Histogram} key=${name} name=${name} title=${title} text=${text} histogram=${shown} />`;
        })}
      </div>
    </div>`)}
  </${Section}>
  <${Section} title="Pools" id="pools-title"><${Pools} pools=${state.pools ?? {}} began=${sinceOpened ? (began?.pools ?? {}) : {}} /></${Section}>
  <${Section} title="The planner's decisions" id="decisions-title"><${Decisions} decisions=${state.decisions ?? []} /></${Section}>`;
}

/** What the engines of each pool have counted themselves. */
function Pools({ pools, began }) {
  const rows = Object.entries(pools).sort();
  if (rows.length === 0) return html`<${Empty}>No engine has said anything yet.</${Empty}>`;
  const ms = (seconds, count) => milliseconds(count > 0 ? (1000 * seconds) / count : undefined);
  return html`<p class="note">What engines count themselves: from a request's coming to the engine to its first token there, and between two tokens.</p>
  <div class="scroll" tabindex="0" role="region" aria-labelledby="pools-title"><table>
    <thead><tr><th scope="col">Pool</th><th scope="col" class="right">Engines</th><th scope="col" class="right">First tokens</th>${QUANTILES}<th scope="col" class="right">Later tokens</th>${QUANTILES}</tr></thead>
    <tbody>${rows.map(([name, pool]) => {
      const grown = grownSince(began[name], pool);
      return html`<tr key=${name} data-pool=${pool.role}>
        <th scope="row">${pool.role}<small>${pool.model}</small></th><td class="right">${pool.engines}</td>
        <td class="right">${number(grown.first_tokens)}</td><td class="right">${ms(grown.first_token_seconds, grown.first_tokens)}</td>${quantiles("first", began[name], pool)}
        <td class="right">${number(grown.later_tokens)}</td><td class="right">${ms(grown.later_token_seconds, grown.later_tokens)}</td>${quantiles("later", began[name], pool)}
      </tr>`;
    })}</tbody>
  </table></div>`;
}

const SHARES = [0.5, 0.9, 0.99];
const QUANTILES = html`<th scope="col" class="right">Mean</th>${SHARES.map((share) => html`<th scope="col" class="right">p${100 * share}</th>`)}`;

function quantiles(name, earlier, now) {
  const histogram = now[name] && since(earlier?.[name], now[name]);
  return SHARES.map((share) => {
    const seconds = histogram && quantile(histogram, share);
    return html`<td class="right" data-quantile="${name}-p${100 * share}">${milliseconds(seconds === undefined ? undefined : 1000 * seconds)}</td>`;
  });
}

const SUMS = ["first_tokens", "first_token_seconds", "later_tokens", "later_token_seconds"];

/** What came since; all of it where an engine has begun anew, or gone. */
function grownSince(earlier, now) {
  const differences = Object.fromEntries(SUMS.map((name) => [name, (now[name] ?? 0) - (earlier?.[name] ?? 0)]));
  return SUMS.some((name) => differences[name] < 0) ? now : differences;
}

function Decisions({ decisions }) {
  if (decisions.length === 0) return html`<${Empty}>None since somebody looks. <code>baton plan</code> says what it decides at each of its intervals.</${Empty}>`;
  const ms = (seconds) => milliseconds(seconds === undefined ? undefined : 1000 * seconds);
  return html`<div class="scroll" tabindex="0" role="region" aria-labelledby="decisions-title"><table>
    <thead><tr><th scope="col">Heard</th><th scope="col">Decision</th><th scope="col" class="right">Requests/s</th><th scope="col" class="right">Expected</th><th scope="col" class="right">Backlog</th><th scope="col" class="right">First token, expected</th><th scope="col" class="right">Between tokens, expected</th><th scope="col">Enough</th></tr></thead>
    <tbody>${[...decisions].reverse().map((each) => html`<tr key=${each.heard} data-decision>
      <th scope="row">${clock(each.heard)}<small>${each.acts ? "acts" : "only says it"} · ${each.profile}</small></th>
      <td>${each.pools.map((pool) => html`<div>${pool.role} ${pool.present === pool.target ? `stays ${pool.present}` : html`<b>${pool.present} → ${pool.target}</b>`}${pool.wanted === pool.target ? "" : `, ${pool.wanted} wanted`}: ${pool.reason}</div>`)}</td>
      <td class="right">${number(each.observed_rate)}</td><td class="right">${number(each.predicted_rate)}</td><td class="right">${each.backlog}</td>
      <td class="right">${ms(each.observed_ttft)}, ${ms(each.forecast_ttft)}</td><td class="right">${ms(each.observed_itl)}, ${ms(each.forecast_itl)}</td>
      <td>${each.suffices ? "yes" : html`<span class="warn-text">no</span>`}</td>
    </tr>`)}</tbody>
  </table></div>`;
}

function Histogram({ name, title, text, histogram }) {
  const [target, setTarget] = useState(nearest(histogram.bounds, TARGETS[name]));
  const count = observations(histogram);
  const ms = (seconds) => milliseconds(seconds === undefined ? undefined : 1000 * seconds);
  return html`<article class="panel" aria-label=${title} data-latency=${name}>
    <div class="card-head"><h3>${title}</h3><small>${number(count)} observed</small></div>
    <p class="note">${text}</p>
    ${count === 0 ? html`<${Empty}>Nothing yet.</${Empty}>` : html`
      <${Bars} histogram=${histogram} title=${title} target=${target} />
      <dl class="figures">
        <${Figure} label="Mean" value=${ms(histogram.total / count)} />
        ${[0.5, 0.9, 0.99].map((share) => html`<${Figure} label="p${100 * share}" value=${ms(quantile(histogram, share))} />`)}
      </dl>
      <p class="facts target"><label>Within <select value=${target} onChange=${(event) => setTarget(Number(event.target.value))}>
        ${histogram.bounds.map((bound) => html`<option value=${bound} selected=${bound === target}>${roundTime(bound)}</option>`)}
      </select></label> <strong>${floored(within(histogram, target))}</strong></p>`}
  </article>`;
}

/** Rounded down: a target that was missed once was not always met. */
function floored(share) {
  return `${(Math.floor(1000 * share) / 10).toFixed(1)} %`;
}

function nearest(bounds, wanted) {
  return bounds.reduce((best, bound) => (Math.abs(bound - wanted) < Math.abs(best - wanted) ? bound : best), bounds[0]);
}

const CHART = { width: 420, height: 110, gap: 4, labels: 7 };

function Bars({ histogram, title, target }) {
  const [first, last] = range(histogram);
  const from = Math.max(0, first - 1);
  const counts = histogram.counts.slice(from, last + 2);
  const most = Math.max(...counts);
  const slot = CHART.width / counts.length;
  const ms = (seconds) => (seconds === undefined ? "∞" : roundTime(seconds));
  const told = counts.map((count, index) => `up to ${ms(histogram.bounds[from + index])}: ${count}`).join(", ");
  const every = Math.ceil(counts.length / CHART.labels);
  return html`<svg class="bars" viewBox="0 0 ${CHART.width} ${CHART.height + 20}" role="img" aria-label="${title}. ${told}">
    ${counts.map((count, index) => {
      const height = most ? Math.max(count ? 2 : 0, (count / most) * CHART.height) : 0;
      const x = index * slot;
      const bound = histogram.bounds[from + index];
      return html`
        <rect class=${bound <= target ? "" : "late"} x=${x + CHART.gap / 2} y=${CHART.height - height} width=${slot - CHART.gap} height=${height} rx="3"><title>up to ${ms(bound)}: ${count}</title></rect>
        ${index % every === 0 && html`<text x=${x + slot / 2} y=${CHART.height + 15}>${ms(bound)}</text>`}`;
    })}
    <line x1="0" x2=${CHART.width} y1=${CHART.height} y2=${CHART.height} />
  </svg>`;
}
