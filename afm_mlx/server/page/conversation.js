/**
 * A conversation is a tree of turns: editing a message or regenerating an answer adds a branch, so that nothing
 * is lost. `head` is the last turn of the shown branch.
 *
 *     { id, title, renamed, created, updated, head, settings, turns: { id: turn } }
 *
 * A turn has `id`, `parent` (null for the first), `role`, `created` (milliseconds), and by role
 *
 *     user       text, images: data URIs
 *     assistant  model, thought, text, calls: [{ id, name, arguments }], format, stats, end, error
 *     results    results: [{ call, name, text }] of the calls of the answer before
 *
 * `end` says how an answer ended: null while in progress, or stop, length, tool_calls, stopped (by the
 * user), lost (the page was closed), error.
 */
import { newId } from "./dom.js";
import { defaultSettings } from "./settings.js";

const LONGEST_TITLE = 60; // characters

export function newConversation(settings = defaultSettings()) {
  const now = Date.now();
  const id = newId("c");
  return {
    id,
    title: "New chat",
    renamed: false,
    created: now,
    updated: now,
    head: null,
    settings,
    turns: {},
  };
}

/** Add a turn under `parent`, which becomes the head. */
export function addTurn(conversation, parent, fields) {
  const turn = { id: newId("t"), parent, created: Date.now(), ...fields };
  conversation.turns[turn.id] = turn;
  conversation.head = turn.id;
  conversation.updated = turn.created;
  if (Object.keys(conversation.turns).length === 1 && !conversation.renamed)
    conversation.title = titleOf(turn.text) || "Image";
  return turn;
}

export const newAnswer = (model, format) => ({
  role: "assistant",
  model,
  format,
  thought: "",
  text: "",
  calls: [],
  stats: null,
  end: null,
  error: null,
});

function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > LONGEST_TITLE ? `${line.slice(0, LONGEST_TITLE - 1)}…` : line;
}

/** The turns from the first to `last`, or to the head. */
export function path(conversation, last = conversation.head) {
  const turns = [];
  for (let id = last; id !== null; id = conversation.turns[id].parent)
    turns.push(conversation.turns[id]);
  return turns.reverse();
}

/** The versions of a turn, oldest first. */
export function siblings(conversation, turn) {
  return Object.values(conversation.turns)
    .filter((other) => other.parent === turn.parent)
    .sort((a, b) => a.created - b.created);
}

/** Show the newest branch through a turn. */
export function showBranch(conversation, turn) {
  let last = turn;
  for (;;) {
    const below = Object.values(conversation.turns).filter((other) => other.parent === last.id);
    if (!below.length) break;
    last = below.reduce((newest, other) => (other.created >= newest.created ? other : newest));
  }
  conversation.head = last.id;
}

/** Calls of the last answer without results. */
export function openCalls(conversation) {
  const last = conversation.turns[conversation.head];
  return last?.role === "assistant" && last.end === "tool_calls" ? last.calls : [];
}

/** Turns as the messages of a request. Empty answers are left out. */
export function messagesOf(turns, system) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  turns.forEach((turn, i) => {
    if (turn.role === "user") messages.push(userMessage(turn));
    else if (turn.role === "results") messages.push(...turn.results.map(toolMessage));
    else messages.push(...answerMessages(turn, turns[i + 1]?.role === "results"));
  });
  return messages;
}

/** A message of the user, whose images come before its text. */
export function userMessage({ text, images = [] }) {
  if (!images.length) return { role: "user", content: text };
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: text ? [...parts, { type: "text", text }] : parts };
}

const toolMessage = ({ call, text }) => ({ role: "tool", tool_call_id: call, content: text });

function answerMessages(turn, hasResults) {
  const calls = hasResults ? turn.calls : []; // calls without results are left out
  if (!turn.text && !calls.length) return [];
  const message = { role: "assistant", content: turn.text || null };
  if (turn.thought) message.reasoning_content = turn.thought;
  if (calls.length) {
    message.tool_calls = calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return [message];
}

/** The part of a message around a match; "" for a match in the title, null for none. */
export function excerpt(conversation, query) {
  const wanted = query.toLowerCase();
  if (conversation.title.toLowerCase().includes(wanted)) return "";
  for (const turn of Object.values(conversation.turns)) {
    const text = turn.text ?? turn.results?.map((result) => result.text).join("\n") ?? "";
    const at = text.toLowerCase().indexOf(wanted);
    if (at >= 0)
      return `${at > 20 ? "…" : ""}${text.slice(Math.max(0, at - 20), at + wanted.length + 40)}`;
  }
  return null;
}
