// Each engine: its queue, KV memory, speed and where its steps' time goes; one of them looked into.

import { html } from "./preact.js";
import { bytes, milliseconds, number, percent } from "./format.js";
import { EngineInside } from "./engine_inside.js";
import { Prefixes } from "./prefixes.js";
import { Empty, Figure, Meter, Phase, Section, Spark, Stack } from "./parts.js";

const STEP_PARTS = ["wait", "prepare", "forward", "sample", "answer"];

export function Engines({ state, history, headers }) {
  const engines = Object.entries(state.engines ?? {});
  const stores = Object.entries(state.stores ?? {});
  return html`
    <${Section} title="Engines" id="engines-title">
      ${engines.length === 0 && html`<${Empty}>No engine has said anything yet.</${Empty}>`}
      <div class="engines">
        ${engines.map(([name, engine]) => html`<${Engine} key=${name} name=${name} engine=${engine} history=${history[name] ?? []} />`)}
      </div>
    </${Section}>
    ${engines.length > 0 && html`<${EngineInside} state=${state} headers=${headers} />`}
    <${Prefixes} state=${state} headers=${headers} />
    ${stores.length > 0 && html`<${Section} title="KV stores" id="stores-title"><div class="engines">${stores.map(([name, store]) => html`<${Store} key=${name} name=${name} store=${store} />`)}</div></${Section}>`}
  `;
}

function Engine({ name, engine, history }) {
  const series = (field) => history.map((point) => point[field]);
  return html`<article class="panel" aria-label=${name} data-engine=${name}>
    <div class="card-head"><h3>${name}</h3><${Phase} phase=${engine.phase} /></div>
    <p class="facts faint"><span>${engine.model ?? "no model yet"}</span><span>${engine.role}</span>${engine.node && html`<span>store of ${engine.node}</span>`}</p>
    ${engine.suspect && html`<p class="warn-text">Suspect: ${engine.suspect}</p>`}
    <div class="speed">
      <div class="big"><strong>${number(engine.tokens_per_second)}</strong> tokens/s</div>
      <${Spark} values=${series("tokens_per_second")} label="tokens per second" />
    </div>
    <div class="meters">
      <${Meter} label="Running" share=${engine.max_running ? engine.running / engine.max_running : undefined} text="${engine.running} of ${engine.max_running}" />
      <${Meter} label="Waiting" share=${engine.max_waiting ? engine.waiting / engine.max_waiting : undefined} text="${engine.waiting} of ${engine.max_waiting}" />
      <${Meter} label="KV blocks in use" share=${engine.kv_share} text="${number(engine.kv_blocks)} of ${number(engine.kv_blocks_total)}" />
    </div>
    <dl class="figures">
      <${Figure} label="Prompt tokens to compute" value=${number(engine.prefill_tokens)} />
      <${Figure} label="Prefix hits" value=${percent(engine.hit_rate)} title="Share of prompt tokens that a cache held" />
      <${Figure} label="Drafts accepted" value=${percent(engine.acceptance)} title="Share of draft tokens that the model accepted" />
      <${Figure} label="First token" value=${milliseconds(engine.ttft_ms)} title="Mean from a request's coming to the engine to its first token" />
      <${Figure} label="Between tokens" value=${milliseconds(engine.itl_ms)} title="Mean between two tokens of a request" />
    </dl>
    ${Object.entries(engine.ranks ?? {}).map(([rankName, rank]) => html`<${Rank} key=${rankName} name=${rankName} rank=${rank} />`)}
  </article>`;
}

function Rank({ name, rank }) {
  const parts = STEP_PARTS.map((part) => ({ name: part, value: rank[`${part}_ms`] }));
  return html`<div class="rank">
    <div class="card-head">
      <h4>Rank ${rank.rank} <small>${rank.device}</small></h4>
      <span class="facts faint"><span>${number(rank.steps_per_second)} steps/s</span><span>${milliseconds(rank.step_ms)} a step</span><span>idle ${percent(rank.idle_share)}</span></span>
    </div>
    <${Stack} label="${name}: where a step's time goes" parts=${parts} format=${milliseconds} />
  </div>`;
}

function Store({ name, store }) {
  const share = store.bytes_total ? store.bytes_used / store.bytes_total : undefined;
  return html`<article class="panel" aria-label=${name}>
    <div class="card-head"><h3>${name}</h3><${Phase} phase=${store.phase} /></div>
    <div class="meters"><${Meter} label="Memory" share=${share} filled text="${bytes(store.bytes_used)} of ${bytes(store.bytes_total)}" /></div>
    <dl class="figures">
      <${Figure} label="Blocks" value=${number(store.blocks)} />
      <${Figure} label="Pinned" value=${number(store.pinned)} />
      <${Figure} label="Hits" value=${percent(store.hit_rate)} />
    </dl>
  </article>`;
}
