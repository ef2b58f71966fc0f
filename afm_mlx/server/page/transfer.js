/** Conversations as files: JSON, which can be imported again, and Markdown, for people. */
import { path } from "./conversation.js";
import { newId } from "./dom.js";
import { defaultSettings } from "./settings.js";

const FORMAT = "afm-mlx conversations";
const VERSION = 1;
const ROLES = ["user", "assistant", "results"];

export function toJson(conversations) {
  return `${JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 2)}\n`;
}

/** The branch that is shown. */
export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  if (conversation.settings.system.trim())
    parts.push(`**Instructions**\n\n${conversation.settings.system.trim()}`);
  for (const turn of path(conversation)) parts.push(turnMarkdown(turn));
  return `${parts.join("\n\n")}\n`;
}

function turnMarkdown(turn) {
  if (turn.role === "user") return `**You**\n\n${turn.text}`;
  if (turn.role === "results") {
    return turn.results
      .map(({ name, text }) => `**Result of ${name}**\n\n${fenced(text)}`)
      .join("\n\n");
  }
  const said = turn.format === "text" || !turn.text ? turn.text : fenced(turn.text, "json");
  const calls = turn.calls.map(
    (call) => `Calls \`${call.name}\`:\n\n${fenced(call.arguments, "json")}`,
  );
  const error = turn.error ? `Error: ${turn.error.message}` : "";
  return [`**${turn.model}**`, said, ...calls, error].filter(Boolean).join("\n\n");
}

/** A block of code whose fence is longer than any in the text. */
function fenced(text, language = "") {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

/** The conversations of a file, with new ids. Raises an Error that says what is wrong with the file. */
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
    `The file has version ${data.version}; this page reads version ${VERSION}.`,
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
      `${where}: a turn follows one that isn't there.`,
    );
  }
  checkNoCycle(known, where);
  const head = found.head ?? null;
  check(head === null || Object.hasOwn(known, head), `${where}: its last turn isn't there.`);
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
    return { ...shared, text: turn.text };
  }
  if (turn.role === "results") {
    const results = list(turn.results, `${where}: results of calls are no list.`);
    const read = ({ call, name, text: said }) => ({
      call: text(call, ""),
      name: text(name, ""),
      text: text(said, ""),
    });
    return { ...shared, results: results.map(read) };
  }
  const calls = list(turn.calls ?? [], `${where}: the calls of an answer are no list.`);
  return {
    ...shared,
    model: text(turn.model, "unknown model"),
    format: turn.format === "json" ? "json" : "text",
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
      check(!way.has(id), `${where}: its turns follow each other in a circle.`);
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

/** Hand a text to the browser as a file to keep. */
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
