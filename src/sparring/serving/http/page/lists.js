// Lists of items, one or two side by side, and their differences.

import { address, content } from "./api.js";
import { count, figure, h, percent } from "./dom.js";
import { link } from "./route.js";

const FIRST = ["category", "genre", "genres", "price", "brand", "year"];
const HIDDEN = new Set(["title", "image", "text", "description"]);

// The columns shown under a title: at most two, the most informative first.
export function telling(columns) {
  const names = columns.filter((each) => each.type !== "list" && !HIDDEN.has(each.name)).map((each) => each.name);
  return [...FIRST.filter((name) => names.includes(name)), ...names.filter((name) => !FIRST.includes(name))].slice(0, 2);
}

// The name of an item: its title, else its text, else its id.
export const nameOf = (item) => item.title ?? item.text ?? String(item.id);

export const hasImages = (columns) => columns.some((each) => each.name === "image");

export function picture(id, run, wide) {
  const frame = h("span", { class: wide ? "picture wide" : "picture", "aria-hidden": "true" });
  const image = h("img", { alt: "", loading: "lazy", decoding: "async", on: { error: () => image.remove() } });
  frame.append(image);
  content(address("page/image", { item: id, run })).then(
    (from) => image.setAttribute("src", from),
    () => image.remove(),
  );
  return frame;
}

// For each item its ranks in both lists: {here, there}, from 1; 0 if absent.
export function moves(items, others) {
  const there = new Map(others.map((item, at) => [String(item.id), at + 1]));
  return items.map((item, at) => ({ here: at + 1, there: there.get(String(item.id)) || 0 }));
}

function mark({ here, there }, second) {
  if (!there) return second ? h("span", { class: "mark new" }, "new") : h("span", { class: "mark gone" }, "missing");
  if (!second || here === there) return null;
  const up = there > here;
  const words = `${up ? "up" : "down"} ${Math.abs(there - here)}, from ${there}`;
  return h(
    "span",
    { class: "mark moved", title: words },
    h("span", { "aria-hidden": "true" }, `${up ? "↑" : "↓"}${Math.abs(there - here)}`),
    h("span", { class: "hidden" }, words),
  );
}

// `details`: columns under the title; `moved`: the result of `moves` if there is another list; `second`: this is the other list;
// `taken`: ids of the items in the user's history.
export function itemList(
  items,
  { run, details = [], images = false, moved = null, second = false, taken = null, ranked = true, bars = false },
) {
  const most = bars ? Math.max(...items.map((each) => each.share), 1e-12) : 1;
  const rows = items.map((item, at) => {
    const small =
      details
        .map((name) => figure(item[name]))
        .filter(Boolean)
        .join(" · ") || (ranked && nameOf(item) !== String(item.id) ? String(item.id) : "");
    const row = h(
      "li",
      { class: "item", data: { id: String(item.id) } },
      ranked && h("span", { class: "rank number" }, String(at + 1)),
      images && picture(item.id, run, false),
      h("span", { class: "names" }, h("a", { href: link("item", item.id) }, nameOf(item)), h("small", null, small)),
      bars
        ? share(item, most)
        : h(
            "span",
            { class: "ends" },
            taken?.has(String(item.id)) && h("span", { class: "mark" }, "seen"),
            moved && mark(moved[at], second),
            item.score !== undefined && h("span", { class: "score number", title: "score" }, item.score.toFixed(3)),
          ),
    );
    return row;
  });
  return h(ranked ? "ol" : "ul", { class: bars ? "items wide-figures" : "items" }, rows);
}

function share(item, most) {
  const bar = h("span", { class: "fill" });
  bar.style.width = `${(100 * item.share) / most}%`;
  return h(
    "span",
    { class: "share" },
    h("span", { class: "track", "aria-hidden": "true" }, bar),
    h("span", { class: "number" }, percent(item.share)),
  );
}

// Hovering over an item highlights it in the other lists too.
export function twins(element) {
  const light = (event, on) => {
    const id = event.target.closest?.(".item")?.dataset.id;
    if (id === undefined) return;
    for (const each of element.querySelectorAll(".item")) each.classList.toggle("twin", on && each.dataset.id === id);
  };
  for (const name of ["pointerover", "focusin"]) element.addEventListener(name, (event) => light(event, true));
  for (const name of ["pointerout", "focusout"]) element.addEventListener(name, (event) => light(event, false));
}

export function difference(first, second) {
  const ranks = moves(second, first);
  const both = ranks.filter((each) => each.there).length;
  const moved = ranks.filter((each) => each.there && each.there !== each.here).length;
  const parts = [
    `${count(both)} of ${count(Math.max(first.length, second.length))} in both`,
    `${moved} moved`,
    `${second.length - both} new`,
    `${first.length - both} missing`,
  ];
  return parts.join(" · ");
}
