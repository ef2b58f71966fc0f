/** Requests to the server, its errors, and its event stream. */

/** An error of the server in OpenAI's form, with its HTTP status (0 in a stream). */
class ServerError extends Error {
  constructor(status, { message, type = null, param = null, code = null }, retryAfter = null) {
    super(message);
    Object.assign(this, { status, type, param, code, retryAfter });
  }
}

/** The server can't be reached, or the connection broke. */
class ConnectionLost extends Error {}

const KEY = "afm-mlx key";
let askForKey = async () => null;
let asking = null; // the open dialog, which all requests wait for

/** Set the function that asks for a key: `ask(rejected)` returns { key, remember } or null. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

const storages = () => {
  try {
    return [sessionStorage, localStorage];
  } catch {
    return []; // the browser allows no storage
  }
};

function knownKey() {
  return storages().reduce((key, storage) => key ?? storage.getItem(KEY), null);
}

function keepKey({ key, remember }) {
  const [session, local] = storages();
  session?.setItem(KEY, key);
  if (remember) local?.setItem(KEY, key);
  else local?.removeItem(KEY);
}

async function request(path, { body = null, signal = null } = {}) {
  for (;;) {
    const key = knownKey();
    const response = await send(path, body, signal, key);
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401) throw error;
    asking ??= askForKey(key !== null).finally(() => (asking = null));
    const answer = await asking;
    if (!answer) throw error;
    keepKey(answer);
  }
}

async function send(path, body, signal, key) {
  const headers = {};
  if (body) headers["Content-Type"] = "application/json";
  if (key) headers.Authorization = `Bearer ${key}`;
  const options = { method: body ? "POST" : "GET", headers, signal, cache: "no-store" };
  if (body) options.body = JSON.stringify(body);
  try {
    return await fetch(new URL(path, document.baseURI), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ConnectionLost("The server can't be reached.");
  }
}

async function errorOf(response) {
  let error = null;
  try {
    ({ error } = await response.json());
  } catch {
    // not the server's own error, but a proxy's for instance
  }
  const fields =
    typeof error?.message === "string"
      ? error
      : { message: `The server returned status ${response.status}.` };
  return new ServerError(response.status, fields, response.headers.get("Retry-After"));
}

/** The available models and adapters: objects with `id`, `max_model_len` and `capabilities.vision`. */
export async function listModels() {
  return (await (await request("v1/models")).json()).data;
}

/** The number of tokens that a chat has as a prompt. */
export async function countTokens(model, messages, tools = null) {
  const body = { model, messages, ...(tools ? { tools } : {}) };
  return (await (await request("tokenize", { body })).json()).count;
}

/** The chunks of a streamed chat completion. Aborting `signal` stops the server, too. */
export async function* streamChat(body, signal) {
  const options = { stream: true, stream_options: { include_usage: true } };
  const response = await request("v1/chat/completions", { body: { ...body, ...options }, signal });
  for await (const data of events(response.body.getReader())) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(0, chunk.error);
    yield chunk;
  }
  throw new ConnectionLost("The connection was lost before the answer was complete.");
}

/** The data of server-sent events. */
async function* events(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  for (;;) {
    const { done, value } = await readFrom(reader);
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      if (line !== "" || !data.length) continue;
      yield data.join("\n");
      data = [];
    }
  }
}

async function readFrom(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ConnectionLost("The connection was lost before the answer was complete.");
  }
}
