// An item: its columns, similar items, and its negatives in training.

import { address, ask } from "./api.js";
import { count, figure, h, percent, plural, put, say } from "./dom.js";
import { filterBar } from "./filters.js";
import { hasImages, itemList, picture, twins } from "./lists.js";
import { sides } from "./sides.js";
import { empty, failure, working } from "./states.js";

const AGAIN = 1500; // milliseconds between polls while the server is working

export function itemView({ id, info, failed }) {
  const bar = filterBar({ columns: info.columns, seen: false });
  const lists = sides({ what: "Similar items", info, question: () => ["v1/similar", { item: id }], failed });
  const title = h("h1", { tabindex: "-1" }, h("span", { class: "kind" }, "Item"), " ", id);
  const about = h("div", { class: "about" });
  const met = negatives(id, failed);
  const body = h("div", null, bar.element, lists.summary, lists.element, met.element);
  const unknown = h("div");
  const element = h("div", null, title, about, body, unknown);
  let shown = "";

  async function describe(run) {
    if (shown === run) return true;
    let item;
    try {
      item = await ask(address("v1/item", { id, run }));
    } catch (error) {
      failed(error);
      body.hidden = error.status === 404;
      put(
        unknown,
        error.status === 404
          ? empty(`No item has the id “${id}”`, "Search above by id or title.")
          : failure(error, () => describe(run)),
      );
      return error.status !== 404;
    }
    shown = run;
    body.hidden = false;
    put(unknown);
    const name = item.title ?? item.columns.text;
    put(title, name ?? [h("span", { class: "kind" }, "Item"), " ", String(item.id)]);
    document.title = `${name ?? item.id} · Sparring`;
    const known = Object.entries(item.columns).filter(
      ([name, value]) => !["title", "image"].includes(name) && value !== null && value !== "",
    );
    const facts = [["id", String(item.id)], ...known].map(([name, value]) => [
      h("dt", null, name.replaceAll("_", " ")),
      h("dd", null, figure(value)),
    ]);
    const note = item.placed ? null : h("p", { class: "quiet" }, "This run cannot place the item, so it is stored but not listed.");
    put(about, hasImages(info.columns) && item.columns.image && picture(item.id, run, true), h("dl", null, facts), note);
    return true;
  }

  return {
    element,
    title,
    name: `Item ${id}`,
    async update(route, runs) {
      bar.update(route, runs[0]);
      if (!(await describe(runs[0]))) return;
      met.update(runs);
      await lists.update(route, runs);
    },
    end: met.end,
  };
}

// Computed on demand: the server reads the training data and takes some training steps.
function negatives(id, failed) {
  const button = h("button", { type: "button", on: { click: () => start() } }, "Compute");
  const intro = h("p", { class: "quiet" }, "The items that the sampler drew as negatives when this item was the positive of a training pair.");
  const panels = h("div", { class: "sides" });
  const element = h("section", { class: "negatives" }, h("h2", null, "Negatives in training"), intro, button, panels);
  twins(panels);
  let runs = [],
    begun = false,
    ended = new AbortController();

  function start() {
    begun = true;
    button.hidden = true;
    ended.abort();
    ended = new AbortController();
    const { signal } = ended;
    put(
      panels,
      runs.map((run) => {
        const inner = h("div", null, working("Drawing training batches…"));
        fill(run, inner, signal);
        return h(
          "section",
          { class: "panel", "aria-label": `Negatives, ${run}` },
          h("h3", null, "Strongest negatives", h("span", { class: "of" }, run)),
          inner,
        );
      }),
    );
  }

  async function fill(run, inner, signal) {
    try {
      let answer = await ask(address("page/negatives", { item: id, run }), { signal });
      while (answer.state === "working") {
        put(inner, working("Reading the data and drawing training batches. The first time takes longer…"));
        await new Promise((resolve) => setTimeout(resolve, AGAIN));
        answer = await ask(address("page/negatives", { item: id, run }), { signal });
      }
      put(
        inner,
        answer.state === "absent"
          ? empty("Not available", `${answer.why[0].toUpperCase()}${answer.why.slice(1)}.`)
          : shown(answer, run),
      );
      say(answer.state === "absent" ? answer.why : `${run}: ${plural(answer.items.length, "negative")}`);
    } catch (error) {
      if (error.name === "AbortError") return;
      failed(error);
      put(inner, failure(error, start));
    }
  }

  return {
    element,
    update(now) {
      if (now.join("\n") === runs.join("\n")) return;
      runs = now;
      if (begun) start();
    },
    end: () => ended.abort(),
  };
}

function shown(answer, run) {
  const steps = `${plural(answer.steps, "step")} of ${count(answer.batch)} pairs${answer.cut ? " (time limit reached)" : ""}`;
  const candidates = `${count(Math.round(answer.candidates))} candidates per step, ${plural(answer.distinct, "distinct item")}`;
  const lines = [
    `${steps}, each with one of the ${plural(answer.pairs, "training pair")} of this item: ${candidates}.`,
    answer.made_up > 0 && `${percent(answer.made_up)} of the sum comes from synthetic vectors, which are not items.`,
    "The share is a candidate's part of the loss's sum over negatives: a larger share means a stronger gradient.",
  ];
  const items = answer.items.map((each) => ({
    ...each,
    often: `${each.times >= 0.995 ? each.times.toFixed(1) : each.times.toFixed(2)} per step`,
  }));
  const list = items.length
    ? itemList(items, { run, details: ["often"], bars: true })
    : empty("No items", "All negatives were synthetic vectors, or there were none.");
  const sampler =
    answer.sampler.length > 0 &&
    h("details", null, h("summary", null, "Composition of a training batch"), h("pre", null, answer.sampler.join("\n")));
  return [h("p", { class: "quiet small" }, lines.filter(Boolean).join(" ")), list, sampler];
}
