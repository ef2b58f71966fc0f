/** Answers in progress, at most one per conversation. They continue while another conversation is shown. */
import { streamChat } from "./api.js";
import { addTurn, messagesOf, newAnswer, path } from "./conversation.js";
import { announce } from "./dom.js";
import { Speedometer } from "./meter.js";
import { requestFields } from "./settings.js";

const SAVE_EVERY_MS = 1000;
const LONGEST_ANNOUNCED = 600; // characters

export class Answers {
  #running = new Map(); // id of a conversation -> the controller of its request
  #listener;

  /** `listener`: grew and ended(conversation, turn, speedometer), and save(conversation). */
  constructor(listener) {
    this.#listener = listener;
  }

  running() {
    return new Set(this.#running.keys());
  }

  isRunning(conversation) {
    return this.#running.has(conversation.id);
  }

  stop(conversation) {
    this.#running.get(conversation.id)?.abort();
  }

  /** Start to answer the turn with the id `parent`; returns the answer's turn, which is empty. */
  begin(conversation, parent) {
    const { settings } = conversation;
    const { fields } = requestFields(settings);
    const messages = messagesOf(path(conversation, parent), settings.system);
    const turn = addTurn(
      conversation,
      parent,
      newAnswer(settings.model, fields.response_format ? "json" : "text"),
    );
    const controller = new AbortController();
    this.#running.set(conversation.id, controller);
    this.#run(conversation, turn, { model: settings.model, messages, ...fields }, controller);
    return turn;
  }

  async #run(conversation, turn, body, controller) {
    const speedometer = new Speedometer();
    let saved = 0;
    let drawn = false;
    const draw = () => {
      drawn = false;
      if (turn.end === null) this.#listener.grew(conversation, turn, speedometer);
    };
    const grew = () => {
      if (!drawn) requestAnimationFrame(draw);
      drawn = true;
      if (performance.now() - saved < SAVE_EVERY_MS) return;
      saved = performance.now();
      this.#listener.save(conversation);
    };
    await generate(turn, body, speedometer, controller.signal, grew);
    this.#running.delete(conversation.id);
    conversation.updated = Date.now();
    this.#listener.save(conversation);
    this.#listener.ended(conversation, turn, speedometer);
    announce(announcement(turn));
  }
}

function announcement(turn) {
  if (turn.error) return `The answer failed: ${turn.error.message}`;
  if (turn.end === "stopped") return "The answer was stopped.";
  if (turn.calls.length)
    return `Tool call: ${turn.calls.map((call) => call.name).join(", ")}. Enter the result.`;
  const rest = turn.text.length > LONGEST_ANNOUNCED ? "… Continued on the page." : "";
  return `${turn.model} answered: ${turn.text.slice(0, LONGEST_ANNOUNCED)}${rest}`;
}

/**
 * Fill `turn`, an empty answer, from the stream; `onpiece()` is called when it has grown.
 *
 * Errors are kept in the turn's `error`. Aborting `signal` ends the stream.
 */
export async function generate(turn, body, speedometer, signal, onpiece) {
  let usage = null;
  let timings = null;
  try {
    for await (const chunk of streamChat(body, signal)) {
      usage = chunk.usage ?? usage;
      timings = chunk.timings ?? timings;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      if (takeDelta(turn, choice.delta ?? {})) {
        speedometer.piece();
        onpiece();
      }
      if (choice.finish_reason) turn.ending = choice.finish_reason;
    }
    turn.end = turn.ending ?? "stop";
  } catch (error) {
    turn.end = error.name === "AbortError" || signal.aborted ? "stopped" : "error";
    if (turn.end === "error") turn.error = described(error);
  }
  delete turn.ending;
  turn.stats = speedometer.stats(usage, timings);
}

/** Add a chunk's delta; false if it has nothing to show. */
function takeDelta(turn, delta) {
  if (delta.reasoning_content) turn.thought += delta.reasoning_content;
  if (delta.content) turn.text += delta.content;
  for (const part of delta.tool_calls ?? []) {
    const call = (turn.calls[part.index] ??= { id: "", name: "", arguments: "" });
    if (part.id) call.id = part.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  return Boolean(delta.reasoning_content || delta.content || delta.tool_calls?.length);
}

function described(error) {
  const { message, param = null, status = 0, retryAfter = null } = error;
  return { message, param, status, wait: retryAfter };
}
