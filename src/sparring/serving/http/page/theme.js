"use strict";
// Not a module, so it runs before the first paint and the other theme never flashes.
(() => {
  const root = document.documentElement;
  const kept = () => {
    try {
      return localStorage.getItem("theme");
    } catch {
      return null;
    }
  };
  const apply = (theme) => (theme ? root.setAttribute("data-theme", theme) : root.removeAttribute("data-theme"));
  apply(kept());
  const next = { "": "light", light: "dark", dark: "" };
  const words = { "": "Auto", light: "Light", dark: "Dark" };
  const signs = { "": "◐", light: "○", dark: "●" };
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => {
      const now = root.getAttribute("data-theme") || "";
      button.firstElementChild.textContent = signs[now];
      button.lastElementChild.textContent = words[now];
      button.setAttribute("aria-label", `Theme: ${words[now].toLowerCase()}`);
    };
    button.addEventListener("click", () => {
      const theme = next[root.getAttribute("data-theme") || ""];
      try {
        localStorage.setItem("theme", theme);
      } catch {
        /* storage is blocked: the theme still changes */
      }
      apply(theme);
      show();
    });
    show();
  });
})();
