// An event of a run as a sentence, and its group in the filters.

import { shown, size, span } from "./format.js";

const name = (event) => shown(event.island, 60);

const SENTENCES = {
  run_created: () => "the run was created",
  run_founded: (e) => `${name(e) || "a file"} brought the first weights, in ${e.fragments ?? "some"} fragments`,
  coordinator_started: (e) =>
    `the coordinator started at round ${e.round}; the process before it ${e.was_clean ? "ended in order" : "did not end in order"}`,
  coordinator_stopped: (e) => `the coordinator stopped at round ${e.round}`,
  island_joined: (e) => `${name(e)} joined${e.incarnation > 1 ? `, for the ${ordinal(e.incarnation)} time` : ""}`,
  island_taken_over: (e) => `${name(e)} was taken over without its key`,
  island_left: (e) => `${name(e)} left${e.reason && e.reason !== "left" ? `: ${shown(e.reason)}` : ""}`,
  island_forgotten: (e) => `${name(e)} was removed for a new name`,
  island_silent: (e) => `${name(e)} is silent: its lease has expired`,
  island_returned: (e) => `${name(e)} returned`,
  island_paced: (e) => `${name(e)} makes ${e.window} inner steps per window from now on`,
  data_opened: (e) => `the data were described: ${e.rows ?? "an unknown number of"} rows`,
  rows_claimed: (e) => `${name(e)} got ${e.rows} rows`,
  rows_released: (e) => `${e.rows} rows of ${name(e)} are free`,
  round_opened: (e) => `round ${e.round} of fragment ${e.fragment} opened, for ${e.islands} islands`,
  round_closing: (e) =>
    `round ${e.round} of fragment ${e.fragment} closes with ${e.staged} updates` +
    (e.missing?.length ? `, without ${shown(e.missing.join(", "))}` : ""),
  round_committed: (e) =>
    `round ${e.round} of fragment ${e.fragment}: ${e.counted} counted` +
    (e.late ? `, ${e.late} late` : "") +
    (e.refused ? `, ${e.refused} refused` : "") +
    ` (${span(e.seconds)})`,
  update_staged: (e) => `update of ${name(e)} for round ${e.round} of fragment ${e.fragment}: ${size(e.bytes)} after ${span(e.seconds)}`,
  update_refused: (e) => `the update of ${name(e)} for round ${e.round} was refused: ${shown(e.reason)}`,
  update_late: (e) => `${name(e)} was late for round ${e.round} of fragment ${e.fragment}`,
  epoch_set: (e) => `epoch ${e.epoch}: ${assignments(e.values)}`,
  run_paused: () => "an operator paused the run",
  run_resumed: () => "an operator resumed the run",
  run_moving: (e) => `the run moves to ${shown(e.target)}`,
  run_moved: (e) => `the run continues at ${shown(e.target)}`,
  run_stays: () => "the move was cancelled",
  run_stopped: (e) => `an operator stopped the run${e.last_round ? `: round ${e.last_round} is the last` : ""}`,
  run_ended: (e) => `the run ended with round ${e.round}`,
  state_recovered: (e) => `${name(e)} restored round ${e.round} of fragment ${e.fragment}`,
  journal_cut: (e) => `the end of the log was cut off: ${size(e.bytes)} of ${shown(e.file)}`,
  journal_damaged: (e) => shown(e.message, 400),
  holding_refused: (e) => `${name(e)} reported round ${e.round}, which it cannot prove`,
  finding_began: (e) => shown(e.message, 400),
  finding_ended: (e) => `over: ${String(e.kind).replaceAll("_", " ")}${e.island ? ` of ${name(e)}` : ""}`,
  disk_failed: (e) => shown(e.message, 400),
  fault: (e) => `unexpected error: ${shown(e.message, 400)}`,
  audit: (e) =>
    `${shown(e.role || "a stranger", 40)} at ${shown(e.address, 60)}: ${shown(e.action || e.route || e.what, 80)} ${e.answer === "allowed" ? "allowed" : `denied (${String(e.answer).replaceAll("_", " ")})`}` +
    (e.untold ? `, and ${e.untold} similar` : ""),
  loss_reported: (e) => `${name(e)} reported loss ${e.loss_is_finite === false ? "NaN" : (e.loss ?? "–")} at inner step ${e.inner_steps}`,
  anchor_measured: (e) => `${name(e)} measured the anchor of round ${e.round}: ${assignments(e.metrics)}`,
  work_dropped: (e) => `${name(e)} dropped ${e.steps} inner steps`,
  events_dropped: (e) => `${shown(e.sink)} missed ${e.dropped} events: ${shown(e.reason)}`,
};

const GROUPS = {
  trouble: [
    "island_silent", "update_refused", "update_late", "work_dropped", "disk_failed", "fault",
    "journal_cut", "journal_damaged", "holding_refused", "finding_began", "events_dropped",
    "island_taken_over",
  ],
  members: [
    "island_joined", "island_left", "island_silent", "island_returned", "island_forgotten",
    "island_taken_over", "island_paced",
  ],
  rounds: ["round_opened", "round_closing", "round_committed", "update_refused", "update_late"],
  operators: ["epoch_set", "run_paused", "run_resumed", "run_stopped", "run_moving", "audit"],
};

/** Events that are many, and shown only when asked for. */
export const ROUTINE = new Set([
  "loss_reported", "update_staged", "round_opened", "round_closing", "rows_claimed",
  "anchor_measured",
]);

export const FILTERS = ["all", ...Object.keys(GROUPS)];

const ordinal = (n) => ({ 1: "1st", 2: "2nd", 3: "3rd" })[n] ?? `${n}th`;

const assignments = (values) =>
  shown(Object.entries(values ?? {}).map(([key, value]) => `${key} = ${value ?? "none"}`).join(", "));

/** An event as a sentence without a capital. */
export function sentence(event) {
  const make = SENTENCES[event.event];
  return make ? make(event) : shown(event.event).replaceAll("_", " ");
}

export function isIn(event, filter) {
  if (filter === "all") return true;
  if (filter === "operators" && event.event === "audit") return event.action !== undefined;
  return GROUPS[filter].includes(event.event);
}

export function isTrouble(event) {
  return GROUPS.trouble.includes(event.event) && event.severity !== "note";
}
