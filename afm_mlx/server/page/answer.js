/** One answer: its model, thought, text or JSON tree, tool calls, end, and buttons. */
import { CallCard, resultsForm } from "./calls.js";
import { element, icon, iconButton } from "./dom.js";
import { JsonTree, readPartialJson } from "./json_tree.js";
import { showMarkdown } from "./markdown.js";
import { statsLine } from "./meter.js";

const NOTES = {
  length: "The answer was cut off at the token limit or the end of the context.",
  stopped: "You stopped this answer.",
  lost: "This answer was interrupted.",
};

export class AnswerView {
  #actions;
  #cards = [];
  #json = null;
  #schema;
  #form = null;

  /** `schema` is the JSON schema of an answer in progress, or null. */
  constructor(turn, actions, schema = null) {
    this.#actions = actions;
    this.#schema = schema;
    this.who = element("h2", { class: "who" }, ...modelName(turn.model));
    this.thought = new ThoughtView();
    this.text = element("div", { class: "text" });
    this.calls = element("div", { class: "calls" });
    this.end = element("div", { class: "end" });
    this.tools = element("div", { class: "turn-actions" });
    this.element = element("li", { class: "turn answer", tabindex: -1 });
    this.element.append(this.who, this.thought.element, this.text, this.calls, this.end, this.tools);
  }

  /** `place` is { index, count, isLast }: its index among its siblings, and true if it is the last turn. */
  update(turn, place) {
    const writing = turn.end === null;
    this.element.classList.toggle("writing", writing);
    this.element.setAttribute("aria-busy", writing);
    this.updateText(turn);
    this.end.replaceChildren(...(writing ? [] : this.#ending(turn)));
    this.#updateForm(turn, place.isLast && !writing && turn.end === "tool_calls");
    this.tools.replaceChildren(...(writing ? [] : this.#actions.forAnswer(turn, place)));
  }

  /** Show the text and the calls so far. */
  updateText(turn) {
    const isEmpty = !turn.thought && !turn.text && !turn.calls.length;
    this.element.classList.toggle("waiting", turn.end === null && isEmpty);
    this.thought.update(turn);
    if (turn.format === "json") this.#updateJson(turn);
    else showMarkdown(this.text, turn.text);
    turn.calls.forEach((call, i) => {
      if (!this.#cards[i]) {
        this.#cards[i] = new CallCard(call);
        this.calls.append(this.#cards[i].element);
      }
      this.#cards[i].update(call);
    });
  }

  #updateJson(turn) {
    const expected = turn.end === null && !turn.calls.length;
    if (!this.#json && (turn.text || expected)) {
      this.#json = new JsonView(this.#schema);
      this.text.append(this.#json.element);
    }
    this.#json?.update(turn.text, turn.end !== null);
    if (this.#json) this.#json.element.hidden = !turn.text && !expected;
  }

  #updateForm(turn, needed) {
    if (needed === (this.#form !== null)) return;
    this.#form?.remove();
    this.#form = needed
      ? resultsForm(turn.calls, (results) => this.#actions.answerCalls(turn, results))
      : null;
    if (needed) this.calls.append(this.#form);
  }

  #ending(turn) {
    const shown = [];
    if (turn.error) shown.push(this.#errorCard(turn));
    else if (NOTES[turn.end]) shown.push(element("p", { class: "note" }, NOTES[turn.end]));
    else if (!turn.text && !turn.calls.length)
      shown.push(element("p", { class: "note" }, "The answer is empty."));
    if (turn.stats?.tokens) shown.push(element("p", { class: "stats" }, statsLine(turn.stats)));
    return shown;
  }

  #errorCard(turn) {
    const { message, param, wait } = turn.error;
    const retry = iconButton("retry", "Try again", () => this.#actions.retry(turn), {
      visible: true,
    });
    const buttons = element("div", { class: "form-actions" }, retry);
    if (param && this.#actions.hasSetting(param)) {
      const show = () => this.#actions.showSetting(param, message);
      buttons.append(
        element("button", { type: "button", class: "button", onclick: show }, "Go to setting"),
      );
    }
    const hint = wait
      ? element("p", { class: "hint" }, `Retry after ${wait} s.`)
      : null;
    const said = element("p", {}, icon("warning"), element("span", {}, message));
    return element("div", { class: "card error" }, said, hint, buttons);
  }
}

/** What the model thought before its answer: open while it thinks, then folded, unless the user has chosen. */
class ThoughtView {
  #isChosen = false;

  constructor() {
    this.text = element("div", { class: "text" });
    const choose = () => (this.#isChosen = true);
    this.title = element("summary", { onclick: choose }, "Thought");
    this.element = element("details", { class: "thought", hidden: true }, this.title, this.text);
  }

  update(turn) {
    this.element.hidden = !turn.thought;
    if (!turn.thought) return;
    const thinks = turn.end === null && !turn.text && !turn.calls.length;
    this.title.textContent = thinks ? "Thinking…" : "Thought";
    if (!this.#isChosen) this.element.open = thinks;
    showMarkdown(this.text, turn.thought);
  }
}

/** Elements for a model's name and its adapter's. */
function modelName(id) {
  const [base, ...adapter] = id.split(":");
  if (!adapter.length) return [element("span", { class: "model-name" }, id)];
  const name = element("span", { class: "adapter-name" }, adapter.join(":"));
  return [element("span", { class: "model-name" }, `${base}:`), name];
}

/** JSON as a tree that fills in, or as raw text. */
class JsonView {
  #tree;
  #showsRaw = false;
  #isJson = true;

  constructor(schema) {
    this.#tree = new JsonTree(schema);
    this.raw = element("pre", {
      class: "raw",
      tabindex: 0,
      role: "region",
      "aria-label": "Raw JSON",
    });
    this.problem = element("p", { class: "note", hidden: true });
    const show = (raw) => () => {
      this.#showsRaw = raw;
      this.#showChoice();
    };
    this.buttons = [
      element("button", { type: "button", onclick: show(false) }, "Tree"),
      element("button", { type: "button", onclick: show(true) }, "Text"),
    ];
    const choice = element(
      "div",
      { class: "segments", role: "group", "aria-label": "View as" },
      ...this.buttons,
    );
    this.element = element(
      "div",
      { class: "json" },
      choice,
      this.#tree.element,
      this.raw,
      this.problem,
    );
    this.#showChoice();
  }

  update(text, ended) {
    let isWhole = false;
    try {
      const read = readPartialJson(text);
      this.#tree.update(read.value, !ended);
      [isWhole, this.#isJson] = [read.isWhole, true];
    } catch {
      this.#isJson = false;
    }
    this.raw.textContent = text;
    this.problem.hidden = this.#isJson && (isWhole || !ended);
    this.problem.textContent = this.#isJson ? "The JSON is incomplete." : "This is not valid JSON.";
    this.#showChoice();
  }

  #showChoice() {
    const raw = this.#showsRaw || !this.#isJson;
    this.#tree.element.hidden = raw;
    this.raw.hidden = !raw;
    this.buttons.forEach((button, i) => button.setAttribute("aria-pressed", raw === (i === 1)));
  }
}
