// The rounds: who counted, how long each took, and when each update arrived.

import { html, useState } from "./vendor/preact-htm.mjs";
import { clock, seconds, shown, size, span, whole } from "./format.js";
import { Dialog, Panel } from "./parts.js";
import { WhoCounted } from "./run.js";

const SHOWN = 40;

export function RoundsPage({ view }) {
  const { past } = view.state;
  const [number, setNumber] = useState(SHOWN);
  const rows = [...past.rounds].reverse();
  return html`
    <${WhoCounted} view=${view} />
    <${RoundTable} view=${view} rows=${rows.slice(0, number)} />
    ${rows.length > number && html`<button class="link" onClick=${() => setNumber(number + 100)}>and ${rows.length - number} earlier rounds</button>`}
    ${view.query.r && html`<${Round} view=${view} />`}`;
}

function RoundTable({ view, rows }) {
  return html`<${Panel} title="Rounds" id="rounds" note="the newest first">
    ${rows.length === 0 && html`<p class="soft">No round has been committed yet.</p>`}
    <div class="scroll"><table class="rounds">
      <caption class="hidden">Committed rounds</caption>
      <thead><tr>${["round", "fragment", "committed", "took", "counted", "late", "refused", "bytes", "digest"].map(
        (name) => html`<th key=${name} scope="col">${name}</th>`,
      )}</tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${`${row.round}/${row.fragment}`} onClick=${() => view.go("rounds", { r: row.round, f: row.fragment })}>
        <th scope="row"><button class="link">${row.round}</button></th>
        <td>${row.fragment}</td>
        <td>${clock(row.committed, view.now)}</td>
        <td>${span(row.seconds)}</td>
        <td>${whole(row.counted)}</td>
        <td class=${row.late ? "wait" : ""}>${row.late || ""}</td>
        <td class=${row.refused ? "bad" : ""}>${row.refused || ""}</td>
        <td>${size(row.bytes)}</td>
        <td><code>${shown((row.digest ?? "").slice(0, 8))}</code></td>
      </tr>`)}</tbody>
    </table></div>
  <//>`;
}

const FATES = { "#": "counted", "~": "late", "!": "refused", ".": "absent" };

function Round({ view }) {
  const { past } = view.state;
  const close = () => view.go("rounds", {});
  const wanted = { round: Number(view.query.r), fragment: Number(view.query.f ?? 0) };
  const title = `Round ${wanted.round}, fragment ${wanted.fragment}`;
  const row = past.rounds.find((each) => each.round === wanted.round && each.fragment === wanted.fragment);
  if (!row) {
    return html`<${Dialog} title=${title} onClose=${close}><p>The arrivals of this round are not kept: those of the last 200 are.</p><//>`;
  }
  const arrivals = Object.entries(row.arrivals).sort((a, b) => (a[1] ?? 0) - (b[1] ?? 0));
  const longest = Math.max(row.seconds ?? 0, ...arrivals.map(([, at]) => at ?? 0), 1e-3);
  const missing = past.names
    .map((name, index) => [name, row.marks?.[index]])
    .filter(([name, mark]) => name !== null && mark && mark !== " " && !(name in row.arrivals));
  return html`<${Dialog} title=${title} onClose=${close}>
    <p>${row.opened ? `Opened ${seconds(row.opened)}, committed` : "Committed"} ${seconds(row.committed)}: it took ${span(row.seconds)}.
      The agreed mean has ${size(row.bytes)}; the digest begins with <code>${shown(row.digest, 16)}</code>.</p>
    <table class="arrivals">
      <caption>Seconds from the opening to the arrival</caption>
      <tbody>
        ${arrivals.map(([name, at]) => html`<tr key=${name}>
          <th scope="row">${shown(name, 30)}</th>
          <td><meter min="0" max=${longest} value=${at ?? 0}></meter></td>
          <td>${span(at)}</td>
          <td class="soft">${FATES[row.marks?.[past.names.indexOf(name)]] ?? ""}</td>
        </tr>`)}
        ${missing.map(([name, mark]) => html`<tr key=${name}>
          <th scope="row">${shown(name, 30)}</th><td></td><td>–</td><td class="wait">${FATES[mark]}</td>
        </tr>`)}
      </tbody>
    </table>
  <//>`;
}
