// The open requests of all gateways with their ages, those that ended last, and one of them followed hop by hop.

import { html, useEffect, useRef, useState } from "./preact.js";
import { counted, duration, number } from "./format.js";
import { Empty, Section } from "./parts.js";
import { Waterfall } from "./waterfall.js";

export function Requests({ state, headers }) {
  const [followed, setFollowed] = useState("");
  const panel = useRef(null);
  useEffect(() => panel.current?.focus(), [followed]);
  return html`
    <${Section} title="Follow a request" id="follow-title">
      <${Choose} followed=${followed} onFollow=${setFollowed} />
      ${followed && html`<article class="panel followed" tabindex="-1" ref=${panel} aria-label="The way of ${followed}" data-followed=${followed}>
        <div class="card-head"><h3><code>${followed}</code></h3><button class="quiet" onClick=${() => setFollowed("")}>Close</button></div>
        <${Waterfall} key=${followed} id=${followed} headers=${headers} />
      </article>`}
    </${Section}>
    <${Section} title="Open requests" id="requests-title"><${Open} state=${state} onFollow=${setFollowed} /></${Section}>
    <${Section} title="Ended last" id="ended-title"><${Ended} state=${state} onFollow=${setFollowed} /></${Section}>
  `;
}

function Choose({ followed, onFollow }) {
  const submit = (event) => {
    event.preventDefault();
    onFollow(new FormData(event.target).get("request").trim());
  };
  return html`<form class="row follow" onSubmit=${submit}>
    <label>Id of a response, of a trace, or an X-Request-Id <input name="request" required value=${followed} spellcheck="false" autocomplete="off" /></label>
    <button type="submit">Follow</button>
  </form>
  <p class="note">Each process remembers what it did for the last requests, for as long as its memory of them reaches (<code>--trace-history</code>). Times are by each host's clock.</p>`;
}

function Follow({ id, onFollow }) {
  return html`<button class="quiet" onClick=${() => onFollow(id)} aria-label="Follow ${id}">Follow</button>`;
}

function Open({ state, onFollow }) {
  const requests = Object.entries(state.requests ?? {})
    .map(([id, each]) => ({ id, age: Math.max(0, state.time - each.started), ...each }))
    .sort((one, other) => other.age - one.age);
  if (requests.length === 0) return html`<${Empty}>No request is open.</${Empty}>`;
  const queued = requests.filter((each) => each.state === "queued");
  const more = state.open_responses > requests.length ? " The oldest are shown." : "";
  return html`
    <p class="note">
      ${counted(state.open_responses, "response")}, ${queued.length} queued${queued.length ? `, the oldest for ${duration(queued[0].age)}` : ""}.${more}
    </p>
    <div class="scroll" tabindex="0" role="region" aria-labelledby="requests-title">
      <table>
        <thead><tr><th scope="col">Request</th><th scope="col">State</th><th scope="col">Engine</th><th scope="col" class="right">Age</th><th scope="col" class="right">Prompt</th><th scope="col" class="right">Tokens</th><th scope="col" class="right">Attempts</th><th scope="col"><span class="hidden">Action</span></th></tr></thead>
        <tbody>
          ${requests.map(
            (each) => html`<tr key=${each.id}>
              <th scope="row"><code title=${each.id}>${each.id.slice(0, 20)}</code><small>${each.kind} · ${each.model} · ${each.gateway}</small></th>
              <td>${each.state}</td><td>${each.engines.join(", ") || "–"}</td>
              <td class="right">${duration(each.age)}</td><td class="right">${number(each.prompt_tokens)}</td>
              <td class="right">${number(each.tokens)}</td><td class="right">${each.attempts}</td>
              <td class="right"><${Follow} id=${each.id} onFollow=${onFollow} /></td>
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
  `;
}

function Ended({ state, onFollow }) {
  const requests = Object.entries(state.ended ?? {}).sort(([, one], [, other]) => other.ended - one.ended);
  if (requests.length === 0) return html`<${Empty}>None has ended yet.</${Empty}>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-labelledby="ended-title"><table>
    <thead><tr><th scope="col">Request</th><th scope="col">Outcome</th><th scope="col" class="right">Ended</th><th scope="col" class="right">Took</th><th scope="col" class="right">Prompt</th><th scope="col" class="right">Tokens</th><th scope="col"><span class="hidden">Action</span></th></tr></thead>
    <tbody>${requests.map(([id, each]) => html`<tr key=${id}>
      <th scope="row"><code title=${id}>${id.slice(0, 20)}</code><small>${each.model} · ${each.gateway}</small></th>
      <td>${each.outcome}</td><td class="right">${duration(Math.max(0, state.time - each.ended))} ago</td><td class="right">${duration(each.ended - each.started)}</td>
      <td class="right">${number(each.prompt_tokens)}</td><td class="right">${number(each.tokens)}</td>
      <td class="right"><${Follow} id=${id} onFollow=${onFollow} /></td>
    </tr>`)}</tbody>
  </table></div>`;
}
