// The session, the requests, and the state of the run in this page.

const KEY = "atoll-session";
const PAUSES_S = [1, 2, 5, 10];
const HIDDEN_S = 60;
const MAX_EVENTS = 1000;

export class Failure extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const stored = () => {
  try {
    return localStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
};

let session = stored();

function keep(secret) {
  session = secret;
  try {
    localStorage.setItem(KEY, secret);
  } catch {
    // Then the session ends with this page.
  }
}

/** Send a request with the session; return the JSON of its answer. */
export async function call(method, path, body, signal) {
  const headers = { Authorization: `Atoll-Session ${session}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const reply = await fetch(path, {
    method,
    headers,
    signal,
    cache: "no-store",
    credentials: "omit",
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const answer = await reply.text().then(parsed).catch(() => ({}));
  if (!reply.ok) {
    throw new Failure(reply.status, answer.error ?? "", answer.message ?? reply.statusText);
  }
  return answer;
}

/** Return JSON without keys that Preact takes for those of its own elements. */
function parsed(text) {
  return JSON.parse(text, (key, value) => (key.startsWith("__") ? undefined : value));
}

/** Exchange the code of the link, if there is one, for a session. */
export async function redeem() {
  const code = new URLSearchParams(location.hash.slice(1)).get("c");
  if (!code) return;
  // The code is used now: it must not stay in the history.
  history.replaceState(null, "", location.pathname + location.search);
  const answer = await call("POST", "/api/session", { code });
  keep(answer.session);
}

/** The state of a page: what the run answered, and how fresh it is. */
export class Feed {
  constructor(onChange) {
    this.onChange = onChange;
    this.state = null;
    this.failure = null;
    this.offsetS = 0;
    this.answeredAt = 0;
    this.lostAt = null;
    this.attempt = 0;
    this.abort = null;
    this.hiddenAt = null;
  }

  /** Seconds since 1970 by the clock of the machine that serves the page. */
  now() {
    return Date.now() / 1000 + this.offsetS;
  }

  /** Seconds that the run, or our server, has not answered for; null if it does. */
  silentS() {
    if (this.state?.error) return this.now() - this.state.error.since_unix_s;
    return this.lostAt === null ? null : (Date.now() - this.lostAt) / 1000;
  }

  async run() {
    document.addEventListener("visibilitychange", () => this.visible());
    for (;;) {
      try {
        await this.turn();
        this.attempt = 0;
        this.lostAt = null;
        this.failure = null;
      } catch (error) {
        if (error.name === "AbortError") continue;
        this.failure = error;
        this.lostAt ??= Date.now();
        if (error.status === 401 || error.status === 403) {
          this.onChange();
          return;
        }
        this.onChange();
        const pause = PAUSES_S[Math.min(this.attempt, PAUSES_S.length - 1)];
        this.attempt += 1;
        await new Promise((resolve) => setTimeout(resolve, 1000 * pause));
      }
    }
  }

  async turn() {
    if (this.isAsleep()) {
      await new Promise((resolve) => {
        this.wake = resolve;
      });
    }
    this.abort = new AbortController();
    if (this.state === null) {
      this.begin(await call("GET", "/api/first", undefined, this.abort.signal));
    } else {
      const path = `/api/feed?after=${this.state.version}`;
      const news = await call("GET", path, undefined, this.abort.signal);
      if (news.is_lost) {
        this.begin(await call("GET", "/api/first", undefined, this.abort.signal));
      } else {
        this.take(news);
      }
    }
  }

  isAsleep() {
    return this.hiddenAt !== null && Date.now() - this.hiddenAt > 1000 * HIDDEN_S;
  }

  visible() {
    this.hiddenAt = document.hidden ? (this.hiddenAt ?? Date.now()) : null;
    if (!document.hidden) this.wake?.();
  }

  begin(first) {
    const islands = new Map(first.status.islands.map((row) => [row.island, row]));
    this.state = { ...first, islands, past: emptyPast(), history: null };
    for (const news of first.history) addHistory(this.state.past, news);
    this.fresh(first);
  }

  take(news) {
    const state = this.state;
    state.version = news.version;
    state.error = news.error;
    Object.assign(state.status, news.status);
    for (const name of news.removed) state.islands.delete(name);
    for (const [name, changes] of Object.entries(news.islands)) {
      state.islands.set(name, { ...state.islands.get(name), ...changes });
    }
    for (const history of news.history) addHistory(state.past, history);
    const before = news.has_all_events ? [] : state.events;
    state.events = [...before, ...news.events].slice(-MAX_EVENTS);
    if (news.settings) state.settings = news.settings;
    this.fresh(news);
  }

  fresh(answer) {
    this.offsetS = answer.now_unix_s - Date.now() / 1000;
    if (!answer.error) this.answeredAt = Date.now();
    this.onChange();
  }
}

function emptyPast() {
  return {
    revision: 0,
    perRow: 1,
    at: [],
    round: [],
    tokens: [],
    islands: {},
    anchor: {},
    marks: [],
    names: [],
    rounds: [],
    notes: [],
  };
}

/** Add an answer of `/history` to the past; a whole one replaces it. */
export function addHistory(past, news) {
  if (news.is_whole) Object.assign(past, emptyPast(), { revision: past.revision });
  past.revision += 1;
  past.isFromStart = news.is_from_start;
  past.firstUnixS = news.first_unix_s;
  addCurves(past, news.curves);
  past.names = news.marks.islands;
  past.marks = [...past.marks, ...news.marks.columns].slice(-1024);
  past.rounds = [...past.rounds, ...news.rounds].slice(-400);
  past.notes = [...past.notes, ...news.notes].slice(-1000);
}

function addCurves(past, curves) {
  if (curves.at.length === 0) {
    past.anchor = curves.anchor;
    return;
  }
  // The last row may have grown: it comes again, at its old index. After rows were
  // thinned out on the way, indexes differ, and the time tells.
  const isSame = past.perRow === curves.per_row;
  const byTime = past.at.findIndex((at) => at >= curves.at[0]);
  const first = isSame ? curves.from : byTime < 0 ? past.at.length : byTime;
  past.perRow = past.at.length === 0 ? curves.per_row : past.perRow;
  for (const key of ["at", "round", "tokens"]) {
    past[key] = [...past[key].slice(0, first), ...curves[key]];
  }
  past.anchor = curves.anchor;
  const names = new Set([...Object.keys(past.islands), ...Object.keys(curves.islands)]);
  for (const name of names) {
    const old = past.islands[name] ?? {};
    const added = curves.islands[name] ?? {};
    const before = padded((old.loss ?? []).slice(0, first), first);
    past.islands[name] = { loss: before.concat(padded(added.loss ?? [], curves.at.length)) };
    const kept = (old.not_finite ?? []).filter((row) => row < first);
    const fresh = (added.not_finite ?? []).map((row) => row + first);
    past.islands[name].not_finite = [...kept, ...fresh];
  }
}

const padded = (values, length) =>
  values.length < length ? [...values, ...Array(length - values.length).fill(null)] : values;
