// The settings of the run, read-only but for those that may change, and its epochs.

import { html, useState } from "./vendor/preact-htm.mjs";
import { SetButton } from "./controls.js";
import { clock, quoted, shown } from "./format.js";
import { CommandLine, Panel, isStore } from "./parts.js";

export function SettingsPage({ view }) {
  const [filter, setFilter] = useState("");
  const { settings, status, may } = view.state;
  const matching = settings.rows.filter((row) => `${row.key} ${row.meaning}`.toLowerCase().includes(filter.toLowerCase()));
  const changed = matching.filter((row) => !row.is_default);
  const others = matching.filter((row) => row.is_default);
  const canSet = may.includes("control") && status.state !== "ended";
  const tools = html`<input type="search" id="filter" placeholder="filter…" aria-label="Filter settings" value=${filter}
    onInput=${(event) => setFilter(event.target.value)} />`;
  return html`
    <${Panel} title="Settings" id="settings" tools=${tools} note=${`epoch ${status.epoch}`}>
      <p class="soft">The run owns these; islands take them over and cannot change them. The fingerprint is <code>${shown(settings.fingerprint.slice(0, 12))}</code>.</p>
      <h3>Different from the default</h3>
      <${SettingTable} view=${view} rows=${changed} canSet=${canSet} />
      <details open=${filter !== ""}>
        <summary>${others.length} at their defaults</summary>
        <${SettingTable} view=${view} rows=${others} canSet=${canSet} />
      </details>
    <//>
    <${Epochs} view=${view} />`;
}

function SettingTable({ view, rows, canSet }) {
  if (rows.length === 0) return html`<p class="soft">None.</p>`;
  return html`<div class="scroll"><table class="settings">
    <caption class="hidden">Settings</caption>
    <thead><tr><th scope="col">setting</th><th scope="col">value</th><th scope="col">default</th><th scope="col">meaning</th><th scope="col">changes</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.key}>
      <th scope="row"><code>${row.key}</code></th>
      <td class="value" data-name="value">${shown(row.value, 120)}</td>
      <td class="soft" data-name="default">${row.is_default ? "" : shown(row.default, 60)}</td>
      <td class="meaning" data-name="meaning">${shown(row.meaning, 600)}</td>
      <td data-name="changes">${row.changes === "never"
        ? html`<span class="soft">never</span>`
        : canSet ? html`<${SetButton} view=${view} row=${row} />` : row.changes}</td>
    </tr>`)}</tbody>
  </table></div>`;
}

function Epochs({ view }) {
  const { past, status } = view.state;
  const epochs = past.notes.filter((note) => note.event === "epoch_set").reverse();
  return html`<${Panel} title="Changes during the run" id="epochs">
    ${epochs.length === 0
      ? html`<p class="soft">${isStore(status) ? "A store keeps the values in force, not their times." : "None: these are the settings that the run began with."}</p>`
      : html`<ol class="notes">${epochs.map((note) => html`<li key=${note.number}>
          <time>${clock(note.at, view.now)}</time> epoch ${note.epoch}: ${Object.entries(note.values ?? {}).map(
            ([key, value]) => html`<code key=${key}>${shown(key, 60)} = ${shown(value ?? "none", 60)}</code> `,
          )}</li>`)}</ol>`}
    <${CommandLine} text=${`atoll status ${quoted(status.name)} --settings`} />
  <//>`;
}
