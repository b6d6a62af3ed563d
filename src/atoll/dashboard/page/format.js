// Numbers, spans and times as text. Unknown is "–", never 0.

export const UNKNOWN = "–";

const isKnown = (value) => typeof value === "number" && Number.isFinite(value);

/** 4 min 12 s; 2 d 9 h; 0.8 s. */
export function span(seconds) {
  if (!isKnown(seconds)) return UNKNOWN;
  const total = Math.max(0, seconds);
  if (total < 10) return `${total < 1 ? total.toFixed(1) : trim(total.toFixed(1))} s`;
  const s = Math.round(total);
  if (s < 60) return `${s} s`;
  if (s < 3600) return two(Math.floor(s / 60), "min", s % 60, "s");
  if (s < 86400) return two(Math.floor(s / 3600), "h", Math.floor((s % 3600) / 60), "min");
  return two(Math.floor(s / 86400), "d", Math.floor((s % 86400) / 3600), "h");
}

const two = (first, unit, second, smaller) =>
  second ? `${first} ${unit} ${second} ${smaller}` : `${first} ${unit}`;

const trim = (text) => text.replace(/\.0$/, "");

function scaled(value, base, units) {
  let unit = 0;
  let size = value;
  while (Math.abs(size) >= base && unit < units.length - 1) {
    size /= base;
    unit += 1;
  }
  const text = size.toFixed(unit === 0 || Math.abs(size) >= 10 ? 0 : 1);
  return `${trim(text)} ${units[unit]}`.trim();
}

/** 6.2 B; 352 k; 48. */
export const count = (value) =>
  isKnown(value) ? scaled(value, 1000, ["", "k", "M", "B", "T"]) : UNKNOWN;

/** 12 MB. */
export const size = (bytes) =>
  isKnown(bytes) ? scaled(bytes, 1000, ["B", "kB", "MB", "GB", "TB", "PB"]) : UNKNOWN;

/** 94 %. */
export const share = (value) =>
  isKnown(value) ? `${Math.round(100 * value)} %` : UNKNOWN;

/** 1.457; NaN is said. */
export function loss(value, isFinite = true) {
  if (isFinite === false) return "NaN";
  if (!isKnown(value)) return UNKNOWN;
  return Math.abs(value) >= 100 ? value.toPrecision(4) : value.toFixed(3);
}

export const whole = (value) => (isKnown(value) ? String(value) : UNKNOWN);

/** 08:14, or Mon 08:14 if it is another day than `now`. */
export function clock(unixS, now = Date.now() / 1000) {
  if (!isKnown(unixS)) return UNKNOWN;
  const date = new Date(unixS * 1000);
  const time = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
  const isToday = date.toDateString() === new Date(now * 1000).toDateString();
  const isNear = Math.abs(unixS - now) < 6 * 86400;
  if (isToday) return time;
  const day = isNear ? { weekday: "short" } : { day: "numeric", month: "short" };
  return `${date.toLocaleDateString([], day)} ${time}`;
}

/** 08:14:02. */
export const seconds = (unixS) =>
  new Date(unixS * 1000).toLocaleTimeString([], { hour12: false });

// Control characters, and those that change the direction of the text around them.
const UNPRINTABLE = /[\u0000-\u001f\u007f-\u009f\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

/** Text from a run, which may be hostile: without control characters, and bounded. */
export function shown(text, limit = 200) {
  const clean = String(text ?? "").replace(UNPRINTABLE, "\ufffd");
  return clean.length > limit ? `${clean.slice(0, limit - 1)}…` : clean;
}

/** A word as a shell takes it. */
export const quoted = (text) =>
  /^[A-Za-z0-9@%+=:,./_-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;
