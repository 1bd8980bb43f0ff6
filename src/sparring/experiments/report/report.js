"use strict";
// Each heading sorts its table: numbers from the largest, words from A, then the other way; cells without a value stay last.
for (const table of document.querySelectorAll("table.sorts")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, at) => {
    const cell = row.cells[at];
    return cell.hasAttribute("data-value") ? Number(cell.getAttribute("data-value")) : cell.textContent.trim() || null;
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  heads.forEach((head, at) => {
    head.querySelector("button").addEventListener("click", () => {
      const first = head.classList.contains("text") ? "ascending" : "descending";
      const other = first === "ascending" ? "descending" : "ascending";
      const way = head.getAttribute("aria-sort") === first ? other : first;
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", way);
      const sign = way === "ascending" ? 1 : -1;
      const keyed = [...body.rows].map((row) => [value(row, at), row]);
      keyed.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : sign * compare(a, b)));
      body.append(...keyed.map(([, row]) => row));
    });
  });
}
