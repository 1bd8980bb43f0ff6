// Filters: conditions on item columns, seen items, and the length of the list.

import { address, ask } from "./api.js";
import { h, plural, put } from "./dom.js";
import { telling } from "./lists.js";
import { go } from "./route.js";

const EVERY = { "=": "is", "!=": "is not" };
const ORDER = { ...EVERY, "<": "<", "<=": "≤", ">": ">", ">=": "≥" };
const OPS = {
  number: { "<": "<", "<=": "≤", ">": ">", ">=": "≥", ...EVERY },
  time: ORDER,
  text: { ...EVERY, contains: "contains" },
  boolean: EVERY,
  list: { contains: "contains" },
};
const LENGTHS = [5, 10, 20, 50, 100];

export const inWords = ({ column, op, value }) => `${column} ${ORDER[op] || op} ${Array.isArray(value) ? value.join(", ") : value}`;

// `seen`: whether to offer "Hide seen items". The bar is not rebuilt when the lists change, so it keeps the focus.
export function filterBar({ columns, seen }) {
  const first = telling(columns);
  const place = ({ name }) => (first.includes(name) ? first.indexOf(name) : first.length);
  const usable = columns.filter(({ name }) => name !== "image").sort((a, b) => place(a) - place(b));
  const id = `f${Math.random().toString(36).slice(2)}`;
  const column = h(
    "select",
    { "aria-label": "Column" },
    usable.map((each) => h("option", { value: each.name }, each.name)),
  );
  const op = h("select", { "aria-label": "Condition" });
  const value = h("input", { "aria-label": "Value", placeholder: "value", list: `${id}-values`, autocomplete: "off" });
  const values = h("datalist", { id: `${id}-values` });
  const wrong = h("p", { class: "wrong", role: "alert" });
  const chips = h("ul", { class: "chips", "aria-label": "Filters" });
  const hide = h("input", { type: "checkbox", on: { change: () => go({ seen: hide.checked ? "hide" : "show" }) } });
  const length = h("select", { "aria-label": "How many", on: { change: () => go({ k: Number(length.value) }) } });
  let route = { where: [] },
    run = "";

  const type = () => usable.find((each) => each.name === column.value)?.type || "text";

  async function offer() {
    put(
      op,
      Object.entries(OPS[type()]).map(([sign, words]) => h("option", { value: sign }, words)),
    );
    value.inputMode = type() === "number" ? "decimal" : "text";
    put(values);
    wrong.textContent = "";
    try {
      const answer = await ask(address("page/values", { column: column.value, run }));
      put(
        values,
        answer.values.map((each) => h("option", { value: String(each.value), label: plural(each.count, "item") })),
      );
    } catch {
      /* suggestions are optional: any value can be typed */
    }
  }

  function typed() {
    const text = value.value.trim();
    if (!text) throw new Error("Enter a value to filter by.");
    if (type() === "number") {
      const number = Number(text.replace(",", "."));
      if (!Number.isFinite(number)) throw new Error(`${column.value} is a number; “${text}” is not one.`);
      return number;
    }
    if (type() === "boolean") {
      if (!/^(true|false)$/i.test(text)) throw new Error(`${column.value} must be true or false.`);
      return /^true$/i.test(text);
    }
    return text;
  }

  function add(event) {
    event.preventDefault();
    try {
      const condition = { column: column.value, op: op.value, value: typed() };
      wrong.textContent = "";
      value.value = "";
      go({ where: [...route.where, condition] });
    } catch (error) {
      wrong.textContent = error.message;
      value.focus();
    }
  }

  function chip(condition, at) {
    const words = inWords(condition);
    const drop = () => {
      go({ where: route.where.filter((_, other) => other !== at) });
      value.focus();
    };
    return h("li", null, words, h("button", { type: "button", "aria-label": `Remove the filter ${words}`, on: { click: drop } }, "×"));
  }

  column.addEventListener("change", offer);
  const form =
    usable.length > 0 &&
    h("form", { class: "condition", on: { submit: add } }, column, op, value, values, h("button", { type: "submit" }, "Filter"));
  const element = h(
    "section",
    { class: "filters", "aria-label": "Filters" },
    h(
      "div",
      { class: "row" },
      form,
      h(
        "div",
        { class: "options" },
        seen && h("label", { class: "check" }, hide, "Hide seen items"),
        h("label", { class: "check" }, "Show", length),
      ),
    ),
    wrong,
    chips,
  );
  return {
    element,
    update(now, nowRun) {
      if (run !== nowRun || !op.children.length) {
        run = nowRun;
        if (form) offer();
      }
      route = now;
      hide.checked = now.seen === "hide";
      const lengths = LENGTHS.includes(now.k) ? LENGTHS : [...LENGTHS, now.k].sort((a, b) => a - b);
      put(
        length,
        lengths.map((each) => h("option", { value: String(each), selected: each === now.k }, String(each))),
      );
      put(chips, now.where.map(chip));
    },
  };
}
