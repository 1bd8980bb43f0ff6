// The frame: the current view, the selected runs, and the token prompt.

import { ask, hasToken, setToken } from "./api.js";
import { byId, h, put } from "./dom.js";
import { itemView } from "./item.js";
import { go, read, write } from "./route.js";
import { startSearch } from "./search.js";
import { startView } from "./start.js";
import { failure, working } from "./states.js";
import { trainingView } from "./training.js";
import { textView, userView } from "./user.js";

const VIEWS = { start: startView, user: userView, item: itemView, text: textView, training: trainingView };
const main = byId("main"),
  notice = byId("notice");
let info = null,
  view = null,
  key = null;

const search = startSearch({
  run: () => chosen(read())[0] || "",
  open: (kind, id) => go({ view: kind, id, where: [] }),
  failed,
});

// The selected runs: one, or two different ones.
function chosen(route) {
  const names = info ? info.runs.map((run) => run.name) : [];
  const first = names.includes(route.run) ? route.run : names[0];
  return names.includes(route.with) && route.with !== first ? [first, route.with] : names.length ? [first] : [];
}

function failed(error) {
  if (error.status === 401 || error.status === 403) askToken();
}

function askToken() {
  if (!notice.hidden) return;
  const field = h("input", { type: "password", id: "token", autocomplete: "off", required: true });
  const submit = (event) => {
    event.preventDefault();
    setToken(field.value.trim());
    notice.hidden = true;
    put(notice);
    begin();
  };
  const words = hasToken() ? "Wrong token." : "This service requires a token.";
  put(notice, h("form", { on: { submit } }, h("label", { for: "token" }, words), field, h("button", { type: "submit" }, "Continue")));
  notice.hidden = false;
  field.focus();
}

async function show() {
  if (!info) return;
  const route = read(),
    runs = chosen(route);
  byId("run").value = runs[0];
  byId("with").value = runs[1] || "";
  for (const option of byId("with").options) option.disabled = option.value === runs[0];
  for (const link of document.querySelectorAll("nav a")) {
    const to = link.dataset.view === "training" ? "training" : "start";
    link.setAttribute("href", write({ ...route, view: to, id: "", where: [] }));
    const here = link.dataset.view === (route.view === "training" ? "training" : "explore");
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const now = `${route.view}/${route.id}`;
  if (now !== key) {
    const first = key === null;
    view?.end?.();
    key = now;
    view = VIEWS[route.view]({ id: route.id, info, failed });
    put(main, view.element);
    document.title = `${view.name} · Sparring`;
    scrollTo(0, 0);
    if (!first) view.title.focus({ preventScroll: true });
  }
  await view.update(route, runs);
}

async function begin() {
  put(main, working("Loading…"));
  try {
    info = await ask("v1/info");
  } catch (error) {
    failed(error);
    if (error.status === 401 || error.status === 403) return put(main);
    return put(main, failure(error, begin));
  }
  const names = info.runs.map((run) => run.name);
  const options = () =>
    info.runs.map(({ name, recipe }) => h("option", { value: name }, name.includes(recipe) ? name : `${name} (${recipe})`));
  put(byId("run"), options());
  put(byId("with"), h("option", { value: "" }, "none"), options());
  document.querySelector(".runs").hidden = names.length < 2;
  search.texts(info.runs.some((run) => run.answers.includes("text")));
  key = null;
  await show();
}

byId("run").addEventListener("change", (event) => {
  const { run, with: other } = read();
  go({ run: event.target.value, with: other === event.target.value ? run : other });
});
byId("with").addEventListener("change", (event) => go({ with: event.target.value }));
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", show);
begin();
