// How long clients waited, by model: histograms over the last minutes or since the gateways' start, and what share of
// them was within a target.

import { html, useState } from "./preact.js";
import { milliseconds, number } from "./format.js";
import { observations, quantile, range, since, within } from "./histogram.js";
import { Choice, Empty, Figure, Section } from "./parts.js";

const LATENCIES = [
  ["ttft", "Time to first token", "From a request's arrival at a gateway to its first token."],
  ["itl", "Between two deltas", "Between two parts of one answer as they are sent: inter-token latency."],
  ["tpot", "Time per output token", "Of each answer, the mean time of its tokens after the first."],
  ["e2e", "Whole answer", "From a request's arrival to its end."],
];
const TARGETS = { ttft: 0.5, itl: 0.1, tpot: 0.1, e2e: 10 };
const WINDOWS = { "since opened": "page", "since start": "start" };

export function Latency({ state, began }) {
  const [window, setWindow] = useState("since opened");
  const models = Object.entries(state.latency ?? {});
  const aside = html`<${Choice} label="Time" value=${window} options=${Object.keys(WINDOWS)} onChange=${setWindow} />`;
  return html`<${Section} title="Latency" id="latency-title" aside=${aside}>
    <p class="note">What clients of all gateways saw, by model. Quantiles are read from the buckets of the metrics, so that they are as fine as these.</p>
    ${models.length === 0 && html`<${Empty}>No request has ended yet.</${Empty}>`}
    ${models.map(([model, histograms]) => html`<div key=${model}>
      <h3 class="model">${model}</h3>
      <div class="engines">
        ${LATENCIES.map(([name, title, text]) => {
          const now = histograms[name];
          const shown = now && WINDOWS[window] === "page" ? since(began?.[model]?.[name], now) : now;
          return shown && html`<${Histogram} key=${name} name=${name} title=${title} text=${text} histogram=${shown} />`;
        })}
      </div>
    </div>`)}
  </${Section}>`;
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
        ${histogram.bounds.map((bound) => html`<option value=${bound} selected=${bound === target}>${ms(bound)}</option>`)}
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
  const ms = (seconds) => (seconds === undefined ? "∞" : milliseconds(1000 * seconds).replace(/\.0+ /, " "));
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
