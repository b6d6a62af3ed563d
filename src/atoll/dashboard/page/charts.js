// Curves by uPlot, the matrix of marks on a canvas, sparklines as SVG.

import { html, useEffect, useRef, useState } from "./vendor/preact-htm.mjs";
import { clock, count, loss, shown } from "./format.js";

export const MAX_LINES = 24;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Columns of the loss chart over one axis: [x, anchor or mean, ...islands]. */
export function lossColumns(past, axis) {
  const x = { tokens: past.tokens, time: past.at, rounds: past.round }[axis];
  const names = Object.keys(past.islands).sort();
  const rows = x.map((_, row) => row).filter((row) => x[row] !== null);
  const lines = names.map((name) => rows.map((row) => past.islands[name].loss[row] ?? null));
  const anchor = anchorPoints(past);
  const isAnchor = anchor !== null;
  const main = isAnchor ? rows.map((row) => anchor[row]) : meanOf(lines, rows.length);
  const increasing = rows.map((row) => x[row]);
  return { x: increasing, main, isAnchor, names, lines };
}

/** The measurements of the anchor at the rows of the curves; null without any. */
function anchorPoints(past) {
  const points = past.anchor.loss ?? past.anchor.eval_loss ?? Object.values(past.anchor)[0];
  if (!points?.length) return null;
  const values = past.round.map(() => null);
  let row = 0;
  for (const [round, value] of points) {
    while (row < past.round.length - 1 && (past.round[row] ?? -1) < round) row += 1;
    values[row] = value;
  }
  return values;
}

function meanOf(lines, length) {
  return Array.from({ length }, (_, row) => {
    const values = lines.map((line) => line[row]).filter((value) => value !== null);
    return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
  });
}

function bandOf(lines, length) {
  const edge = (pick) =>
    Array.from({ length }, (_, row) => {
      const values = lines.map((line) => line[row]).filter((value) => value !== null);
      return values.length ? pick(...values) : null;
    });
  return [edge(Math.min), edge(Math.max)];
}

const ticks = { tokens: count, time: clock, rounds: String };

/** Loss of the anchor, thick, over that of the islands, thin. */
export function LossChart({ past, axis, isLog, chosen, height, theme }) {
  const holder = useRef(null);
  const plot = useRef(null);
  const columns = lossColumns(past, axis);
  const isBand = columns.lines.length > MAX_LINES;
  const lines = isBand ? bandOf(columns.lines, columns.x.length) : columns.lines;
  const data = [columns.x, ...lines, columns.main];
  const marks = epochLines(past, axis);
  const shape = `${axis} ${isLog} ${columns.names.join("\n")} ${isBand} ${chosen} ${theme}`;
  useEffect(() => {
    const width = holder.current.clientWidth;
    const names = isBand ? ["lowest", "highest"] : columns.names;
    plot.current = new window.uPlot(
      options({ axis, isLog, names, chosen, width, height, isBand }),
      data,
      holder.current,
    );
    const observer = new ResizeObserver(() => {
      plot.current?.setSize({ width: holder.current.clientWidth, height });
    });
    observer.observe(holder.current);
    return () => {
      observer.disconnect();
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    plot.current.epochs = marks;
    plot.current.setData(data);
  }, [past.revision, shape]);
  return html`<div class="plot" ref=${holder} role="img" aria-label=${lossSentence(columns)}></div>`;
}

/** The chart in one sentence. */
export function lossSentence({ main, isAnchor, names }) {
  const known = main.filter((value) => value !== null);
  if (!known.length) return "No loss is known yet.";
  const subject = isAnchor ? "The loss of the anchor" : `The mean loss of ${names.length} islands`;
  return `${subject} went from ${loss(known[0])} to ${loss(known.at(-1))}.`;
}

function epochLines(past, axis) {
  return past.notes
    .filter((note) => note.event === "epoch_set")
    .map((note) => {
      const row = past.at.findIndex((at) => at >= note.at);
      const x = { tokens: past.tokens, time: past.at, rounds: past.round }[axis];
      const [key, value] = Object.entries(note.values ?? {})[0] ?? ["", ""];
      return { x: x[row < 0 ? x.length - 1 : row], text: shown(`${key} ${value}`, 40) };
    })
    .filter((line) => line.x !== undefined && line.x !== null);
}

function options({ axis, isLog, names, chosen, width, height, isBand }) {
  const soft = css("--soft");
  const font = "11.5px system-ui, sans-serif";
  const stroke = (name) => (name === chosen ? css("--wait") : css("--thin"));
  const axes = { stroke: soft, font, ticks: { show: false }, grid: { stroke: css("--line"), width: 1 } };
  return {
    width,
    height,
    legend: { show: false },
    cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
    axes: [
      { ...axes, size: 30, grid: { show: false }, space: 70, values: (_, values) => values.map(ticks[axis]) },
      { ...axes, size: 44, values: (_, values) => values.map((v) => (v === null ? "" : trimmed(v))) },
    ],
    series: [
      {},
      ...names.map((name) => ({
        stroke: stroke(name),
        width: name === chosen ? 2 : 1,
        spanGaps: true,
        points: { show: false },
      })),
      { stroke: css("--ours"), width: 2.5, spanGaps: true, points: { show: false } },
    ],
    bands: isBand ? [{ series: [2, 1], fill: css("--shade") }] : [],
    hooks: { draw: [drawEpochs] },
  };
}

const trimmed = (value) => String(Number(value.toPrecision(4)));

function drawEpochs(plot) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = css("--epoch");
  ctx.setLineDash([4, 4]);
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  for (const { x, text } of plot.epochs ?? []) {
    const left = Math.round(plot.valToPos(x, "x", true));
    if (left < bbox.left || left > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(left, bbox.top);
    ctx.lineTo(left, bbox.top + bbox.height);
    ctx.stroke();
    const isRight = left > bbox.left + bbox.width * 0.75;
    ctx.textAlign = isRight ? "right" : "left";
    ctx.fillText(text, left + (isRight ? -6 : 6), bbox.top + 14 * devicePixelRatio);
  }
  ctx.restore();
}

const CELL = 14;
const ROW = 20;
const LEGEND = { "#": "counted", "~": "late", "!": "refused", ".": "absent", " ": "unknown" };

/** One row an island, one column a round of a fragment: who counted. */
export function Marks({ past, fragment, limit, theme, onRound }) {
  const holder = useRef(null);
  const canvas = useRef(null);
  const [width, setWidth] = useState(600);
  const [focus, setFocus] = useState(null);
  useEffect(() => {
    const observer = new ResizeObserver(() => setWidth(holder.current.clientWidth));
    observer.observe(holder.current);
    return () => observer.disconnect();
  }, []);
  const number = Math.max(4, Math.min(limit ?? 512, Math.floor(width / CELL)));
  const all = past.marks.filter((column) => fragment === null || column[1] === fragment);
  const columns = all.slice(-number);
  const { rows, calm } = rowsOf(past.names, columns);
  useEffect(() => {
    drawMarks(canvas.current, columns, rows, width, focus);
  }, [past.revision, width, fragment, focus, theme, rows.length]);
  const point = (event) => {
    const box = canvas.current.getBoundingClientRect();
    setFocus(within(columns, rows, [
      Math.floor((event.clientX - box.left) / CELL),
      Math.floor((event.clientY - box.top) / ROW),
    ]));
  };
  const step = (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Enter" && focus) onRound?.(columns[focus[0]]);
    if (!move) return;
    event.preventDefault();
    const from = focus ?? [columns.length - 1, 0];
    setFocus(within(columns, rows, focus ? [from[0] + move[0], from[1] + move[1]] : from) ?? from);
  };
  const text = focus ? described(columns[focus[0]], rows[focus[1]]) : summary(columns, rows);
  return html`
    <div class="marks">
      <div class="names" aria-hidden="true">
        ${rows.map((row) => html`<div key=${row.name} title=${shown(row.name)}>${shown(row.name, 24)}</div>`)}
      </div>
      <div class="cells" ref=${holder}>
        <canvas ref=${canvas} tabindex="0" role="img" aria-label=${summary(columns, rows)}
          onMouseMove=${point} onMouseLeave=${() => setFocus(null)} onKeyDown=${step}
          onClick=${() => focus && onRound?.(columns[focus[0]])}></canvas>
      </div>
    </div>
    ${calm > 0 && html`<p class="soft">and ${calm} islands that counted in all of them</p>`}
    <p class="soft line" aria-live="polite">${text}</p>`;
}

/** Many islands: those with a mark other than "counted"; the others are a number. */
function rowsOf(names, columns) {
  const rows = names
    .map((name, index) => ({ name, index }))
    .filter((row) => row.name !== null)
    .sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
  if (rows.length <= 40) return { rows, calm: 0 };
  const troubled = rows.filter(({ index }) =>
    columns.some((column) => "~!.".includes(column[3][index] ?? " ")),
  );
  const few = troubled.length ? troubled.slice(0, 40) : rows.slice(0, 12);
  return { rows: few, calm: rows.length - (troubled.length || 12) };
}

const within = (columns, rows, [column, row]) =>
  column >= 0 && row >= 0 && column < columns.length && row < rows.length ? [column, row] : null;

function described(column, row) {
  const [round, fragment, at, marks, rounds] = column;
  const mark = LEGEND[marks[row.index] ?? " "] ?? "unknown";
  const which = rounds > 1 ? `worst of ${rounds} rounds up to ${round}` : `round ${round}`;
  return `${shown(row.name, 60)}, ${which}, fragment ${fragment}, ${clock(at)}: ${mark}`;
}

function summary(columns, rows) {
  const number = { "#": 0, "~": 0, "!": 0, ".": 0 };
  for (const column of columns) {
    for (const row of rows) {
      const mark = column[3][row.index] ?? " ";
      if (mark in number) number[mark] += 1;
    }
  }
  return `${columns.length} columns: ${number["#"]} counted, ${number["~"]} late, ${number["!"]} refused, ${number["."]} absent`;
}

function drawMarks(canvas, columns, rows, width, focus) {
  const height = rows.length * ROW + 18;
  const scale = devicePixelRatio;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(scale, scale);
  const paint = { ours: css("--ours"), wait: css("--wait"), bad: css("--bad"), soft: css("--soft"), ink: css("--ink") };
  columns.forEach((column, x) => {
    rows.forEach((row, y) => drawMark(ctx, column[3][row.index] ?? " ", x * CELL, y * ROW, paint));
  });
  if (focus) {
    ctx.strokeStyle = paint.ink;
    ctx.lineWidth = 1.5;
    ctx.strokeRect(focus[0] * CELL - 0.5, focus[1] * ROW + 2.5, CELL - 1, ROW - 5);
  }
  ctx.fillStyle = paint.soft;
  ctx.font = "11px system-ui, sans-serif";
  ctx.textAlign = "center";
  let last = -Infinity;
  columns.forEach((column, x) => {
    const isLabel = column[0] % 5 === 0 && columns[x - 1]?.[0] !== column[0];
    if (isLabel && x * CELL - last > 44 && x * CELL < width - 14) {
      ctx.fillText(String(column[0]), x * CELL + CELL / 2, rows.length * ROW + 13);
      last = x * CELL;
    }
  });
}

function drawMark(ctx, mark, x, y, paint) {
  const box = [x + 1, y + 4, CELL - 3, ROW - 8];
  const middle = [x + CELL / 2 - 0.5, y + ROW / 2];
  ctx.lineWidth = 1.5;
  ctx.setLineDash([]);
  if (mark === "#") {
    ctx.fillStyle = paint.ours;
    ctx.beginPath();
    ctx.roundRect(...box, 2.5);
    ctx.fill();
  } else if (mark === "~") {
    ctx.fillStyle = paint.wait;
    ctx.beginPath();
    ctx.moveTo(box[0], box[1] + box[3]);
    ctx.lineTo(box[0] + box[2], box[1]);
    ctx.lineTo(box[0] + box[2], box[1] + box[3]);
    ctx.fill();
    ctx.strokeStyle = paint.wait;
    ctx.strokeRect(box[0] + 0.5, box[1] + 0.5, box[2] - 1, box[3] - 1);
  } else if (mark === "!") {
    ctx.strokeStyle = paint.bad;
    ctx.lineWidth = 2;
    ctx.beginPath();
    ctx.moveTo(middle[0] - 4, middle[1] - 4);
    ctx.lineTo(middle[0] + 4, middle[1] + 4);
    ctx.moveTo(middle[0] + 4, middle[1] - 4);
    ctx.lineTo(middle[0] - 4, middle[1] + 4);
    ctx.stroke();
  } else if (mark === ".") {
    ctx.strokeStyle = paint.soft;
    ctx.globalAlpha = 0.6;
    ctx.lineWidth = 1;
    ctx.setLineDash([2, 2]);
    ctx.beginPath();
    ctx.roundRect(box[0] + 0.5, box[1] + 0.5, box[2] - 1, box[3] - 1, 2.5);
    ctx.stroke();
    ctx.globalAlpha = 1;
  }
}

/** A small curve without axes. */
export function Spark({ values, label }) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (known.length < 2) return html`<span class="soft">–</span>`;
  const low = Math.min(...known);
  const high = Math.max(...known);
  const points = values
    .map((value, n) =>
      value === null || value === undefined
        ? null
        : `${((88 * n) / (values.length - 1)).toFixed(1)},${(18 - (16 * (value - low)) / (high - low || 1)).toFixed(1)}`,
    )
    .filter((point) => point !== null);
  return html`<svg class="spark" viewBox="0 0 88 20" preserveAspectRatio="none" role="img" aria-label=${label}>
    <polyline points=${points.join(" ")} />
  </svg>`;
}
