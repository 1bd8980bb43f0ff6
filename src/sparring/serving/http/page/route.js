// The URL is the state: #/user/1042?run=a&with=b&k=20. Views can be shared as links, and the back button works.

const DEFAULTS = { run: "", with: "", k: "10", seen: "hide", where: "[]" };
const VIEWS = new Set(["user", "item", "text", "training"]);

export function read() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const [view, ...rest] = path.split("/");
  const given = Object.fromEntries(new URLSearchParams(query || ""));
  const route = { view: VIEWS.has(view) ? view : "start", id: decode(rest.join("/")), ...DEFAULTS, ...given };
  route.k = Math.min(Math.max(parseInt(route.k, 10) || 10, 1), 100);
  try {
    route.where = JSON.parse(route.where).filter((each) => each && typeof each.column === "string");
  } catch {
    route.where = [];
  }
  return route;
}

const decode = (text) => {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
};

export function write(route) {
  const { view, id } = route;
  const path = view === "start" ? "" : id ? `${view}/${encodeURIComponent(id)}` : view;
  const values = { ...route, k: String(route.k), where: JSON.stringify(route.where || []) };
  const kept = Object.keys(DEFAULTS).filter((name) => values[name] && values[name] !== DEFAULTS[name]);
  const query = new URLSearchParams(kept.map((name) => [name, values[name]]));
  return `#/${path}${kept.length ? `?${query}` : ""}`;
}

export const go = (changes) => {
  location.hash = write({ ...read(), ...changes });
};

// A link to a user or an item that keeps the selected runs; filters belong to one view.
export const link = (view, id) => {
  const { run, with: other, k } = read();
  return write({ ...DEFAULTS, view, id: String(id), run, with: other, k, where: [] });
};
