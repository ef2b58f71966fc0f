/** Answers that are being written, at most one in each conversation. They go on while another one is shown. */
import { addTurn, messagesOf, newAnswer, path } from "./conversation.js";
import { announce } from "./dom.js";
import { generate } from "./generation.js";
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

  /** Begin to answer the turn with the id `parent`; returns the answer's turn, which has no text yet. */
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
    return `The answer calls ${turn.calls.map((call) => call.name).join(", ")}. Type the result.`;
  const rest = turn.text.length > LONGEST_ANNOUNCED ? "… The rest is in the page." : "";
  return `${turn.model} answered: ${turn.text.slice(0, LONGEST_ANNOUNCED)}${rest}`;
}
