// An answer's tokens, coloured by how probable each was; one of them is looked at, by mouse or arrow keys.

import { html, useState } from "./preact.js";
import { percent } from "./format.js";

/** `text`: the answer's; a last token that is not in it, such as the end of the turn, is shown as such. */
export function Tokens({ tokens, text: answered }) {
  const [looked, setLooked] = useState(null);
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    setLooked((at) => Math.min(tokens.length - 1, Math.max(0, at === null ? 0 : at + step)));
  };
  const token = looked === null ? undefined : tokens[looked];
  return html`<div class="tokens" tabindex="0" role="group" aria-label="Answer by tokens; the arrow keys go from one to the next" onKeyDown=${move}>
      ${tokens.map(({ token: text, logprob }, index) => html`<span class="token p${band(logprob)} ${index === looked ? "looked" : ""} ${index === tokens.length - 1 && !answered.endsWith(text) ? "end" : ""}" onMouseEnter=${() => setLooked(index)} onClick=${() => setLooked(index)}>${text}</span>`)}
    </div>
    <div class="alternatives" aria-live="polite">${token ? html`<${Alternatives} token=${token} />` : html`<span class="faint">Point at a token to see what else was likely.</span>`}</div>`;
}

const BANDS = [0.8, 0.5, 0.2, 0.05];

/** 0: hardly surprising, to 4: very. */
function band(logprob) {
  const found = BANDS.findIndex((least) => Math.exp(logprob) >= least);
  return found < 0 ? BANDS.length : found;
}

function Alternatives({ token }) {
  return html`<p><b><code>${shown(token.token)}</code></b> ${percent(Math.exp(token.logprob))} <small>log-probability ${token.logprob.toFixed(3)}</small></p>
    <ol>${token.top.map((each) => html`<li class=${each.token === token.token ? "chosen" : ""}>
      <code>${shown(each.token)}</code><span class="track"><span class="fill" style=${{ width: `${100 * Math.exp(each.logprob)}%` }}></span></span><span>${percent(Math.exp(each.logprob))}</span>
    </li>`)}</ol>`;
}

function shown(text) {
  return text.replaceAll("\n", "↵").replaceAll(" ", "␣") || "∅";
}
