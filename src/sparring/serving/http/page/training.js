// The training of the runs: curves, test metrics, settings and reports.

import { address, ask, blob, hasToken } from "./api.js";
import { chart } from "./chart.js";
import { count, figure, h, put } from "./dom.js";
import { empty, failure, working } from "./states.js";

const SHOWN = ["ndcg@10", "ndcg@20", "recall@10", "recall@20", "hit@10", "mrr@10"];
const REPORTS = { comparison: "Comparison report", index: "Index report" };

export function trainingView({ failed }) {
  const title = h("h1", { tabindex: "-1" }, "Training");
  const body = h("div", null, working("Loading…"));
  return {
    element: h("div", null, title, body),
    title,
    name: "Training",
    async update() {
      try {
        const { runs } = await ask("page/runs");
        put(body, curves(runs), tests(runs), runs.map(details));
      } catch (error) {
        failed(error);
        put(
          body,
          failure(error, () => this.update()),
        );
      }
    },
  };
}

function curves(runs) {
  const series = (key) =>
    runs
      .map((run) => ({
        name: run.name,
        best: run.best_epoch,
        points: run.epochs.filter((each) => Number.isFinite(each[key])).map((each) => [each.epoch, each[key]]),
      }))
      .filter((each) => each.points.length);
  const select = [...new Set(runs.map((run) => run.select))];
  const plots = [
    ...select.map((key) => [`Validation ${key}`, series(key)]),
    ["Training loss", series("loss").map((each) => ({ ...each, best: null }))],
  ];
  const drawn = plots.filter(([, lines]) => lines.length).map(([name, lines]) => chart({ title: name, across: "epoch", series: lines }));
  if (!drawn.length) return empty("No curves", "These runs have no metrics.jsonl with epochs.");
  const note =
    runs.length > 1 &&
    h("p", { class: "quiet small" }, "Losses of different recipes are not comparable: compare runs by the validation metric.");
  return h("section", { "aria-label": "Curves" }, h("div", { class: "figures" }, drawn), note);
}

function tests(runs) {
  const tested = runs.filter((run) => Object.keys(run.test).length);
  if (!tested.length) return empty("No test metrics", "None of these runs was evaluated on a test split.");
  const names = SHOWN.filter((name) => tested.some((run) => Number.isFinite(run.test[name])));
  const best = Object.fromEntries(names.map((name) => [name, Math.max(...tested.map((run) => run.test[name] ?? -Infinity))]));
  const cell = (run, name) =>
    h(
      "td",
      { class: tested.length > 1 && run.test[name] === best[name] ? "best" : null },
      Number.isFinite(run.test[name]) ? run.test[name].toFixed(4) : "",
    );
  const head = h(
    "tr",
    null,
    h("th", { scope: "col", class: "text" }, "run"),
    h("th", { scope: "col", class: "text" }, "recipe"),
    names.map((name) => h("th", { scope: "col" }, name)),
    h("th", { scope: "col" }, "epoch"),
    h("th", { scope: "col" }, "seconds"),
  );
  const rows = tested.map((run) =>
    h(
      "tr",
      null,
      h("th", { scope: "row", class: "text" }, run.name),
      h("td", { class: "text" }, run.recipe),
      names.map((name) => cell(run, name)),
      h("td", null, figure(run.best_epoch)),
      h("td", null, run.seconds === null ? "" : run.seconds.toFixed(1)),
    ),
  );
  const table = h("table", null, h("thead", null, head), h("tbody", null, rows));
  return h(
    "section",
    null,
    h("h2", null, "Test"),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Test metrics" }, table),
  );
}

function details(run) {
  const parts = ["queries", "items", "train", "valid", "test"]
    .filter((name) => run.data[name])
    .map((name) => `${count(run.data[name])} ${name}`);
  const settings = Object.entries({ ...run.arguments, ...run.setup })
    .filter(([, value]) => value !== null)
    .map(([name, value]) => `${name} ${figure(value)}`);
  const facts = [
    ["recipe", run.recipe],
    ["data", `${run.data.name}: ${parts.join(", ")}`],
    ["settings", settings.join(", ")],
  ];
  return h(
    "section",
    { "aria-label": `Run ${run.name}` },
    h("h2", null, run.name),
    run.problems.map((problem) => h("p", { class: "wrong", role: "alert" }, problem)),
    h(
      "dl",
      null,
      facts.map(([name, words]) => [h("dt", null, name), h("dd", null, words)]),
    ),
    run.batch.length > 0 && h("details", null, h("summary", null, "Composition of a training batch"), h("pre", null, run.batch.join("\n"))),
    run.reports.length > 0
      ? h(
          "ul",
          { class: "links" },
          run.reports.map((which) => h("li", null, report(run.name, which))),
        )
      : h("p", { class: "quiet small" }, "This run has no comparison or index report. Create one with sparring compare or sparring index."),
  );
}

// A link cannot send a token, so with a token the report is downloaded instead.
function report(run, which) {
  const path = address("page/report", { run, which });
  if (!hasToken())
    return h(
      "a",
      { href: path, target: "_blank", rel: "noopener" },
      REPORTS[which],
      h("span", { class: "hidden" }, " (opens in a new tab)"),
    );
  const words = h("span", { class: "wrong", role: "alert" });
  const save = async () => {
    try {
      const url = URL.createObjectURL(await blob(path));
      h("a", { href: url, download: `${which}.html` }).click();
      setTimeout(() => URL.revokeObjectURL(url), 10000);
    } catch (error) {
      words.textContent = error.message;
    }
  };
  return [h("button", { type: "button", on: { click: save } }, `Save the ${REPORTS[which].toLowerCase()}`), words];
}
