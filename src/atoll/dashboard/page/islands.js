// The islands: a table that begins with those that need a look, and one island.

import { html, useState } from "./vendor/preact-htm.mjs";
import { Spark } from "./charts.js";
import { AddButton, EvictButton } from "./controls.js";
import { clock, count, loss, quoted, share, shown, size, span, whole } from "./format.js";
import { Bar, Choice, CommandLine, Dialog, IslandState, Panel, awaitedIn, rank } from "./parts.js";
import { isTrouble, sentence } from "./sentences.js";

const HOUR_S = 3600;
const SHOWN = 60;

const COLUMNS = [
  ["island", (row) => row.island],
  ["state", null],
  ["round", (row) => row.round],
  ["loss", (row) => row.loss],
  ["last hour", null],
  ["busy", (row) => row.utilisation],
  ["counted", (row) => row.counted],
  ["late", (row) => row.late],
  ["refused", (row) => row.refused],
  ["tokens/s", (row) => row.tokens_per_s],
  ["up / down", (row) => (row.bytes_up ?? 0) + (row.bytes_down ?? 0)],
];

export function IslandsPage({ view }) {
  const [filter, setFilter] = useState("");
  const [kind, setKind] = useState("all");
  const tools = html`
    <input type="search" id="filter" placeholder="filter…" aria-label="Filter by name" value=${filter}
      onInput=${(event) => setFilter(event.target.value)} />
    <${Choice} label="Which islands" options=${["all", "silent", "late", "refused"]} value=${kind} onChoose=${setKind} />
    ${view.state.may.includes("control") && html`<${AddButton} view=${view} />`}`;
  return html`<${Panel} title="Islands" id="islands" tools=${tools}>
    <${IslandTable} view=${view} filter=${filter} kind=${kind} />
  <//>`;
}

/** Losses of the last hour, or of the last rows if nobody has reported for so long. */
export function recentLosses(past, name) {
  const losses = past.islands[name]?.loss ?? [];
  const from = past.at.findIndex((at) => at >= (past.at.at(-1) ?? 0) - HOUR_S);
  return losses.slice(Math.max(0, Math.min(from, losses.length - 24))).slice(-60);
}

const IS = {
  all: () => true,
  silent: (row) => row.state === "silent",
  late: (row) => row.late > 0,
  refused: (row) => row.refused > 0,
};

export function IslandTable({ view, filter = "", kind = "all", limit = Infinity }) {
  const [sort, setSort] = useState({ column: null, isDown: true });
  const [number, setNumber] = useState(SHOWN);
  const awaited = awaitedIn(view.state.status);
  const key = COLUMNS.find(([name]) => name === sort.column)?.[1];
  const rows = [...view.state.islands.values()]
    .filter((row) => IS[kind](row) && row.island.toLowerCase().includes(filter.toLowerCase()))
    .sort(key ? by(key, sort.isDown) : (a, b) => rank(a, awaited) - rank(b, awaited) || names(a, b));
  const most = Math.min(limit, number);
  const some = rows.slice(0, most);
  const toggle = (name) => setSort({ column: name, isDown: sort.column === name ? !sort.isDown : true });
  if (rows.length === 0) return html`<p class="soft">${view.state.islands.size ? "No island is like that." : "No island has joined yet."}</p>`;
  return html`
    <div class="scroll"><table class="islands">
      <caption class="hidden">Islands, those that need a look first</caption>
      <thead><tr>${COLUMNS.map(([name, read]) => {
        const order = sort.column !== name ? undefined : sort.isDown ? "descending" : "ascending";
        return html`<th key=${name} scope="col" aria-sort=${order}>${read && limit === Infinity
          ? html`<button class="head" onClick=${() => toggle(name)}>${name}${order && (sort.isDown ? " ▾" : " ▴")}</button>`
          : name}</th>`;
      })}</tr></thead>
      <tbody>${some.map((row) => html`<${IslandRow} key=${row.island} view=${view} row=${row} isAwaited=${awaited.has(row.island)} />`)}</tbody>
    </table></div>
    ${rows.length > most && html`<button class="link" onClick=${() => (limit < Infinity ? view.go("islands") : setNumber(number + 200))}>
      and ${rows.length - most} more</button>`}
    ${view.query.island && html`<${Island} view=${view} name=${view.query.island} />`}`;
}

const by = (key, isDown) => (a, b) => {
  const [x, y] = isDown ? [key(b), key(a)] : [key(a), key(b)];
  return typeof x === "string" ? x.localeCompare(y) : (x ?? -Infinity) - (y ?? -Infinity);
};
const names = (a, b) => a.island.localeCompare(b.island, "en", { numeric: true });

function IslandRow({ view, row, isAwaited }) {
  const { past } = view.state;
  const open = () => view.go(view.page, { island: row.island });
  const losses = recentLosses(past, row.island);
  return html`<tr onClick=${open}>
    <th scope="row"><button class="link" title=${shown(row.island)}>${shown(row.island, 40)}</button></th>
    <td data-name="state"><${IslandState} row=${row} isAwaited=${isAwaited} />${row.state === "silent" && row.seen_s ? html` <span class="soft">${span(row.seen_s)}</span>` : null}</td>
    <td data-name="round">${whole(row.round)}</td>
    <td data-name="loss" class=${row.loss_is_finite === false ? "bad" : ""}>${loss(row.loss, row.loss_is_finite)}</td>
    <td data-name="last hour"><${Spark} values=${losses} label=${`loss of ${shown(row.island, 40)}`} /></td>
    <td data-name="busy" class="busy">${row.utilisation === null || row.utilisation === undefined
      ? "–" : html`<${Bar} part=${row.utilisation} kind=${row.utilisation < 2 / 3 ? "wait" : "ours"} label=${share(row.utilisation)} /> ${share(row.utilisation)}`}</td>
    <td data-name="counted">${whole(row.counted)}</td>
    <td data-name="late">${row.late || ""}</td>
    <td data-name="refused" class=${row.refused ? "bad" : ""}>${row.refused || ""}</td>
    <td data-name="tokens/s">${count(row.tokens_per_s)}</td>
    <td data-name="up / down">${size(row.bytes_up)} / ${size(row.bytes_down)}</td>
  </tr>`;
}

function Island({ view, name }) {
  const row = view.state.islands.get(name);
  const close = () => view.go(view.page, {});
  if (!row) return html`<${Dialog} title=${shown(name, 60)} onClose=${close}><p>This island is not in the run.</p><//>`;
  const { past, status } = view.state;
  const notes = past.notes.filter((note) => note.island === name).slice(-6).reverse();
  const busy = past.islands[name];
  const facts = [
    ["state", html`<${IslandState} row=${row} isAwaited=${awaitedIn(status).has(name)} />`],
    ["incarnation", whole(row.incarnation)],
    ["Atoll", shown(row.version, 30)],
    ["last word", row.as_of_unix_s ? `${span(view.now - row.as_of_unix_s)} ago` : "–"],
    ["inner step", row.step_s ? span(row.step_s) : "–"],
    ["inner steps", count(row.inner_steps)],
    ["inner steps per window", whole(row.window)],
    ["tokens", count(row.tokens)],
    ["waited", row.wait_s === null ? "–" : `${span(row.wait_s)} (${share(row.wait_share)})`],
    ["share of the last mean", share(row.share)],
    ["dropped inner steps", whole(row.dropped_steps)],
    ["deaths", whole(row.deaths)],
    ...Object.entries(row.metrics ?? {}).map(([key, value]) => [shown(key, 64), Number(value).toPrecision(4)]),
  ];
  return html`<${Dialog} title=${shown(name, 60)} onClose=${close}>
    <p class="strip" aria-label="Last marks">${lastMarks(past, name)}</p>
    <${Spark} values=${(busy?.loss ?? []).slice(-200)} label="loss" />
    <dl class="facts">${facts.map(([key, value]) => html`<div key=${key}><dt>${key}</dt><dd>${value}</dd></div>`)}</dl>
    ${row.refused_because && html`<p class="bad">Refused: ${shown(row.refused_because, 400)}</p>`}
    ${notes.length > 0 && html`<ol class="notes">${notes.map((note) => html`<li key=${note.number} class=${isTrouble(note) ? "trouble" : ""}>
      <time>${clock(note.at, view.now)}</time> ${sentence(note)}</li>`)}</ol>`}
    <${CommandLine} text=${`atoll logs ${quoted(status.name)} ${quoted(name)}`} />
    <p class="soft">if it was launched from your machine</p>
    ${view.state.may.includes("control") && row.state !== "left" && html`<${EvictButton} view=${view} island=${name} />`}
  <//>`;
}

const SYMBOLS = { "#": "■", "~": "◢", "!": "✕", ".": "·" };

function lastMarks(past, name) {
  const index = past.names.indexOf(name);
  if (index < 0) return "";
  return past.marks.slice(-40).map((column) => SYMBOLS[column[3][index]] ?? " ").join("");
}
