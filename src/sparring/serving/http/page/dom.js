// Elements without markup: data only ever becomes text nodes, so none of it is parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listen] of Object.entries(value)) element.addEventListener(event, listen);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name in element && typeof value !== "string" && !(element instanceof SVGElement)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const svg = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);
export const byId = (id) => document.getElementById(id);

export function put(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Announce a change to screen readers.
export function say(words) {
  byId("announcement").textContent = words;
}

export const count = (number) => Number(number).toLocaleString("en");
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
export const percent = (share) => `${(100 * share).toFixed(share >= 0.0995 ? 0 : share >= 0.00995 ? 1 : 2)}%`;

export function figure(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return Array.isArray(value) ? value.join(", ") : String(value);
  if (Number.isInteger(value)) return Math.abs(value) >= 10000 ? count(value) : String(value);
  return String(Number(Math.abs(value) >= 1 ? value.toFixed(3) : value.toPrecision(4)));
}
