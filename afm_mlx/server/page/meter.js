/** How fast an answer comes, and how full the context is: measured from the stream, and drawn. */
import { byId, element, number, svgElement } from "./dom.js";

const WINDOW = 12; // pieces over which a rate is taken, at least
const WINDOW_SHARE = 0.2; // of the time so far, at least: pieces that come in one read share a time
const SHORTEST_MS = 10; // of an answer that has a rate
const MOST_POINTS = 80; // of a curve

/** Measures one answer. Times are milliseconds, rates are tokens per second. */
export class Speedometer {
  #begun = performance.now();
  #arrivals = []; // of pieces

  /** A piece of the answer has come: a token or a few. */
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
   * What is known of the answer: of its own clock, and of the server's usage and timings, once they are there.
   * The server knows which tokens the model chose: those that a format forces come at once, and early.
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
  if (stats.speed) parts.push(`${number(stats.speed)} per second`);
  if (stats.firstMs !== undefined) parts.push(`first after ${number(stats.firstMs / 1000, 2)} s`);
  if (stats.acceptance !== undefined)
    parts.push(`${number(100 * stats.acceptance)} % of drafts taken`);
  return parts.join(" · ");
}

/** The strip below the message field, and the larger chart with its figures in the panel. */
export class MeterView {
  #small = new Curve(byId("spark"), 72, 22);
  #large = new Curve(byId("chart"), 280, 88);

  /**
   * Show an answer's stats (null before the first), and the context: `used` tokens of `limit` (null where the
   * server tells none), an estimate unless `exact`.
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
  if (!rates?.length) return "Tokens per second along the answer: nothing measured yet";
  const [least, most] = [Math.min(...rates), Math.max(...rates)];
  const mean = speed === null ? "" : `, ${number(speed)} on the whole`;
  return `Tokens per second along the answer: from ${number(least)} to ${number(most)}${mean}`;
}

function figures(stats) {
  if (!stats) return [];
  const rows = [
    ["Tokens per second", stats.speed && number(stats.speed, 1)],
    ["First token after", stats.firstMs !== undefined && `${number(stats.firstMs / 1000, 2)} s`],
    ["Tokens of the answer", number(stats.tokens)],
    ["Tokens of the prompt", stats.promptTokens !== undefined && number(stats.promptTokens)],
    ["Prompt from the cache", stats.cachedTokens !== undefined && number(stats.cachedTokens)],
    [
      "Drafted tokens taken",
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
