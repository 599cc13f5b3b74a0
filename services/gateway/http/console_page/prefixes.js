// What the prompts that were placed last have in common, as a tree, and who holds it.

import { html } from "./preact.js";
import { duration, number } from "./format.js";
import { Empty, Section } from "./parts.js";
import { usePolled } from "./polling.js";

const EVERY_MS = 3000;

export function Prefixes({ state, headers }) {
  const [found, trouble] = usePolled("console/prefixes", headers, EVERY_MS, () => true);
  const nodes = found?.answer.prefixes;
  return html`<${Section} title="Prefixes" id="prefixes-title">
    <p class="note">What the last prompts have in common, from their beginning on, by the hashes of their blocks; the heaviest first, of those alone a few; and which engines and KV stores hold it whole.</p>
    ${trouble && html`<p class="trouble" role="status">${trouble}</p>`}
    ${nodes?.length === 0 && html`<${Empty}>No prompt of a whole block has been placed yet.</${Empty}>`}
    ${nodes?.length > 0 && html`<${Tree} nodes=${inOrder(withoutLoners(nodes))} now=${state.time} />`}
  </${Section}>`;
}

const LONERS = 5;

/** Without most of the prompts that have nothing in common with any other. */
function withoutLoners(nodes) {
  const loners = nodes.filter((node) => node.parent === null && node.requests === 1);
  const left = new Set(loners.slice(LONERS));
  return nodes.filter((node) => !left.has(node));
}

/** Each behind its parent, with its depth. */
function inOrder(nodes, parent = null, depth = 0) {
  const below = nodes.filter((node) => (parent ? node.parent === parent.name && node.model === parent.model : node.parent === null));
  return below.flatMap((node) => [{ ...node, depth }, ...inOrder(nodes, node, depth + 1)]);
}

function Tree({ nodes, now }) {
  const most = Math.max(...nodes.map((node) => node.requests));
  return html`<div class="scroll" tabindex="0" role="region" aria-labelledby="prefixes-title"><table class="prefixes">
    <thead><tr><th scope="col">Prefix</th><th scope="col" class="right">Tokens</th><th scope="col" class="right">Prompts</th><th scope="col"><span class="hidden">Share of the prompts</span></th><th scope="col">Held by</th><th scope="col" class="right">Last</th></tr></thead>
    <tbody>${nodes.map((node) => html`<tr key=${`${node.model} ${node.name}`} data-prefix=${node.name}>
      <th scope="row" style=${{ paddingLeft: `${14 + 18 * Math.min(node.depth, 12)}px` }}>${node.depth > 0 && html`<span class="faint" aria-hidden="true">└ </span>`}<code title=${node.name}>${node.name.slice(0, 8)}</code><small>${node.depth > 0 ? `level ${node.depth + 1}` : node.model}</small></th>
      <td class="right">${number(node.first_token)} to ${number(node.first_token + node.tokens)}</td>
      <td class="right">${node.requests}</td>
      <td class="span"><div class="track"><div class="fill" style=${{ width: `${(100 * node.requests) / most}%` }}></div></div></td>
      <td>${node.held_by.join(", ") || html`<span class="faint">nobody</span>`}</td>
      <td class="right">${duration(Math.max(0, now - node.last_used))} ago</td>
    </tr>`)}</tbody>
  </table></div>`;
}
