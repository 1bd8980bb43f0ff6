// Questions to the service. A failure carries the one line that the server gave, or says that nobody answered.

const KEY = "sparring-token";
let token = "";
try {
  token = sessionStorage.getItem(KEY) || "";
} catch {
  /* kept for this page only */
}

export class Failure extends Error {
  constructor(words, status) {
    super(words);
    this.status = status; // 0: no answer at all
  }
}

export const hasToken = () => token !== "";

export function setToken(value) {
  token = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    /* as above */
  }
}

async function request(path, { body, signal } = {}) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server does not answer.", 0);
  }
  if (answer.ok) return answer;
  throw new Failure(await line(answer), answer.status);
}

async function line(answer) {
  try {
    const { detail } = await answer.json();
    if (typeof detail === "string") return detail;
    if (Array.isArray(detail)) return detail.map((each) => `${(each.loc || []).slice(1).join(".")}: ${each.msg}`).join("; ");
  } catch {
    /* no JSON: the status must do */
  }
  return `The server answered ${answer.status} ${answer.statusText}.`;
}

export async function ask(path, options) {
  const answer = await request(path, options);
  try {
    return await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server's answer broke off.", 0);
  }
}

export const address = (path, values) => {
  const kept = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return kept.length ? `${path}?${new URLSearchParams(kept)}` : path;
};

// An address for what a tag or a link must load by itself, which cannot send a token: with one, the content as a data URL.
export async function content(path, signal) {
  if (!token) return path;
  const blob = await (await request(path, { signal })).blob();
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Failure("The file could not be read.", 0));
    reader.readAsDataURL(blob);
  });
}

export const blob = async (path) => (await request(path)).blob();
