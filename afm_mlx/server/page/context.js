/** How much of the context is used: told by the server for what was answered, and counted for what is typed. */
import { countTokens } from "./api.js";
import { messagesOf } from "./conversation.js";
import { byId } from "./dom.js";
import { requestFields } from "./settings.js";

const COUNT_AFTER_MS = 300; // without a key being pressed
const CHARACTERS_PER_TOKEN = 4; // until the server has counted

export class Context {
  #app;
  #timer = null;
  #counted = { of: null, tokens: 0 }; // the chat that the server counted last
  #measured = null; // the answer that is written, or was last, and its speedometer

  constructor(app) {
    this.#app = app;
  }

  /** The text in the message field has changed. */
  typed() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#count(), COUNT_AFTER_MS);
    this.show();
  }

  /** An answer is being written, or has just ended. */
  measured(turn, speedometer) {
    this.#measured = { turn, speedometer };
    this.show();
  }

  show() {
    const turns = this.#app.path();
    const last = turns.at(-1);
    const writing = last?.end === null;
    const live = writing && this.#measured?.turn === last ? this.#measured.speedometer : null;
    const answer = turns.findLast((turn) => turn.role === "assistant" && turn.stats?.tokens);
    const stats = writing ? (live?.stats() ?? null) : (answer?.stats ?? null);
    const { tokens, exact } = this.#used(turns, last, writing);
    this.#app.meter.show({
      stats,
      used: tokens + (live?.pieces ?? 0),
      limit: this.#app.model()?.max_model_len ?? null,
      exact: exact && !writing,
    });
  }

  /** Tokens of the prompt that the next answer has, or that of the answer that is being written. */
  #used(turns, last, writing) {
    const typed = writing ? "" : byId("message").value;
    if (!typed && last?.stats?.promptTokens !== undefined) {
      return { tokens: last.stats.promptTokens + last.stats.tokens, exact: true };
    }
    if (!typed && !turns.length) return { tokens: 0, exact: true };
    const messages = this.#messages(writing ? turns.slice(0, -1) : turns, typed);
    const chat = JSON.stringify(messages);
    if (this.#counted.of === chat) return { tokens: this.#counted.tokens, exact: true };
    return { tokens: Math.ceil(chat.length / CHARACTERS_PER_TOKEN), exact: false };
  }

  #messages(turns, typed) {
    const messages = messagesOf(turns, this.#app.current.settings.system);
    return typed ? [...messages, { role: "user", content: typed }] : messages;
  }

  async #count() {
    const model = this.#app.model();
    const typed = byId("message").value;
    if (!typed || !model || this.#app.isRunning()) return;
    const messages = this.#messages(this.#app.path(), typed);
    try {
      const tokens = await countTokens(
        model.id,
        messages,
        requestFields(this.#app.current.settings).fields.tools,
      );
      this.#counted = { of: JSON.stringify(messages), tokens };
      this.show();
    } catch {
      // the estimate stays
    }
  }
}
