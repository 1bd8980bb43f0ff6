// A line chart as SVG, redrawn when its width changes; the arrow keys move the cursor like the pointer.

import { figure, h, put, svg } from "./dom.js";

const HEIGHT = 230,
  TOP = 10,
  BOTTOM = 28,
  LEFT = 52,
  RIGHT = 14;

// `series`: [{name, points: [[x, y], ...], best: x or null}]; the colour follows the position.
export function chart({ title, across, series }) {
  const xs = [...new Set(series.flatMap((each) => each.points.map(([x]) => x)))].sort((a, b) => a - b);
  const ys = series.flatMap((each) => each.points.map(([, y]) => y));
  const box = h("div", {
    class: "plot",
    tabindex: "0",
    role: "img",
    "aria-label": `${title} by ${across}: ${series.map(summary).join("; ")}. Use the arrow keys to read values.`,
  });
  const readout = h("p", { class: "readout number", role: "status" });
  const [low, high, step] = ticks(Math.min(...ys), Math.max(...ys));
  let at = -1,
    width = 0;

  const x = (value) => LEFT + ((width - LEFT - RIGHT) * (value - xs[0])) / (xs[xs.length - 1] - xs[0] || 1);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / (high - low || 1));

  function draw() {
    const marks = [];
    for (let value = low; value <= high + step / 2; value += step) {
      marks.push(svg("line", { class: "grid-line", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
      marks.push(svg("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, tidy(value, step)));
    }
    const every = Math.ceil(xs.length / Math.max(2, Math.floor((width - LEFT) / 48)));
    xs.forEach(
      (value, index) =>
        index % every === 0 && marks.push(svg("text", { x: x(value), y: HEIGHT - 8, "text-anchor": "middle" }, String(value))),
    );
    const lines = series.map((each, index) => {
      const path = each.points.map(([px, py], n) => `${n ? "L" : "M"}${x(px).toFixed(1)} ${y(py).toFixed(1)}`).join("");
      const best = each.points.find(([px]) => px === each.best);
      return svg(
        "g",
        { class: `series s${index % 8}` },
        svg("path", { d: path, fill: "none" }),
        each.points.length <= 30 && each.points.map(([px, py]) => svg("circle", { cx: x(px), cy: y(py), r: 2.2 })),
        best && svg("circle", { class: "best", cx: x(best[0]), cy: y(best[1]), r: 5.5 }),
      );
    });
    const cursor = at < 0 ? [] : [svg("line", { class: "cursor", x1: x(xs[at]), x2: x(xs[at]), y1: TOP, y2: HEIGHT - BOTTOM })];
    put(box, svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, "aria-hidden": "true" }, marks, cursor, lines));
  }

  function point(index) {
    if (index === at) return;
    at = index;
    draw();
    put(
      readout,
      h("span", null, `${across} ${xs[at]}`),
      series.map((each, index) => key(`${each.name} ${figure(each.points.find(([px]) => px === xs[at])?.[1]) || "–"}`, index)),
    );
  }

  function legend() {
    at = -1;
    put(
      readout,
      series.map((each, index) => key(each.name, index)),
      h("span", { class: "quiet" }, series.some((each) => each.best) ? "ring: selected epoch" : ""),
    );
  }

  box.addEventListener("keydown", (event) => {
    const moved = { ArrowRight: at + 1, ArrowLeft: at < 0 ? xs.length - 1 : at - 1, Home: 0, End: xs.length - 1 }[event.key];
    if (moved === undefined) return;
    event.preventDefault();
    point(Math.min(Math.max(moved, 0), xs.length - 1));
  });
  box.addEventListener("pointermove", (event) => {
    const here = event.clientX - box.getBoundingClientRect().left;
    point(xs.reduce((best, value, index) => (Math.abs(x(value) - here) < Math.abs(x(xs[best]) - here) ? index : best), 0));
  });
  for (const name of ["pointerleave", "blur"]) box.addEventListener(name, () => (legend(), draw()));
  new ResizeObserver(([entry]) => {
    const now = Math.floor(entry.contentRect.width);
    if (now === width || now === 0) return;
    width = now;
    draw();
  }).observe(box);
  legend();
  return h("figure", null, h("figcaption", null, title), box, readout);
}

const key = (words, index) => h("span", null, h("span", { class: `key s${index % 8}`, "aria-hidden": "true" }), words);
const summary = ({ name, points }) => `${name} from ${figure(points[0]?.[1])} to ${figure(points[points.length - 1]?.[1])}`;
const tidy = (value, step) => value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));

// About four round steps over a range.
function ticks(least, most) {
  const span = most - least || Math.abs(most) || 1;
  const size = 10 ** Math.floor(Math.log10(span / 4));
  const step = [1, 2, 5, 10].find((each) => span / (each * size) <= 5) * size;
  return [Math.floor(least / step + 1e-9) * step, Math.ceil(most / step - 1e-9) * step, step];
}
