// Requests to the service. A Failure carries the server's message, or says that there was no response.

const KEY = "sparring-token";
let token = "";
try {
  token = sessionStorage.getItem(KEY) || "";
} catch {
  /* storage is blocked: keep the token in memory */
}

export class Failure extends Error {
  constructor(words, status) {
    super(words);
    this.status = status; // 0: no response
  }
}

export const hasToken = () => token !== "";

export function setToken(value) {
  token = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    /* storage is blocked */
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
    throw new Failure("The server does not respond.", 0);
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
    /* not JSON: report the status */
  }
  return `The server responded with ${answer.status} ${answer.statusText}.`;
}

export async function ask(path, options) {
  const answer = await request(path, options);
  try {
    return await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The response was cut off.", 0);
  }
}

export const address = (path, values) => {
  const kept = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return kept.length ? `${path}?${new URLSearchParams(kept)}` : path;
};

// The address of an image. An <img> cannot send a token, so with a token its content is returned as a data URL.
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
