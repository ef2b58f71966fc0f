/** Export and import of conversations, as JSON or (export only) Markdown. */
import { path } from "./conversation.js";
import { byId, newId, toast } from "./dom.js";
import { isImage } from "./images.js";
import { defaultSettings } from "./settings.js";

const FORMAT = "afm-mlx conversations";
const VERSION = 1;
const ROLES = ["user", "assistant", "results"];

export function toJson(conversations) {
  return `${JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 2)}\n`;
}

/** The shown branch as Markdown. */
export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  if (conversation.settings.system.trim())
    parts.push(`**System prompt**\n\n${conversation.settings.system.trim()}`);
  for (const turn of path(conversation)) parts.push(turnMarkdown(turn));
  return `${parts.join("\n\n")}\n`;
}

function turnMarkdown(turn) {
  if (turn.role === "user") {
    const images = (turn.images ?? []).map((_, i) => `*Image ${i + 1}*`);
    return ["**You**", ...images, turn.text].filter(Boolean).join("\n\n");
  }
  if (turn.role === "results") {
    return turn.results
      .map(({ name, text }) => `**Result of ${name}**\n\n${fenced(text)}`)
      .join("\n\n");
  }
  const said = turn.format === "text" || !turn.text ? turn.text : fenced(turn.text, "json");
  const calls = turn.calls.map(
    (call) => `Tool call \`${call.name}\`:\n\n${fenced(call.arguments, "json")}`,
  );
  const error = turn.error ? `Error: ${turn.error.message}` : "";
  return [`**${turn.model}**`, said, ...calls, error].filter(Boolean).join("\n\n");
}

/** A code block whose fence is longer than any in the text. */
function fenced(text, language = "") {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

/** Read the conversations of a file, with new ids. Raises an Error for other files. */
export function fromJson(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  check(
    data?.format === FORMAT,
    `The file is not an export of this page: its "format" is not "${FORMAT}".`,
  );
  check(
    data.version === VERSION,
    `The file has version ${data.version}; version ${VERSION} is supported.`,
  );
  check(Array.isArray(data.conversations), "The file has no list of conversations.");
  return data.conversations.map(readConversation);
}

function readConversation(found, i) {
  const where = `Conversation ${i + 1}`;
  check(isObject(found) && isObject(found.turns), `${where} has no turns.`);
  const known = Object.fromEntries(
    Object.entries(found.turns).map(([id, turn]) => [id, readTurn(id, turn, where)]),
  );
  for (const turn of Object.values(known)) {
    check(
      turn.parent === null || Object.hasOwn(known, turn.parent),
      `${where}: the parent of a turn is missing.`,
    );
  }
  checkNoCycle(known, where);
  const head = found.head ?? null;
  check(head === null || Object.hasOwn(known, head), `${where}: its last turn is missing.`);
  const now = Date.now();
  return {
    id: newId("c"),
    title: text(found.title, "Imported chat"),
    renamed: found.renamed === true,
    created: time(found.created, now),
    updated: time(found.updated, now),
    head,
    settings: readSettings(found.settings),
    turns: known,
  };
}

function readTurn(id, turn, where) {
  check(
    isObject(turn) && ROLES.includes(turn.role),
    `${where}: a turn has no role that is one of ${ROLES.join(", ")}.`,
  );
  const parent = turn.parent ?? null;
  const shared = { id, parent, role: turn.role, created: time(turn.created, 0) };
  if (turn.role === "user") {
    check(typeof turn.text === "string", `${where}: a message has no text.`);
    const images = turn.images ?? [];
    check(
      Array.isArray(images) && images.every(isImage),
      `${where}: the images of a message must be data URIs in base64.`,
    );
    return { ...shared, text: turn.text, images };
  }
  if (turn.role === "results") {
    const results = list(turn.results, `${where}: tool results must be a list.`);
    const read = ({ call, name, text: said }) => ({
      call: text(call, ""),
      name: text(name, ""),
      text: text(said, ""),
    });
    return { ...shared, results: results.map(read) };
  }
  const calls = list(turn.calls ?? [], `${where}: tool calls must be a list.`);
  return {
    ...shared,
    model: text(turn.model, "unknown model"),
    format: turn.format === "json" ? "json" : "text",
    thought: text(turn.thought, ""),
    text: text(turn.text, ""),
    calls: calls.map((call) => ({
      id: text(call.id, ""),
      name: text(call.name, ""),
      arguments: text(call.arguments, ""),
    })),
    stats: readStats(turn.stats),
    end: text(turn.end, "lost"),
    error: isObject(turn.error)
      ? { message: text(turn.error.message, "An error without a message.") }
      : null,
  };
}

function readStats(stats) {
  if (!isObject(stats)) return null;
  const { rates, ...numbers } = stats;
  const read = Object.fromEntries(
    Object.entries(numbers).filter(([, value]) => Number.isFinite(value)),
  );
  return { tokens: 0, ...read, rates: Array.isArray(rates) ? rates.filter(Number.isFinite) : [] };
}

function readSettings(settings) {
  const made = defaultSettings();
  if (!isObject(settings)) return made;
  for (const name of Object.keys(made))
    if (typeof settings[name] === "string") made[name] = settings[name];
  return made;
}

function checkNoCycle(turns, where) {
  const checked = new Set();
  for (const turn of Object.values(turns)) {
    const way = new Set();
    for (let id = turn.id; id !== null && !checked.has(id); id = turns[id].parent) {
      check(!way.has(id), `${where}: its turns form a circle.`);
      way.add(id);
    }
    for (const id of way) checked.add(id);
  }
}

function check(holds, message) {
  if (!holds) throw new Error(message);
}

function list(value, message) {
  check(Array.isArray(value) && value.every(isObject), message);
  return value;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const text = (value, otherwise) => (typeof value === "string" ? value : otherwise);
const time = (value, otherwise) => (Number.isFinite(value) ? value : otherwise);

/** Download a text as a file. */
export function download(name, type, content) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** A file's name from a title. */
export function fileName(title, ending) {
  const plain = title
    .toLowerCase()
    .replace(/[^\p{L}\p{N}]+/gu, "-")
    .replace(/^-+|-+$/g, "")
    .slice(0, 60);
  return `${plain || "chat"}.${ending}`;
}

const LARGEST_FILE = 64 * 1024 * 1024; // bytes

export function bindTransfer(app) {
  byId("export-markdown").addEventListener("click", () => {
    download(fileName(app.current.title, "md"), "text/markdown", toMarkdown(app.current));
  });
  byId("export-json").addEventListener("click", () => {
    download(fileName(app.current.title, "json"), "application/json", toJson([app.current]));
  });
  byId("export-all").addEventListener("click", () => {
    download("afm-mlx-chats.json", "application/json", toJson([...app.conversations.values()]));
  });
  const field = byId("import-file");
  byId("import").addEventListener("click", () => field.click());
  field.addEventListener("change", async () => {
    const [file] = field.files;
    field.value = "";
    if (file) await importFile(app, file);
  });
}

async function importFile(app, file) {
  let found;
  try {
    if (file.size > LARGEST_FILE) throw new Error("The file is larger than 64 MB.");
    found = fromJson(await file.text());
  } catch (error) {
    toast(`Couldn't import ${file.name}. ${error.message}`);
    return;
  }
  for (const conversation of found) {
    app.add(conversation);
    await app.save(conversation);
  }
  if (!found.length) return toast(`${file.name} has no chats.`);
  app.open(found[0].id);
  toast(found.length === 1 ? "Imported 1 chat." : `Imported ${found.length} chats.`);
}
