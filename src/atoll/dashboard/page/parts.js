// Pieces that several pages share.

import { html, useEffect, useRef, useState } from "./vendor/preact-htm.mjs";
import { shown } from "./format.js";

/** A titled panel. */
export const Panel = ({ title, note, tools, children, id }) => html`
  <section class="panel" aria-labelledby=${id}>
    <header>
      <h2 id=${id}>${title}${note && html`<span class="soft"> · ${note}</span>`}</h2>
      ${tools && html`<div class="tools">${tools}</div>`}
    </header>
    ${children}
  </section>`;

/** A row of choices, of which one is taken. */
export const Choice = ({ label, options, value, onChoose }) => html`
  <div class="choice" role="group" aria-label=${label}>
    ${options.map(
      (option) => html`<button key=${option} aria-pressed=${option === value}
        onClick=${() => onChoose(option)}>${option}</button>`,
    )}
  </div>`;

export const Bar = ({ part, label, kind = "ours" }) => html`
  <span class="bar" role="img" aria-label=${label}>
    <progress class=${kind} max="1" value=${Math.max(0, Math.min(1, part ?? 0))}></progress>
  </span>`;

/** A command with a button that copies it. */
export function CommandLine({ text }) {
  const [isCopied, setCopied] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(shown(text, 1000));
    setCopied(true);
    setTimeout(() => setCopied(false), 2000);
  };
  return html`<div class="command">
    <code>${shown(text, 1000)}</code>
    <button class="small" onClick=${copy}>${isCopied ? "copied" : "copy"}</button>
  </div>`;
}

/** A modal dialog; the focus returns when it is closed. */
export function Dialog({ title, onClose, children }) {
  const box = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    box.current.showModal();
    return () => before?.focus?.();
  }, []);
  const outside = (event) => event.target === box.current && onClose();
  return html`<dialog ref=${box} aria-label=${title} onClose=${onClose} onClick=${outside}>
    <div class="inside">
      <header><h2>${title}</h2><button class="small" aria-label="close" onClick=${onClose}>✕</button></header>
      ${children}
    </div>
  </dialog>`;
}

const WORDS = {
  live: ["●", "ok"],
  left: ["○", "soft"],
  silent: ["▲", "bad"],
  seen: ["◌", "soft"],
};

/** The state of an island, by shape and by word. */
export function IslandState({ row, isAwaited }) {
  const [shape, kind] = isAwaited && row.state === "live" ? ["◆", "wait"] : (WORDS[row.state] ?? ["◇", "wait"]);
  const text = isAwaited && row.state === "live" ? "live · awaited" : shown(row.state, 20);
  return html`<span class="state ${kind}"><span aria-hidden="true">${shape}</span> ${text}</span>`;
}

/** Why an island needs a look: lower comes first. */
export function rank(row, awaited) {
  if (row.loss_is_finite === false) return 0;
  if (row.state === "silent") return 1;
  if (row.refused_because) return 2;
  if (awaited.has(row.island)) return 3;
  return row.state === "left" ? 5 : 4;
}

/** Names of the islands that rounds wait for, past their usual time. */
export function awaitedIn(status) {
  return new Set((status.waits_for ?? []).map((wait) => wait.island));
}

/** Whether the run is in a store: only there an observer watches, without a process. */
export const isStore = (status) => status.watched_s !== undefined;
