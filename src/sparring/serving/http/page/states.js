// Placeholders for a list: empty, failed, loading.

import { h } from "./dom.js";

export const empty = (title, ...words) =>
  h(
    "div",
    { class: "empty" },
    h("p", { class: "empty-title" }, title),
    words.map((each) => h("p", null, each)),
  );

export function failure(error, again) {
  const gone = error.status === 0;
  return h(
    "div",
    { class: "empty wrong-box", role: "alert" },
    h("p", { class: "empty-title" }, gone ? "The server does not respond" : error.status === 404 ? "Not found" : "The request failed"),
    h("p", null, gone ? "It may have stopped, or the connection is down." : error.message),
    again && h("button", { type: "button", on: { click: again } }, "Try again"),
  );
}

export const working = (words) => h("p", { class: "working", role: "status" }, words);
