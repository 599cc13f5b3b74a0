// Pieces that several views draw.

import { html } from "./preact.js";
import { percent } from "./format.js";

/** Phases by what they mean for requests; the word is always beside the colour. */
const TONES = { ready: "good", draining: "warn", standby: "calm", starting: "calm", failed: "bad", gone: "bad" };

export function Phase({ phase, why }) {
  const text = phase === "gone" && why ? `gone: ${why}` : phase;
  return html`<span class="phase ${TONES[phase] ?? "calm"}"><span class="dot" aria-hidden="true"></span>${text}</span>`;
}

export function Section({ title, id, children, aside }) {
  return html`<section aria-labelledby=${id}>
    <header class="section-head"><h2 id=${id}>${title}</h2>${aside}</header>
    ${children}
  </section>`;
}

export function Empty({ children }) {
  return html`<p class="note">${children}</p>`;
}

/** A share as a bar with its figures in words. */
/** `filled`: it is meant to be full, as a cache is. */
export function Meter({ label, share, text, filled = false }) {
  const known = share !== undefined && share !== null;
  const width = known ? Math.min(100, 100 * share) : 0;
  const tone = filled ? "" : width >= 95 ? "bad" : width >= 80 ? "warn" : "";
  return html`<div class="meter">
    <div class="meter-head"><span>${label}</span><strong>${text ?? percent(share)}</strong></div>
    <div class="track" role="img" aria-label="${label}: ${known ? percent(share) : "not known"}">
      <div class="fill ${tone}" style=${{ width: `${width}%` }}></div>
    </div>
  </div>`;
}

export function Figure({ label, value, note, title }) {
  return html`<div class="figure" title=${title}>
    <dt>${label}</dt>
    <dd>${value}${note ? html` <small>${note}</small>` : null}</dd>
  </div>`;
}

/** The last values as a line; the newest is at the right edge. */
export function Spark({ values, label, height = 36, width = 240, slots = 120 }) {
  const known = values.filter((value) => value !== undefined);
  const most = Math.max(...known, 0);
  if (known.length < 2) return html`<svg class="spark" viewBox="0 0 ${width} ${height}" aria-hidden="true"></svg>`;
  const y = (value) => height - 2 - (most ? (value / most) * (height - 5) : 0);
  const x = (index) => width - ((values.length - 1 - index) / (slots - 1)) * width;
  const points = values.flatMap((value, index) => (value === undefined ? [] : [[x(index), y(value)]]));
  const line = points.map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`).join(" ");
  const area = `${points[0][0].toFixed(1)},${height} ${line} ${width},${height}`;
  return html`<svg class="spark" viewBox="0 0 ${width} ${height}" preserveAspectRatio="none" role="img"
    aria-label="${label}: at most ${most.toFixed(1)} in the last ${counted(values.length)}">
    <polygon points=${area} /><polyline points=${line} />
  </svg>`;
}

function counted(seconds) {
  return seconds < 60 ? `${seconds} seconds` : `${Math.round(seconds / 60)} minutes`;
}

/** Parts of a whole side by side, with a legend that says the figures. */
export function Stack({ label, parts, format }) {
  const total = parts.reduce((sum, part) => sum + (part.value ?? 0), 0);
  return html`<figure class="stack">
    <div class="track" role="img" aria-label=${label}>
      ${total > 0 &&
      parts.map((part, index) => html`<div class="part part-${index}" style=${{ width: `${(100 * (part.value ?? 0)) / total}%` }}></div>`)}
    </div>
    <figcaption>
      ${parts.map((part, index) => html`<span class="key"><i class="part-${index}" aria-hidden="true"></i>${part.name} <b>${format(part.value)}</b></span>`)}
    </figcaption>
  </figure>`;
}

/** One of a few choices. */
export function Choice({ label, value, options, onChange }) {
  return html`<fieldset class="choice">
    <legend class="hidden">${label}</legend>
    ${options.map(
      (option) => html`<label class=${option === value ? "on" : ""}>
        <input type="radio" name=${label} checked=${option === value} onChange=${() => onChange(option)} />${option}
      </label>`,
    )}
  </fieldset>`;
}
