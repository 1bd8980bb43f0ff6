// Search as you type for a user or an item: a combobox with arrow-key navigation.

import { address, ask } from "./api.js";
import { byId, count, h, plural, put } from "./dom.js";

const WAIT = 120; // milliseconds after the last key before the server is queried
const LIMIT = 8;

export function startSearch({ run, open, failed }) {
  const form = byId("search"),
    input = byId("text"),
    popup = byId("popup"),
    list = byId("matches"),
    note = byId("matches-note");
  let found = [],
    active = -1,
    timer = 0,
    asked = new AbortController();

  const kind = () => form.elements.kind.value;
  function label() {
    const words = {
      user: "Find a user by id or name",
      item: "Find an item by id or title",
      text: "Type a text and press Enter",
    }[kind()];
    byId("text-label").textContent = words;
    input.placeholder = words;
  }

  function show(open) {
    popup.hidden = !open;
    input.setAttribute("aria-expanded", String(open));
    if (!open) point(-1);
  }

  function point(at) {
    active = at;
    [...list.children].forEach((each, index) => each.setAttribute("aria-selected", String(index === at)));
    if (at < 0) return input.removeAttribute("aria-activedescendant");
    input.setAttribute("aria-activedescendant", list.children[at].id);
    list.children[at].scrollIntoView({ block: "nearest" });
  }

  async function look() {
    asked.abort();
    asked = new AbortController();
    if (kind() === "text") return show(false);
    const { signal } = asked;
    const text = input.value.trim();
    let answer;
    try {
      answer = await ask(address("page/search", { kind: kind(), text, limit: LIMIT, run: run() }), { signal });
    } catch (error) {
      if (error.name === "AbortError") return;
      found = [];
      put(list);
      note.textContent = error.message;
      failed(error);
      return show(document.activeElement === input);
    }
    found = answer.found;
    put(list, found.map(option));
    const what = kind();
    if (!answer.total) note.textContent = text ? `No ${what} matches “${text}”.` : `This run has no ${what}s.`;
    else if (!text) note.textContent = what === "user" ? "Most active users" : "Most popular items";
    else if (answer.total > found.length) note.textContent = `${count(found.length)} of ${count(answer.total)} matches`;
    else note.textContent = answer.total === 1 ? "1 match" : `${count(answer.total)} matches`;
    point(-1);
    if (document.activeElement === input) show(true);
  }

  function option(each, at) {
    const times = kind() === "user" ? plural(each.count, "item") : plural(each.count, "user");
    return h(
      "li",
      {
        role: "option",
        id: `match-${at}`,
        "aria-selected": "false",
        on: { pointerdown: (event) => event.preventDefault(), click: () => choose(at) },
      },
      h("span", { class: "title" }, each.title ?? String(each.id)),
      h("span", { class: "quiet number" }, each.title === null ? times : `${each.id} · ${times}`),
    );
  }

  function choose(at) {
    const { id, title } = found[at];
    input.value = "";
    show(false);
    input.blur();
    open(kind(), String(id), title);
  }

  async function enter() {
    const text = input.value.trim();
    if (kind() === "text") {
      if (text) open("text", text);
      return;
    }
    if (active >= 0) return choose(active);
    clearTimeout(timer);
    await look();
    if (text && found.length) choose(0);
  }

  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(look, WAIT);
  });
  input.addEventListener("focus", look);
  input.addEventListener("blur", () => {
    asked.abort();
    clearTimeout(timer);
    show(false);
  });
  input.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && found.length) {
      event.preventDefault();
      if (popup.hidden) show(true);
      point(active < 0 ? (step > 0 ? 0 : found.length - 1) : (active + step + found.length) % found.length);
    } else if (event.key === "Escape" && !popup.hidden) {
      event.preventDefault(); // otherwise the browser would also clear the field
      show(false);
    }
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    enter();
  });
  form.addEventListener("change", (event) => {
    if (event.target.name !== "kind") return;
    label();
    found = [];
  });
  addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, select, textarea");
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    input.focus();
  });
  label();
  return {
    texts(known) {
      form.elements.kind[2].parentElement.hidden = !known;
    },
  };
}
