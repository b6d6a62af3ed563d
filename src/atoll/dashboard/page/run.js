// The first page: does it go on, and if not, for whom, since when, and what to do.

import { html, useState } from "./vendor/preact-htm.mjs";
import { Actions, EvictButton } from "./controls.js";
import { LossChart, Marks, lossColumns } from "./charts.js";
import { clock, count, loss, share, shown, size, span } from "./format.js";
import { IslandTable } from "./islands.js";
import { Bar, Choice, CommandLine, Panel } from "./parts.js";
import { isTrouble, sentence } from "./sentences.js";

export function RunPage({ view }) {
  const { state } = view;
  return html`
    <${Now} view=${view} />
    <${Cards} view=${view} />
    <div class="columns">
      <div class="wide">
        <${Loss} view=${view} />
        <${WhoCounted} view=${view} />
        <${Panel} title="Islands" id="islands"><${IslandTable} view=${view} limit=${8} /><//>
      </div>
      <div class="narrow">
        <${OpenRounds} view=${view} />
        <${Happened} view=${view} />
        ${state.may.includes("control") && html`<${Panel} title="Controls" id="controls"><${Actions} view=${view} /><//>`}
      </div>
    </div>`;
}

/** The sentence on top, and what follows from it. */
export function nowText(state, nowS) {
  const { status } = state;
  if (status.state === "ended") {
    return { kind: "soft", title: "The run has ended.", text: `Round ${status.round} was the last.` };
  }
  const awaited = status.waits_for ?? [];
  if (status.state === "paused") {
    return { kind: "wait", title: "Paused by an operator.", text: "Rounds stay open; islands train on until their overlap is used up, then wait." };
  }
  if (awaited.length) return waiting(status, awaited, nowS);
  if (status.why) return { kind: "wait", title: shown(status.why, 300), text: since(status, nowS) };
  const ago = status.last_commit_unix_s && span(nowS - status.last_commit_unix_s);
  const usual = status.usual_round_s ? ` The usual time of a round is ${span(status.usual_round_s)}.` : "";
  return {
    kind: "ours",
    title: status.state === "training" ? "Training." : `${capital(status.state)}.`,
    text: ago ? `The last round was committed ${ago} ago.${usual} Nobody is awaited.` : "",
  };
}

function waiting(status, awaited, nowS) {
  const names = [...new Set(awaited.map((wait) => wait.island))];
  const few = names.slice(0, 3).map((name) => shown(name, 40)).join(", ");
  const [first] = awaited;
  const sinceS = first.since_s + (nowS - status.now_unix_s);
  const open = (status.open ?? []).find((row) => row.fragment === first.fragment);
  const held = open ? `${open.staged.length} of ${open.staged.length + open.awaited.length} updates are here. ` : "";
  const leftS = open?.closes_unix_s ? open.closes_unix_s - nowS : null;
  const closes = leftS === null ? "" : leftS > 0
    ? `It closes by itself in ${span(Math.ceil(leftS))}; late work is carried into the next round.`
    : "It is closing now.";
  return {
    kind: "wait",
    title: `Waits for ${few}${names.length > 3 ? ` and ${names.length - 3} more` : ""}, for ${span(sinceS)}`,
    text: `Fragment ${first.fragment}, round ${first.round}: ${held}${closes}`,
    island: names.length === 1 ? names[0] : null,
  };
}

const since = (status, nowS) =>
  status.since_unix_s ? `For ${span(nowS - status.since_unix_s)} now.` : "";
const capital = (text) => shown(text[0].toUpperCase() + text.slice(1), 40);

function Now({ view }) {
  const { state } = view;
  const now = nowText(state, view.now);
  const findings = (state.status.findings ?? []).filter((row) => row.severity !== "note" || row.kind !== "ends_soon");
  const dropped = [...state.islands.values()].reduce((sum, row) => sum + (row.dropped_steps ?? 0), 0);
  const worst = findings.some((row) => row.severity === "bad") ? "bad" : now.kind;
  const canEvict = now.island && state.may.includes("control");
  return html`<section class="now ${worst}" aria-label="What now">
    <div class="words">
      <h1 aria-live="polite">${now.title}</h1>
      <p>${now.text}${now.kind === "wait" && dropped === 0 && " No work has been dropped."}</p>
      ${dropped > 0 && html`<p class="bad">Islands have dropped ${dropped} inner steps so far.</p>`}
      ${state.status.cure && html`<p>${shown(state.status.cure, 400)}</p>`}
      <ul class="findings">${findings.map((row) => html`<${Finding} key=${row.kind + row.island} row=${row} />`)}</ul>
    </div>
    ${canEvict && html`<${EvictButton} view=${view} island=${now.island} />`}
  </section>`;
}

const Finding = ({ row }) => html`<li class=${row.severity}>
  <details>
    <summary>${shown(row.message, 300)}</summary>
    <p>${shown(row.remedy, 400)}</p>
    ${row.command && html`<${CommandLine} text=${row.command} />`}
  </details>
</li>`;

function Cards({ view }) {
  const { status, islands, past } = view.state;
  const rows = [...islands.values()];
  const live = rows.filter((row) => row.state === "live").length;
  const silent = rows.filter((row) => row.state === "silent").length;
  const agreement = status.agreement;
  const { main, isAnchor } = lossColumns(past, "rounds");
  const known = main.filter((value) => value !== null);
  const reported = rows.filter((row) => row.state !== "left" && typeof row.loss === "number");
  const mean = known.at(-1) ?? (reported.length ? reported.reduce((sum, row) => sum + row.loss, 0) / reported.length : null);
  const isFinite = !rows.some((row) => row.loss_is_finite === false);
  const traffic = rows.reduce((sum, row) => sum + (row.bytes_up ?? 0) + (row.bytes_down ?? 0), 0);
  const tokens = status.end_tokens ? `of ${count(status.end_tokens)}` : "all islands";
  const data = status.data?.trained_share;
  return html`<section class="cards" aria-label="Figures">
    <${Card} name=${isAnchor ? "held-out loss" : "loss"} value=${loss(mean, isAnchor || isFinite)}
      text=${isAnchor ? "of the anchor" : "mean of the islands' own batches"} />
    <${Card} name="tokens" value=${count(status.tokens)}
      text=${status.tokens_per_s && status.state !== "ended" ? `${count(status.tokens_per_s)}/s, ${tokens}` : tokens} />
    <${Card} name="utilisation" value=${share(status.utilisation)} text="last 10 rounds; the rest is waiting" />
    <${Card} name="islands" value=${`${live} of ${rows.length}`}
      text=${`quorum ${status.quorum}${silent ? `, ${silent} silent` : ""}`} kind=${silent ? "wait" : ""} />
    ${agreement
      ? html`<${Card} name="same anchor" value=${`${agreement.holding} of ${agreement.of}${agreement.apart.length ? "" : " ✓"}`}
          text=${agreement.apart.length ? `apart: ${shown(agreement.apart.join(", "), 60)}` : `${shown(agreement.digest.slice(0, 8))}, round ${agreement.round}`}
          kind=${agreement.apart.length ? "bad" : ""} />`
      : html`<${Card} name="same anchor" value="–" text="not known yet" />`}
    ${data === undefined || data === null
      ? html`<${Card} name="traffic" value=${size(traffic)} text="up and down, all islands" />`
      : html`<${Card} name="rows" value=${share(data)} text="of the data are trained" />`}
  </section>`;
}

const Card = ({ name, value, text, kind = "" }) => html`<div class="card">
  <div class="name">${name}</div>
  <div class="value ${kind}">${value}</div>
  <div class="soft">${text}</div>
</div>`;

function Loss({ view }) {
  const { past } = view.state;
  const [axis, setAxis] = useState("tokens");
  const [scale, setScale] = useState("linear");
  const [chosen, setChosen] = useState("");
  const { names, isAnchor } = lossColumns(past, axis);
  const diverged = Object.entries(past.islands).filter(([, island]) => island.not_finite?.length);
  const tools = html`
    <select aria-label="Island to colour" value=${chosen} onChange=${(event) => setChosen(event.target.value)}>
      <option value="">all islands</option>
      ${names.map((name) => html`<option key=${name} value=${name}>${shown(name, 40)}</option>`)}
    </select>
    <${Choice} label="Axis" options=${["tokens", "time", "rounds"]} value=${axis} onChoose=${setAxis} />
    <${Choice} label="Scale" options=${["linear", "log"]} value=${scale} onChoose=${setScale} />`;
  return html`<${Panel} title="Loss" id="loss" tools=${tools}
    note=${isAnchor ? "thick: the anchor on held-out text; thin: each island's own batches" : "thick: mean; thin: each island's own batches"}>
    ${past.at.length < 2
      ? html`<p class="soft">No loss has been reported yet.</p>`
      : html`<${LossChart} past=${past} axis=${axis} isLog=${scale === "log"} chosen=${chosen}
          height=${view.isNarrow ? 190 : 220} theme=${view.theme} />`}
    ${diverged.length > 0 && html`<p class="bad">Not a number at times: ${shown(diverged.map(([name]) => name).join(", "), 200)}</p>`}
    ${past.isFromStart === false && html`<p class="soft">The past is known from ${clock(past.firstUnixS, view.now)} on.</p>`}
  <//>`;
}

export function WhoCounted({ view, limit }) {
  const { past, status } = view.state;
  const [fragment, setFragment] = useState("all");
  const number = Math.min(12, (status.rounds ?? []).length);
  const tools = number > 1 && html`<${Choice} label="Fragment" value=${fragment} onChoose=${setFragment}
    options=${["all", ...Array.from({ length: number }, (_, n) => String(n))]} />`;
  return html`<${Panel} title="Who counted" id="marks" note="a column is one round of a fragment" tools=${tools}>
    ${past.marks.length === 0
      ? html`<p class="soft">No round has been committed yet.</p>`
      : html`<${Marks} past=${past} theme=${view.theme} limit=${limit}
          fragment=${fragment === "all" ? null : Number(fragment)} onRound=${(column) => view.go("rounds", { r: column[0], f: column[1] })} />`}
    <p class="legend soft"><span class="key counted"></span> counted <span class="key late"></span> late <span class="key refused">✕</span> refused <span class="key absent"></span> absent</p>
  <//>`;
}

function OpenRounds({ view }) {
  const { status } = view.state;
  if (!status.open) return null;
  const rows = status.open.slice(0, 12);
  return html`<${Panel} title="Open rounds" id="open">
    ${rows.length === 0 && html`<p class="soft">None.</p>`}
    ${rows.map((row) => {
      const all = row.staged.length + row.awaited.length;
      const leftS = row.closes_unix_s && row.closes_unix_s - view.now;
      const text = row.awaited.length ? `${row.staged.length} of ${all}` : "closing";
      const isLate = leftS !== null && leftS < 0;
      return html`<div class="open" key=${row.fragment}>
        <div>fragment ${row.fragment} · round ${row.round} · ${text}${leftS > 0 && html`<span class="soft"> · closes in ${span(Math.ceil(leftS))}</span>`}</div>
        <${Bar} part=${all ? row.staged.length / all : 0} kind=${isLate ? "wait" : "ours"} label=${text} />
      </div>`;
    })}
  <//>`;
}

function Happened({ view }) {
  const notes = [...view.state.past.notes, ...view.state.events.filter((event) => event.event === "finding_began")]
    .filter((note) => note.event !== "audit" || note.answer !== "allowed")
    .sort((a, b) => b.at - a.at)
    .slice(0, 8);
  return html`<${Panel} title="What happened" id="happened">
    <ol class="notes">
      ${notes.map((note) => html`<li key=${note.number + note.event} class=${isTrouble(note) ? "trouble" : ""}>
        <time>${clock(note.at, view.now)}</time> ${sentence(note)}
      </li>`)}
    </ol>
    ${notes.length === 0 && html`<p class="soft">Nothing unusual.</p>`}
    <button class="link" onClick=${() => view.go("events")}>All events</button>
  <//>`;
}

