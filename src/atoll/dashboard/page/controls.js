// Controls: each says what it does, how it is undone, and the command that does the same.

import { html, useEffect, useState } from "./vendor/preact-htm.mjs";
import { call } from "./feed.js";
import { quoted, shown } from "./format.js";
import { CommandLine, Dialog, isStore } from "./parts.js";

const CHECK_MS = 300;

const TEXTS = {
  pause: {
    title: "Pause",
    text: "Rounds stay open; islands train on until their overlap is used up, then wait. Nothing is lost.",
    undo: "Resume undoes it.",
  },
  resume: { title: "Resume", text: "Rounds close again. Islands that waited go on.", undo: "Pause undoes it." },
  save: { title: "Save", text: "Every island saves a checkpoint of its own with its next heartbeat.", undo: "" },
  stop: {
    title: "Stop",
    text: "The open round becomes the last. Islands finish it and leave; the run ends then.",
    undo: "Before it ends, a higher run.end_rounds undoes it.",
    needsName: true,
  },
};

const command = (status, ...words) => ["atoll control", quoted(status.name), ...words].join(" ");

/** The buttons of the run. */
export function Actions({ view }) {
  const { status } = view.state;
  if (status.state === "ended" || status.state === "moved") {
    return html`<p class="soft">The run is over. Take its weights:</p><${CommandLine} text=${`atoll export ${quoted(status.name)} weights.safetensors`} />`;
  }
  const first = status.state === "paused" ? "resume" : "pause";
  return html`<div class="buttons">
    ${[first, "save", "stop"].map((action) => html`<button key=${action} onClick=${() => view.ask(ActionDialog, { action })}>${TEXTS[action].title}…</button>`)}
    <button onClick=${() => view.go("settings")}>Set…</button>
    <${AddButton} view=${view} />
  </div>`;
}

const ActionDialog = ({ view, action, onClose }) => html`<${Question} view=${view} body=${{ action }}
  words=${TEXTS[action]} line=${command(view.state.status, action)} onClose=${onClose} />`;

/** A question before a command, and the answer of the run. */
function Question({ view, body, words, line, onClose, children, isReady = true, label }) {
  const { status } = view.state;
  const [typed, setTyped] = useState("");
  const [phase, setPhase] = useState({ name: "asked", message: "" });
  const wanted = words.needsName === true ? status.name : words.needsName;
  const send = async () => {
    setPhase({ name: "sent", message: "" });
    try {
      const answer = await call("POST", "/api/control", { run: status.run, ...body });
      setPhase({ name: "done", message: answer.message });
    } catch (failure) {
      setPhase({ name: "asked", message: failure.message });
    }
  };
  const isDone = phase.name === "done";
  return html`<${Dialog} title=${words.title} onClose=${onClose}>
    <p>${words.text}</p>
    ${words.undo && html`<p class="soft">${words.undo}</p>`}
    ${children}
    ${wanted && !isDone && html`<label>Type <b>${shown(wanted, 60)}</b> to go on
      <input value=${typed} autocomplete="off" onInput=${(event) => setTyped(event.target.value)} /></label>`}
    <${CommandLine} text=${line} />
    ${phase.message && html`<p role="status" class=${isDone ? "" : "bad"}>${isDone ? "Done: " : ""}${shown(phase.message, 600)}</p>`}
    <div class="buttons end">
      <button onClick=${onClose}>${isDone ? "Close" : "Cancel"}</button>
      ${!isDone && html`<button class="primary" disabled=${!isReady || phase.name === "sent" || (wanted && typed !== wanted)}
        onClick=${send}>${phase.name === "sent" ? "…" : (label ?? words.title)}</button>`}
    </div>
  <//>`;
}

/** Remove an island from the run. */
export const EvictButton = ({ view, island }) => html`<button
  onClick=${() => view.ask(EvictDialog, { island })}>Evict…</button>`;

function EvictDialog({ view, island, onClose }) {
  const { status, islands } = view.state;
  const row = islands.get(island);
  const live = [...islands.values()].filter((each) => each.state === "live" && each.island !== island).length;
  const breaksQuorum = live < status.quorum;
  const words = {
    title: `Evict ${shown(island, 60)}`,
    text:
      "The updates that it has published count. What it has learnt since then is lost" +
      (row?.window ? `: up to ${row.window} inner steps.` : ".") +
      ` ${live} live islands stay; the quorum is ${status.quorum}.` +
      (breaksQuorum ? " No round closes before another island joins." : ""),
    undo: "Started again, it joins as a new incarnation.",
    needsName: breaksQuorum ? island : null,
  };
  return html`<${Question} view=${view} body=${{ action: "evict", island }} words=${words} label="Evict"
    line=${command(status, "evict", quoted(island))} onClose=${onClose} />`;
}

/** Change one setting, in a new epoch. */
export const SetButton = ({ view, row }) => html`<button class="small"
  onClick=${() => view.ask(SetDialog, { row })}>Set…</button>`;

function SetDialog({ view, row, onClose }) {
  const { status } = view.state;
  const [value, setValue] = useState(row.value === "not set" ? "none" : row.value);
  const [check, setCheck] = useState({ isValid: false, message: "" });
  // The epoch that was in force when the dialog opened: a later one is refused.
  const [epoch] = useState(status.epoch);
  useEffect(() => {
    let isCurrent = true;
    const timer = setTimeout(async () => {
      const answer = await checked(row.key, value);
      if (isCurrent) setCheck(answer);
    }, CHECK_MS);
    return () => {
      isCurrent = false;
      clearTimeout(timer);
    };
  }, [value]);
  const words = { title: `Set ${row.key}`, text: row.meaning, undo: `In force ${row.changes === "immediately" ? "at once" : row.changes}. Setting it back undoes it, in another epoch.` };
  const body = { action: "set", values: { [row.key]: value }, if_epoch: epoch };
  return html`<${Question} view=${view} body=${body} words=${words} label=${`Set epoch ${epoch + 1}`} onClose=${onClose}
    isReady=${check.isValid} line=${command(status, "set", quoted(`${row.key}=${value}`))}>
    <label>Now ${shown(row.value, 60)} (epoch ${epoch}); new
      <input value=${value} autocomplete="off" onInput=${(event) => setValue(event.target.value)} /></label>
    <p class=${check.isValid ? "ok" : "bad"} role="status">${check.isValid ? "✓ valid" : shown(check.message, 400)}</p>
    <p class="soft">Values: ${shown(row.values, 200)}</p>
  <//>`;
}

async function checked(key, value) {
  try {
    await call("POST", "/api/check", { values: { [key]: value } });
    return { isValid: true, message: "" };
  } catch (failure) {
    return { isValid: false, message: failure.message };
  }
}

const SHARED = ["sync.sync_every", "sync.num_fragments", "sync.overlap_steps", "wire.up", "wire.down", "sync.adopt"];

/** What another island takes over from the run, and the commands that start one. */
export const AddButton = ({ view }) => html`<button onClick=${() => view.ask(AddDialog, {})}>Add islands…</button>`;

function AddDialog({ view, onClose }) {
  const { status, settings } = view.state;
  const rows = settings.rows.filter((row) => SHARED.includes(row.key));
  const where = isStore(status) ? quoted(status.listening) : quoted(status.name);
  return html`<${Dialog} title="Add islands" onClose=${onClose}>
    <p>They take these from the run, and cannot change them:</p>
    <p>${rows.map((row) => html`<code key=${row.key}>${row.key} = ${shown(row.value, 40)}</code> `)}</p>
    ${isStore(status)
      ? html`<h3>On any machine that may write into the store</h3>
        <${CommandLine} text=${`atoll join ${where} -- python train.py`} />`
      : html`<h3>On another machine</h3>
        <p class="soft">This prints a command to paste there, good once, for an hour:</p>
        <${CommandLine} text=${`atoll invite ${where}`} />
        <h3>On this machine</h3>
        <${CommandLine} text=${`atoll join ${where} -- python train.py`} />`}
    <h3>On an engine</h3>
    <${CommandLine} text=${`atoll launch --on slurm -n 4 ${where} -- python train.py`} />
    <p class="soft">This page starts no programs: paste these into a terminal.</p>
  <//>`;
}
