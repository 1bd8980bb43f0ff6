// One query to one or two runs: their lists side by side, with moved, new and missing items marked.

import { ask } from "./api.js";
import { h, plural, put, say } from "./dom.js";
import { inWords } from "./filters.js";
import { difference, hasImages, itemList, moves, telling, twins } from "./lists.js";
import { go } from "./route.js";
import { empty, failure } from "./states.js";

// `what`: the heading of the list; `question(run)`: the path and the body of the request.
export function sides({ what, info, question, failed }) {
  const element = h("div", { class: "sides" });
  const summary = h("p", { class: "summary", hidden: true });
  twins(element);
  let asked = new AbortController();

  async function update(route, runs, taken = null) {
    asked.abort();
    asked = new AbortController();
    const { signal } = asked;
    element.setAttribute("aria-busy", "true");
    if (element.childElementCount !== runs.length) {
      put(
        element,
        runs.map(() => h("section", { class: "panel" }, h("h2", null, what), h("p", { class: "working" }, "Loading…"))),
      );
    }
    const details = telling(info.columns);
    const body = {
      k: route.k,
      where: route.where,
      fields: info.columns.some((each) => each.name === "text") ? [...details, "text"] : details,
    };
    const answers = await Promise.all(
      runs.map(async (run) => {
        const [path, own] = question(run, route);
        try {
          return { run, items: (await ask(path, { body: { ...body, ...own, run }, signal })).results[0].items };
        } catch (error) {
          return { run, error };
        }
      }),
    );
    if (signal.aborted) return;
    element.removeAttribute("aria-busy");
    for (const { error } of answers) if (error) failed(error);
    const lists = answers.map((each) => each.items);
    const both = lists.length === 2 && lists.every(Boolean);
    summary.hidden = !both;
    if (both) put(summary, h("b", null, `${runs[1]} compared with ${runs[0]}`), difference(lists[0], lists[1]));
    put(
      element,
      answers.map(({ run, items, error }, at) => {
        const other = both ? lists[1 - at] : null;
        const inner = error
          ? failure(error, () => update(route, runs, taken))
          : items.length === 0
            ? nothing(route)
            : itemList(items, {
                run,
                details,
                images: hasImages(info.columns),
                moved: other && moves(items, other),
                second: at === 1,
                taken,
              });
        const less = items && items.length > 0 && items.length < route.k;
        return h(
          "section",
          { class: "panel", "aria-label": `${what}, ${run}` },
          h("h2", null, what, h("span", { class: "of" }, run)),
          inner,
          less &&
            h(
              "p",
              { class: "quiet small" },
              `Only ${plural(items.length, "item")} ${route.where.length ? "match the filters" : "can be listed"}.`,
            ),
        );
      }),
    );
    say(answers.map((each) => (each.error ? each.error.message : `${each.run}: ${plural(each.items.length, "item")}`)).join("; "));
  }

  return { element, summary, update };
}

function nothing(route) {
  if (!route.where.length) return empty("No items", "There are no items to list here.");
  return h(
    "div",
    { class: "empty" },
    h("p", { class: "empty-title" }, "No item matches the filters"),
    h("p", null, route.where.map(inWords).join(", ")),
    h("button", { type: "button", on: { click: () => go({ where: [] }) } }, "Remove the filters"),
  );
}
