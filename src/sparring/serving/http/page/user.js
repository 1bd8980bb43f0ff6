// A user: the history, and the recommendations of one or two runs; or the recommendations for a text.

import { address, ask } from "./api.js";
import { figure, h, plural, put } from "./dom.js";
import { filterBar } from "./filters.js";
import { hasImages, itemList } from "./lists.js";
import { sides } from "./sides.js";
import { empty, failure } from "./states.js";

const SHORT = 15;

export function userView({ id, info, failed }) {
  const bar = filterBar({ columns: info.columns, seen: true });
  const question = (_, route) => ["v1/recommend", { user: id, exclude_seen: route.seen === "hide" }];
  const lists = sides({ what: "Recommended", info, question, failed });
  const facts = h("p", { class: "lead" });
  const past = h("section", { class: "panel history", "aria-label": "History" });
  const grid = h("div", { class: "grid" }, lists.element, past);
  const title = h("h1", { tabindex: "-1" }, h("span", { class: "kind" }, "User"), " ", id);
  const unknown = h("div");
  const element = h("div", null, title, facts, bar.element, lists.summary, grid, unknown);
  let shown = "",
    taken = null;

  async function history(run) {
    if (shown === run) return true;
    let user;
    try {
      user = await ask(address("v1/user", { id, run }));
    } catch (error) {
      failed(error);
      if (error.status === 404) {
        for (const each of [bar.element, grid, facts]) each.hidden = true;
        put(unknown, empty(`No user has the id “${id}”`, "Search above by id, or by name if the data has names."));
        return false;
      }
      put(
        past,
        h("h2", null, "History"),
        failure(error, () => history(run)),
      );
      return true;
    }
    shown = run;
    taken = new Set(user.history.map((each) => String(each.id)));
    for (const each of [bar.element, grid, facts]) each.hidden = false;
    put(unknown);
    facts.textContent = Object.entries(user.columns)
      .filter(([, value]) => value !== null && value !== "")
      .map(([name, value]) => `${name.replaceAll("_", " ")} ${figure(value)}`)
      .join(" · ");
    put(past, pastOf(user, run));
    return true;
  }

  function pastOf(user, run) {
    const head = h("h2", null, "History", h("span", { class: "of" }, user.total ? plural(user.total, "item") : ""));
    if (!user.total) return [head, empty("No items yet", "This user has no interactions in the data of this run.")];
    const options = { run, images: hasImages(info.columns), ranked: false };
    const items = user.ordered ? user.history.toReversed() : user.history;
    const rest = items.length - SHORT;
    const list = itemList(items.slice(0, SHORT), options);
    const more = () => {
      const links = list.querySelectorAll("a").length;
      list.append(...itemList(items.slice(SHORT), options).children);
      button.remove();
      list.querySelectorAll("a")[links]?.focus();
    };
    const button = rest > 0 && h("button", { type: "button", class: "more", on: { click: more } }, `Show ${plural(rest, "more item")}`);
    const cut =
      user.history.length < user.total &&
      h("p", { class: "quiet small" }, `The last ${plural(user.history.length, "item")} of ${user.total}.`);
    return [head, h("p", { class: "quiet small" }, user.ordered ? "Latest first." : "Not in time order."), list, button, cut];
  }

  return {
    element,
    title,
    name: `User ${id}`,
    async update(route, runs) {
      bar.update(route, runs[0]);
      if (await history(runs[0])) await lists.update(route, runs, taken);
    },
  };
}

export function textView({ id, info, failed }) {
  const bar = filterBar({ columns: info.columns, seen: false });
  const lists = sides({ what: "Recommended", info, question: () => ["v1/recommend", { text: id }], failed });
  const title = h("h1", { tabindex: "-1" }, h("span", { class: "kind" }, "Text"), ` “${id}”`);
  const element = h("div", null, title, bar.element, lists.summary, lists.element);
  return {
    element,
    title,
    name: `“${id}”`,
    async update(route, runs) {
      bar.update(route, runs[0]);
      await lists.update(route, runs);
    },
  };
}
