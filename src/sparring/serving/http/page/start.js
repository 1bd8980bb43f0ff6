// The start view: the size of the data, and the most active users and most popular items.

import { address, ask } from "./api.js";
import { h, plural, put } from "./dom.js";
import { link } from "./route.js";
import { empty, failure } from "./states.js";

export function startView({ info, failed }) {
  const title = h("h1", { tabindex: "-1" }, "Explore");
  const lead = h("p", { class: "lead" });
  const users = h("section", { class: "panel" }),
    items = h("section", { class: "panel" });
  const element = h("div", null, title, lead, h("div", { class: "sides" }, users, items));

  async function list(panel, kind, words, run) {
    let found;
    try {
      ({ found } = await ask(address("page/search", { kind, limit: 10, run })));
    } catch (error) {
      failed(error);
      return put(
        panel,
        h("h2", null, words),
        failure(error, () => list(panel, kind, words, run)),
      );
    }
    const row = (each) =>
      h(
        "li",
        { class: "item" },
        h(
          "span",
          { class: "names" },
          h("a", { href: link(kind, each.id) }, each.title ?? (kind === "user" ? `User ${each.id}` : String(each.id))),
        ),
        h("span", { class: "number quiet" }, plural(each.count, kind === "user" ? "item" : "user")),
      );
    put(
      panel,
      h("h2", null, words),
      found.length ? h("ul", { class: "items" }, found.map(row)) : empty(`No ${kind}s`, `This run has no ${kind}s.`),
    );
  }

  return {
    element,
    title,
    name: "Explore",
    async update(_, runs) {
      const first = info.runs.find((each) => each.name === runs[0]);
      lead.textContent = `${plural(first.queries, "user")} and ${plural(first.items, "item")}. Search above, or start here.`;
      await Promise.all([list(users, "user", "Most active users", runs[0]), list(items, "item", "Most popular items", runs[0])]);
    },
  };
}
