// The frame: session, top bar, pages, keys. Each page is a module of its own.

import { html, render, useEffect, useState } from "./vendor/preact-htm.mjs";
import { EventsPage } from "./events.js";
import { Feed, redeem } from "./feed.js";
import { clock, share, shown, span } from "./format.js";
import { IslandsPage } from "./islands.js";
import { Bar, Dialog } from "./parts.js";
import { RoundsPage } from "./rounds.js";
import { RunPage, nowText } from "./run.js";
import { SettingsPage } from "./settings.js";

const PAGES = {
  run: ["Run", RunPage],
  islands: ["Islands", IslandsPage],
  rounds: ["Rounds", RoundsPage],
  settings: ["Settings", SettingsPage],
  events: ["Events", EventsPage],
};
const NO_ANSWER_S = 15;
const TICK_MS = 1000;

const here = () => {
  const [, , page] = location.pathname.split("/");
  return { page: page in PAGES ? page : "run", query: Object.fromEntries(new URLSearchParams(location.search)) };
};

const pathOf = (page) => (page === "run" ? "/run" : `/run/${page}`);

/** Go to a page; the address has its state, so that it can be sent and reloaded. */
function go(page, query = {}) {
  const text = new URLSearchParams(query).toString();
  history.pushState(null, "", `${pathOf(page)}${text && `?${text}`}`);
  dispatchEvent(new PopStateEvent("popstate"));
}

const isDark = () =>
  document.documentElement.dataset.theme === "dark" ||
  (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);

function switchTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("atoll-theme", theme);
  } catch {
    // Then it holds for this page.
  }
  dispatchEvent(new Event("theme"));
}

function App({ feed }) {
  const [, redraw] = useState(0);
  // One dialog at a time, owned here: an update of the page must not close it.
  const [dialog, ask] = useState(null);
  const show = (Content, props) => ask({ Content, props });
  useEffect(() => {
    const draw = () => redraw((n) => n + 1);
    feed.onChange = draw;
    feed.run();
    const timer = setInterval(draw, TICK_MS);
    for (const name of ["popstate", "theme", "resize"]) addEventListener(name, draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    addEventListener("keydown", (event) => onKey(event, show));
    return () => clearInterval(timer);
  }, []);
  const { page, query } = here();
  if (!feed.state) return html`<${Start} failure=${feed.failure} />`;
  const silentS = feed.silentS();
  const isStale = silentS !== null && silentS > NO_ANSWER_S;
  const view = {
    state: feed.state,
    now: feed.now(),
    page,
    query,
    go,
    ask: show,
    theme: isDark() ? "dark" : "light",
    isNarrow: innerWidth < 600,
  };
  mark(view, isStale);
  const [, Page] = PAGES[page];
  return html`
    <${TopBar} view=${view} feed=${feed} silentS=${silentS} isStale=${isStale} />
    ${silentS !== null && html`<${NoAnswer} feed=${feed} silentS=${silentS} />`}
    <main class=${isStale ? "stale" : ""}><${Page} view=${view} key=${page} /></main>
    ${dialog && html`<${dialog.Content} view=${view} ...${dialog.props} onClose=${() => ask(null)} />`}`;
}

/** The tab itself shows the state. */
function mark(view, isStale) {
  const { status } = view.state;
  const { kind } = nowText(view.state, view.now);
  const isBad = isStale || (status.findings ?? []).some((row) => row.severity === "bad");
  const of = status.last_round === null ? "" : `/${status.last_round}`;
  document.title = `${status.round}${of} ${shown(status.name, 60)}`;
  const icon = `/page/icon-${isBad ? "bad" : kind === "wait" ? "waits" : "calm"}.svg`;
  const link = document.getElementById("icon");
  if (link.getAttribute("href") !== icon) link.setAttribute("href", icon);
}

function TopBar({ view, silentS, isStale, feed }) {
  const { status } = view.state;
  const now = nowText(view.state, view.now);
  const word = isStale ? "no answer" : status.state === "training" && now.kind === "wait" ? "waits" : status.state;
  const kind = isStale ? "bad" : now.kind;
  const part = progress(status);
  const last = status.last_round === null ? "" : ` of ${status.last_round}`;
  const leftS = status.ends_unix_s && status.ends_unix_s - view.now;
  const ageS = (Date.now() - feed.answeredAt) / 1000;
  return html`<header class="top">
    <${Logo} />
    <strong class="run" title=${shown(status.run)}>${shown(status.name, 40)}</strong>
    <span class="badge ${kind}" role="status">${shown(word, 20)}</span>
    <span class="where">round ${status.round}${last}</span>
    ${part !== null && html`<${Bar} part=${part} label=${share(part)} />`}
    <span class="soft ends">${leftS > 0 && status.state !== "ended" ? `ends in about ${span(leftS)}, at ${clock(status.ends_unix_s, view.now)}` : ""}</span>
    <span class="soft fresh" title="age of the last answer">${silentS === null && ageS < 60 ? `${Math.round(ageS)} s ago` : ""}</span>
    <nav aria-label="Pages">${Object.entries(PAGES).map(([name, [title]]) => html`<a key=${name} href=${pathOf(name)}
      aria-current=${view.page === name ? "page" : undefined}
      onClick=${(event) => { if (!event.metaKey && !event.ctrlKey) { event.preventDefault(); go(name); } }}>${title}</a>`)}</nav>
    <button class="small" aria-label="Light or dark" title="light or dark" onClick=${switchTheme}>${view.theme === "dark" ? "☀" : "☾"}</button>
  </header>`;
}

/** The share of the run that is done; null if it has no end. */
function progress(status) {
  if (status.end_tokens) return status.tokens / status.end_tokens;
  return status.last_round ? status.round / status.last_round : null;
}

const Logo = () => html`<svg class="logo" viewBox="0 0 32 32" aria-hidden="true">
  <circle cx="16" cy="16" r="11" class="ring" />
  ${[[16, 5], [27, 16], [16, 27], [5, 16]].map(([x, y], n) => html`<circle key=${n} cx=${x} cy=${y} r="4.5" class=${n === 3 ? "other" : "isle"} />`)}
</svg>`;

function NoAnswer({ feed, silentS }) {
  const { error } = feed.state;
  const text = error ? shown(error.message, 400) : "The server of this page does not answer: `atoll dashboard` may have ended.";
  return html`<div class="alert" role="alert">
    <b>No answer for ${span(silentS)}.</b> ${text} ${feed.failure?.status === 401 ? shown(feed.failure.message, 200) : "The page asks again, and shows the last values meanwhile."}
  </div>`;
}

function Start({ failure }) {
  if (!failure) return html`<main class="start"><p class="soft">Asking the run…</p></main>`;
  return html`<main class="start"><h1>${failure.status === 401 ? "This page needs a link" : "This page is closed"}</h1>
    <p>${shown(failure.message, 600)}</p></main>`;
}

const Help = ({ onClose }) => html`<${Dialog} title="Keys" onClose=${onClose}>
  <dl class="facts">${[["1 to 5", "the pages"], ["/", "filter"], ["t", "light or dark"], ["Esc", "close"], ["arrows", "walk over the marks"], ["?", "this list"]].map(
    ([key, text]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${text}</dd></div>`,
  )}</dl>
<//>`;

function onKey(event, show) {
  const isTyping = event.target.closest("input, select, textarea, dialog") !== null;
  if (isTyping || event.metaKey || event.ctrlKey || event.altKey) return;
  const page = Object.keys(PAGES)[Number(event.key) - 1];
  if (page) go(page);
  else if (event.key === "?") show(Help, {});
  else if (event.key === "t") switchTheme();
  else if (event.key === "/") {
    const field = document.getElementById("filter");
    if (field) {
      event.preventDefault();
      field.focus();
    }
  }
}

async function main() {
  const feed = new Feed(() => {});
  const root = document.getElementById("app");
  try {
    await redeem();
  } catch (failure) {
    render(html`<${Start} failure=${failure} />`, root);
    return;
  }
  if (location.pathname === "/") history.replaceState(null, "", "/run");
  render(html`<${App} feed=${feed} />`, root);
}

main();
