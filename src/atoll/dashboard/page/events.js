// The events of the run as sentences, newest first, with pages of older ones.

import { html, useState } from "./vendor/preact-htm.mjs";
import { call } from "./feed.js";
import { clock, seconds, shown } from "./format.js";
import { Choice, Panel } from "./parts.js";
import { FILTERS, ROUTINE, isIn, isTrouble, sentence } from "./sentences.js";

const SHOWN = 300;

export function EventsPage({ view }) {
  const { state } = view;
  const [filter, setFilter] = useState("all");
  const [island, setIsland] = useState("");
  const [text, setText] = useState("");
  const [isAll, setAll] = useState(false);
  const [older, setOlder] = useState({ events: [], before: null, isOpen: true });
  const [error, setError] = useState("");
  const [isReading, setReading] = useState(false);
  const more = async () => {
    setReading(true); // a second press would read the same page again
    try {
      setError("");
      setOlder(await page(older, state.events));
    } catch (failure) {
      setError(failure.message);
    }
    setReading(false);
  };
  const events = [...older.events, ...state.events]
    .filter((event) => (isAll || !ROUTINE.has(event.event)) && isIn(event, filter))
    .filter((event) => island === "" || event.island === island)
    .map((event) => [event, sentence(event)])
    .filter(([, words]) => words.toLowerCase().includes(text.toLowerCase()))
    .reverse();
  const tools = html`
    <input type="search" id="filter" placeholder="search…" aria-label="Search in events" value=${text} onInput=${(event) => setText(event.target.value)} />
    <select aria-label="Island" value=${island} onChange=${(event) => setIsland(event.target.value)}>
      <option value="">any island</option>
      ${[...state.islands.keys()].sort().map((name) => html`<option key=${name} value=${name}>${shown(name, 40)}</option>`)}
    </select>
    <${Choice} label="Which events" options=${FILTERS} value=${filter} onChoose=${setFilter} />
    <label class="check"><input type="checkbox" checked=${isAll} onChange=${(event) => setAll(event.target.checked)} /> routine ones too</label>`;
  return html`<${Panel} title="Events" id="events" tools=${tools}>
    <ol class="notes long">
      ${events.slice(0, SHOWN).map(([event, words]) => html`<li key=${`${event.process}/${event.number}`} class=${isTrouble(event) ? "trouble" : ""}>
        <time title=${clock(event.at, view.now)}>${seconds(event.at)}</time> ${words}</li>`)}
    </ol>
    ${events.length === 0 && html`<p class="soft">None of the events read so far.</p>`}
    ${error && html`<p class="bad" role="alert">${error}</p>`}
    ${older.isOpen
      ? html`<button onClick=${more} disabled=${isReading}>Older events</button>`
      : html`<p class="soft">These are all that are kept.</p>`}
  <//>`;
}

/** Return the older events with one more page in front of them. */
async function page(older, events) {
  const first = older.before === null;
  const answer = await call("GET", `/api/events?before=${encodeURIComponent(older.before ?? "")}`);
  const known = new Set([...older.events, ...events].map((event) => `${event.process}/${event.number}`));
  const fresh = answer.events.filter((event) => !known.has(`${event.process}/${event.number}`));
  const next = { events: [...fresh, ...older.events], before: answer.before, isOpen: answer.before !== null };
  // The first page has the events that the feed brought already: take the next one, too.
  return first && fresh.length === 0 && next.isOpen ? page(next, events) : next;
}
