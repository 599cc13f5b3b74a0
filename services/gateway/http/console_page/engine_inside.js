// Inside one engine: its KV memory block by block, its last steps, and the requests that it holds. The engine is asked
// for these as long as this is shown.

import { html, useEffect, useRef, useState } from "./preact.js";
import { counted, duration, milliseconds, number, percent } from "./format.js";
import { Choice, Empty, Figure, Section } from "./parts.js";
import { follow } from "./stream.js";

export function EngineInside({ state, headers }) {
  const names = Object.keys(state.engines ?? {});
  const [chosen, setChosen] = useState(null);
  const name = names.includes(chosen) ? chosen : names[0];
  const [picture, setPicture] = useState(null);
  const [trouble, setTrouble] = useState(null);

  useEffect(() => {
    const ending = new AbortController();
    setPicture(null);
    setTrouble(null);
    const take = (event, data) => (event === "engine" ? setPicture(data) : setTrouble(data));
    follow(`console/engines/${encodeURIComponent(name)}`, headers, ending.signal, take, setTrouble);
    return () => ending.abort();
  }, [name, headers.authorization]);

  const aside = html`<${Choice} label="Engine" value=${name} options=${names} onChange=${setChosen} />`;
  const here = picture?.engine === name ? picture : null;
  return html`<${Section} title="Inside an engine" id="inside-title" aside=${aside}>
    ${trouble && html`<p class="trouble" role="status">${trouble.text}</p>`}
    ${!here && !trouble && html`<${Empty}>Asking ${name} …</${Empty}>`}
    ${here && !here.blocks && html`<${Empty}>${name} has no workers: it holds nothing.</${Empty}>`}
    ${here?.blocks && html`<div class="inside" data-inside=${name}>
      <${Blocks} blocks=${here.blocks} size=${here.block_size} />
      <${Steps} steps=${here.steps} budget=${here.max_batch_tokens} />
      <${Experts} load=${state.engines[name]?.experts} />
      <${Sequences} title="Waiting" all=${here.queued} sequences=${here.waiting} now=${state.time} />
      <${Sequences} title="Running" all=${here.computing} sequences=${here.running} now=${state.time} />
    </div>`}
  </${Section}>`;
}

// ---- KV memory

/** By the digit that the engine sends for a block. */
const CELLS = [["free", "--cell-0"], ["cached", "--cell-1"], ["in use", "--cell-2"], ["in use by several", "--cell-3"], ["loading", "--cell-4"]];
const CELL = 10;

function Blocks({ blocks, size }) {
  const used = blocks.total - blocks.free - blocks.cached;
  const shared = [...blocks.cells].filter((cell) => cell === "3").length * blocks.every;
  const counts = [blocks.free, blocks.cached, used - shared - blocks.loading, shared, blocks.loading];
  const told = CELLS.map(([name], index) => `${number(Math.max(0, counts[index]))} ${name}`).join(", ");
  return html`<article class="panel" aria-label="KV memory">
    <div class="card-head"><h3>KV memory</h3><small>${counted(blocks.total, "block")} of ${size} tokens</small></div>
    <${BlockCanvas} cells=${blocks.cells} label=${`KV memory as a map of blocks: ${told}`} />
    <p class="stack"><span class="legend">
      ${CELLS.map(([name], index) => html`<span class="key"><i class="cell-${index}" aria-hidden="true"></i>${name} <b>${index > 1 && index < 4 && blocks.every > 1 ? "≈ " : ""}${number(Math.max(0, counts[index]))}</b></span>`)}
    </span></p>
    ${blocks.every > 1 && html`<p class="note">A square is one of ${blocks.every} blocks.</p>`}
  </article>`;
}

/** Drawn, as a thousand elements would be too many to change each second. */
function BlockCanvas({ cells, label }) {
  const canvas = useRef(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const watching = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    watching.observe(canvas.current.parentElement);
    return () => watching.disconnect();
  }, []);
  const columns = Math.max(1, Math.floor(width / CELL));
  const rows = Math.ceil(cells.length / columns);
  useEffect(() => {
    const scale = devicePixelRatio || 1;
    const drawing = canvas.current.getContext("2d");
    const style = getComputedStyle(canvas.current);
    const colours = CELLS.map(([, variable]) => style.getPropertyValue(variable));
    drawing.setTransform(scale, 0, 0, scale, 0, 0);
    drawing.clearRect(0, 0, columns * CELL, rows * CELL);
    for (let index = 0; index < cells.length; index += 1) {
      drawing.fillStyle = colours[cells[index]];
      drawing.fillRect((index % columns) * CELL, Math.floor(index / columns) * CELL, CELL - 2, CELL - 2);
    }
  });
  const scale = globalThis.devicePixelRatio || 1;
  return html`<div class="blocks"><canvas ref=${canvas} role="img" aria-label=${label} width=${columns * CELL * scale} height=${rows * CELL * scale} style=${{ width: `${columns * CELL}px`, height: `${rows * CELL}px` }}></canvas></div>`;
}

// ---- steps

/** What a step takes, and behind it how long the rank had waited for it: of an idle engine seconds, so that no bar is
 * scaled by that. */
const TIMES = ["prepare", "forward", "sample", "answer", "wait"];
const TIME_CLASSES = ["part-1", "part-2", "part-3", "part-4", "part-0"];
const CHART = { width: 480, height: 96, slots: 48 };

function Steps({ steps, budget }) {
  if (steps.length === 0) return html`<article class="panel"><h3>Last steps</h3><${Empty}>No step has been computed yet.</${Empty}></article>`;
  const last = steps.at(-1);
  const tokens = steps.map((step) => [step.prefill_tokens, step.decode_tokens]);
  const most = Math.max(...tokens.map(([prefill, decode]) => prefill + decode));
  const times = steps.map(({ timing }) => TIMES.map((name) => 1000 * timing[name]));
  const busy = times.map((parts) => parts.slice(0, -1).reduce((all, part) => all + part, 0));
  const mean = busy.reduce((all, each) => all + each, 0) / steps.length;
  const [drafted, accepted] = [sum(steps, "drafted"), sum(steps, "accepted")];
  return html`<article class="panel" aria-label="Last steps">
    <div class="card-head"><h3>Last steps</h3><small>${number(steps[0].step)} to ${number(last.step)}</small></div>
    <dl class="figures">
      <${Figure} label="Last: tokens" value=${number(last.prefill_tokens + last.decode_tokens)} note="of ${number(budget)}" title="How many the budget of a step allows" />
      <${Figure} label="Prefill" value=${counted(last.prefill_tokens, "token")} note="of ${counted(last.prefills, "prompt")}" />
      <${Figure} label="Decode" value=${counted(last.decode_tokens, "token")} note="of ${counted(last.decodes, "sequence")}" />
      <${Figure} label="A step" value=${milliseconds(mean)} note="mean, without waiting" />
      ${drafted > 0 && html`<${Figure} label="Drafts accepted" value=${percent(accepted / drafted)} note="of ${number(drafted)}" />`}
    </dl>
    <${StackedBars} title="Tokens of each step" unit=${(value) => counted(value, "token")} names=${["prefill", "decode"]} classes=${["part-1", "part-2"]} rows=${tokens} most=${most} />
    <${StackedBars} title="Time of each step" unit=${milliseconds} names=${TIMES} classes=${TIME_CLASSES} rows=${times} most=${Math.max(...busy)} />
    ${drafted > 0 && html`<${StackedBars} title="Drafts of each step" unit=${(value) => number(value)} names=${["accepted", "rejected"]} classes=${["part-3", "part-0"]} rows=${steps.map((step) => [step.accepted, step.drafted - step.accepted])} most=${Math.max(...steps.map((step) => step.drafted))} />`}
  </article>`;
}

function sum(steps, field) {
  return steps.reduce((all, step) => all + step[field], 0);
}

/** A bar for each step, the newest at the right edge; the legend says the sums of the parts. */
function StackedBars({ title, unit, names, classes, rows, most }) {
  const slot = CHART.width / CHART.slots;
  const sums = names.map((_, part) => rows.reduce((all, row) => all + row[part], 0));
  const left = CHART.width - rows.length * slot;
  return html`<figure class="stack">
    <figcaption class="chart-head"><b>${title}</b><span class="faint">up to ${unit(most)}</span></figcaption>
    <svg class="bars stacked" viewBox="0 0 ${CHART.width} ${CHART.height}" preserveAspectRatio="none" role="img" aria-label="${title}, of the last ${rows.length}: ${names.map((name, part) => `${name} ${unit(sums[part])}`).join(", ")} together">
      ${rows.map((row, index) => {
        let top = CHART.height;
        return row.map((value, part) => {
          const height = most > 0 ? Math.min(top, (value / most) * CHART.height) : 0;
          top -= height;
          return height > 0 && html`<rect class=${classes[part]} x=${left + index * slot + 1} y=${top} width=${slot - 2} height=${height} />`;
        });
      })}
      <line x1="0" x2=${CHART.width} y1=${CHART.height} y2=${CHART.height} />
    </svg>
    <figcaption>${names.map((name, part) => html`<span class="key"><i class=${classes[part]} aria-hidden="true"></i>${name} <b>${unit(sums[part])}</b></span>`)}</figcaption>
  </figure>`;
}

// ---- experts of a mixture

/** A strip for each layer, with a cell for each rank that shares its experts: the more of the picks, the darker. */
function Experts({ load }) {
  if (!load) return null;
  const layers = Object.entries(load.layers).sort(([one], [other]) => one - other);
  const balance = (ranks) => 100 / Math.max(100, ...ranks);
  const mean = layers.reduce((all, [, ranks]) => all + balance(ranks), 0) / layers.length;
  const moved = load.rearrangements == null ? "experts stay where they are" : `${counted(load.rearrangements, "rearrangement")}, ${counted(load.moved, "expert")} moved`;
  return html`<article class="panel wide" aria-label="Experts">
    <div class="card-head"><h3>Experts</h3><small>balance ${mean.toFixed(2)}, ${moved}</small></div>
    <div class="strips">${layers.map(([layer, ranks]) => html`<div key=${layer} class="strip" role="img"
        aria-label="Layer ${layer}: balance ${balance(ranks).toFixed(2)}, ranks ${ranks.map((rank) => `${rank} %`).join(", ")} of their mean">
      <span>${layer}</span>${ranks.map((rank, number) => html`<i title="rank ${number}: ${rank} % of the mean" style=${{ background: `color-mix(in srgb, var(--cell-2) ${Math.min(100, rank / 2)}%, var(--cell-0))` }}></i>`)}<b>${balance(ranks).toFixed(2)}</b>
    </div>`)}</div>
    <p class="note">By layer and rank, what its experts were picked in the last seconds. Balance: mean over maximum of the ranks.</p>
  </article>`;
}

// ---- requests

function Sequences({ title, all, sequences, now }) {
  const id = `inside-${title}`;
  return html`<article class="panel wide" aria-labelledby=${id}>
    <div class="card-head"><h3 id=${id}>${title}</h3><small>${number(all)}${all > sequences.length ? `, ${sequences.length} of them shown` : ""}</small></div>
    ${sequences.length === 0 ? html`<${Empty}>No request.</${Empty}>` : html`<div class="scroll" tabindex="0" role="region" aria-labelledby=${id}><table>
      <thead><tr><th scope="col">Request</th><th scope="col">Phase</th><th scope="col" class="right">Age</th><th scope="col" class="right">Priority</th><th scope="col" class="right">Prompt</th><th scope="col" class="right">Cached</th><th scope="col" class="right">Computed</th><th scope="col" class="right">Output</th><th scope="col" class="right">Blocks</th></tr></thead>
      <tbody>${sequences.map((each) => html`<tr key=${each.request}>
        <th scope="row"><code title=${each.request}>${each.request.slice(0, 20)}</code></th><td>${each.phase}</td>
        <td class="right">${duration(Math.max(0, now - each.arrival))}</td><td class="right">${each.priority}</td>
        <td class="right">${number(each.prompt_tokens)}</td><td class="right">${number(each.cached_tokens)}</td><td class="right">${number(each.computed_tokens)}</td>
        <td class="right">${number(each.output_tokens)}</td><td class="right">${number(each.blocks)}</td>
      </tr>`)}</tbody>
    </table></div>`}
  </article>`;
}
