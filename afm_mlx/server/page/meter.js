/** Speed and context usage: measured from the stream, counted for typed text, and drawn. */
import { countTokens } from "./api.js";
import { messagesOf, userMessage } from "./conversation.js";
import { byId, element, number, svgElement } from "./dom.js";
import { requestFields } from "./settings.js";

const WINDOW = 12; // pieces over which a rate is taken, at least
const WINDOW_SHARE = 0.2; // of the time so far, at least: pieces that come in one read share a time
const SHORTEST_MS = 10; // of an answer that has a rate
const MOST_POINTS = 80; // of a curve

/** Measures one answer. Times are milliseconds, rates are tokens per second. */
export class Speedometer {
  #begun = performance.now();
  #arrivals = []; // of pieces

  /** Record a piece of the answer: a token or a few. */
  piece() {
    this.#arrivals.push(performance.now());
  }

  get pieces() {
    return this.#arrivals.length;
  }

  /** The rate along the answer, over the pieces before each point. */
  rates() {
    const times = this.#arrivals;
    const stride = Math.max(1, Math.ceil(times.length / MOST_POINTS));
    const rates = [];
    for (let i = 2; i < times.length; i += stride) {
      const shortest = Math.max(SHORTEST_MS, WINDOW_SHARE * (times[i] - times[0]));
      let from = Math.max(0, i - WINDOW);
      while (from > 0 && times[i] - times[from] < shortest) from -= 1;
      const elapsed = times[i] - times[from];
      if (elapsed >= SHORTEST_MS) rates.push((1000 * (i - from)) / elapsed);
    }
    return rates;
  }

  /**
   * The answer's figures, measured here, and from the server's usage and timings once they are known.
   * Only the server can tell sampled tokens from forced ones, which come at once.
   */
  stats(usage = null, timings = null) {
    const pieces = this.#arrivals.length;
    const tokens = usage?.completion_tokens ?? pieces;
    const stats = { tokens, rates: this.rates().map(Math.round) };
    if (pieces) stats.firstMs = this.#arrivals[0] - this.#begun;
    const elapsed = pieces ? this.#arrivals.at(-1) - this.#arrivals[0] : 0;
    if (pieces > 1 && elapsed >= SHORTEST_MS) stats.speed = (1000 * (pieces - 1)) / elapsed;
    if (timings) {
      stats.firstMs = timings.first_token_ms ?? undefined;
      stats.speed = timings.tokens_per_second ?? undefined;
    }
    if (!usage) return stats;
    stats.promptTokens = usage.prompt_tokens;
    const { cached_tokens: cached } = usage.prompt_tokens_details ?? {};
    const { accepted_prediction_tokens: accepted, rejected_prediction_tokens: rejected } =
      usage.completion_tokens_details ?? {};
    if (cached > 0) stats.cachedTokens = cached;
    if (accepted + rejected > 0) stats.acceptance = accepted / (accepted + rejected);
    return stats;
  }
}

/** The numbers of an answer in one line. */
export function statsLine(stats) {
  const parts = [`${number(stats.tokens)} token${stats.tokens === 1 ? "" : "s"}`];
  if (stats.speed) parts.push(`${number(stats.speed)} tok/s`);
  if (stats.firstMs !== undefined) parts.push(`first token after ${number(stats.firstMs / 1000, 2)} s`);
  if (stats.acceptance !== undefined)
    parts.push(`${number(100 * stats.acceptance)} % of drafts accepted`);
  return parts.join(" · ");
}

/** The strip below the message field, and the larger chart with its figures in the panel. */
export class MeterView {
  #small = new Curve(byId("spark"), 72, 22);
  #large = new Curve(byId("chart"), 280, 88);

  /**
   * Show an answer's stats (null before the first), and the context: `used` tokens of `limit` (null if
   * unknown), an estimate unless `exact`.
   */
  show({ stats, used, limit, exact }) {
    const rates = stats?.rates;
    byId("spark").toggleAttribute("hidden", !rates?.length);
    this.#small.draw(rates);
    this.#large.draw(rates);
    const speed = stats?.speed ?? rates?.at(-1) ?? null;
    byId("speed").textContent = speed === null ? "" : `${number(speed)} tok/s`;
    const share = limit ? Math.min(1, used / limit) : 0;
    for (const fill of [byId("context-fill"), byId("context-fill-large")]) {
      fill.style.inlineSize = `${100 * share}%`;
      fill.classList.toggle("nearly-full", share > 0.9);
    }
    const about = exact ? "" : "about ";
    const context = limit
      ? `${about}${number(used)} of ${number(limit)} tokens`
      : `${about}${number(used)} tokens`;
    byId("context").textContent = limit ? `${number(used)} / ${number(limit)}` : number(used);
    byId("context-bar").hidden = byId("context-bar-large").hidden = !limit;
    byId("context-large").textContent = context;
    const said = speed === null ? "" : `, ${number(speed)} tokens per second`;
    byId("meter").setAttribute("aria-label", `Context: ${context}${said}. Show statistics`);
    byId("chart").setAttribute("aria-label", chartLabel(rates, speed));
    byId("figures").replaceChildren(...figures(stats));
  }
}

function chartLabel(rates, speed) {
  if (!rates?.length) return "Tokens per second over the answer: no data yet";
  const [least, most] = [Math.min(...rates), Math.max(...rates)];
  const mean = speed === null ? "" : `, ${number(speed)} on average`;
  return `Tokens per second over the answer: from ${number(least)} to ${number(most)}${mean}`;
}

function figures(stats) {
  if (!stats) return [];
  const rows = [
    ["Tokens per second", stats.speed && number(stats.speed, 1)],
    ["Time to first token", stats.firstMs !== undefined && `${number(stats.firstMs / 1000, 2)} s`],
    ["Answer tokens", number(stats.tokens)],
    ["Prompt tokens", stats.promptTokens !== undefined && number(stats.promptTokens)],
    ["Cached prompt tokens", stats.cachedTokens !== undefined && number(stats.cachedTokens)],
    [
      "Draft tokens accepted",
      stats.acceptance !== undefined && `${number(100 * stats.acceptance)} %`,
    ],
  ];
  return rows
    .filter(([, value]) => value)
    .map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
}

/** A line over its area, from zero to its maximum. */
class Curve {
  #width;
  #height;
  #area = svgElement("path", { class: "area" });
  #line = svgElement("path", { class: "line" });

  constructor(svg, width, height) {
    this.#width = width;
    this.#height = height;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.append(this.#area, this.#line);
  }

  draw(rates) {
    if (!rates || rates.length < 2) {
      this.#area.setAttribute("d", "");
      this.#line.setAttribute("d", `M0 ${this.#height - 1}H${this.#width}`);
      return;
    }
    const top = Math.max(...rates) * 1.1;
    const x = (i) => ((i * this.#width) / (rates.length - 1)).toFixed(1);
    const y = (rate) => (this.#height - 1 - (rate / top) * (this.#height - 2)).toFixed(1);
    const line = `M${rates.map((rate, i) => `${x(i)} ${y(rate)}`).join("L")}`;
    this.#line.setAttribute("d", line);
    this.#area.setAttribute("d", `${line}V${this.#height}H0Z`);
  }
}

const COUNT_AFTER_MS = 300; // without a key press
const CHARACTERS_PER_TOKEN = 4; // until the server has counted

/** Messages as a text, in which images are short: their lengths say nothing of their tokens. */
const withoutImages = (messages) =>
  JSON.stringify(messages, (key, value) =>
    key === "url" ? `${value.length} ${value.slice(-64, -24)}` : value,
  );

export class Context {
  #app;
  #timer = null;
  #counted = { of: null, tokens: 0 }; // the chat that the server counted last
  #measured = null; // the last answer, and its speedometer

  constructor(app) {
    this.#app = app;
  }

  /** The text in the message field has changed. */
  typed() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#count(), COUNT_AFTER_MS);
    this.show();
  }

  /** An answer has grown or ended. */
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

  /** Tokens of the next answer's prompt, or of the current answer's. */
  #used(turns, last, writing) {
    const typed = writing ? null : this.#typed();
    if (!typed && last?.stats?.promptTokens !== undefined) {
      return { tokens: last.stats.promptTokens + last.stats.tokens, exact: true };
    }
    if (!typed && !turns.length) return { tokens: 0, exact: true };
    const messages = this.#messages(writing ? turns.slice(0, -1) : turns, typed);
    const chat = withoutImages(messages);
    if (this.#counted.of === chat) return { tokens: this.#counted.tokens, exact: true };
    return { tokens: Math.ceil(chat.length / CHARACTERS_PER_TOKEN), exact: false };
  }

  #messages(turns, typed) {
    const messages = messagesOf(turns, this.#app.current.settings.system);
    return typed ? [...messages, userMessage(typed)] : messages;
  }

  /** The text and the images of the next message, or null for none. */
  #typed() {
    const { images } = this.#app.composer;
    const text = byId("message").value;
    return text || images.length ? { text, images } : null;
  }

  async #count() {
    const model = this.#app.model();
    const typed = this.#typed();
    if (!typed || !model || this.#app.isRunning()) return;
    const messages = this.#messages(this.#app.path(), typed);
    try {
      const tokens = await countTokens(
        model.id,
        messages,
        requestFields(this.#app.current.settings).fields.tools,
      );
      this.#counted = { of: withoutImages(messages), tokens };
      this.show();
    } catch {
      // the estimate stays
    }
  }
}
