/** Calls of tools: their arguments while they stream, and the form in which the reader types their results. */
import { element, icon } from "./dom.js";
import { JsonTree } from "./json_tree.js";
import { PartialJson } from "./partial_json.js";

/** One call: its name, and its arguments as a tree. */
export class CallCard {
  #parser = new PartialJson();
  #tree = new JsonTree();
  #fed = 0;

  constructor(call) {
    this.name = element("span", { class: "call-name" }, call.name);
    const head = element("p", { class: "card-head" }, icon("tool"), "Calls ", this.name);
    this.raw = element("pre", { class: "raw", tabindex: 0, hidden: true });
    this.element = element("div", { class: "card call" }, head, this.#tree.element, this.raw);
  }

  update(call) {
    this.name.textContent = call.name;
    this.#parser.feed(call.arguments.slice(this.#fed));
    this.#fed = call.arguments.length;
    this.#tree.update(this.#parser.root);
    this.#tree.element.hidden = this.#parser.error !== null;
    this.raw.hidden = this.#parser.error === null;
    this.raw.textContent = call.arguments;
  }
}

/** A field for each call's result; `onresults([{ call, name, text }])` when they are sent. */
export function resultsForm(calls, onresults, { texts = [], oncancel = null } = {}) {
  const fields = calls.map((call, i) => resultField(call, i, calls.length, texts[i] ?? ""));
  const submit = (event) => {
    event.preventDefault();
    onresults(
      calls.map((call, i) => ({ call: call.id, name: call.name, text: fields[i].input.value })),
    );
  };
  const cancel =
    oncancel && element("button", { type: "button", class: "button", onclick: oncancel }, "Cancel");
  const send = element(
    "button",
    { type: "submit", class: "button primary" },
    calls.length > 1 ? "Send results" : "Send result",
  );
  const form = element(
    "form",
    { class: "results-form", onsubmit: submit },
    ...fields.map((field) => field.element),
  );
  form.append(element("div", { class: "form-actions" }, send, cancel ?? ""));
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  return form;
}

function resultField(call, i, count, text) {
  const which =
    count > 1 ? `Result of ${call.name} (${i + 1} of ${count})` : `Result of ${call.name}`;
  const input = element("textarea", {
    rows: 2,
    spellcheck: "false",
    placeholder: '{"city": "Hitton", "arrives": "March 14"}',
  });
  input.value = text;
  return {
    input,
    element: element("label", { class: "labelled" }, element("span", {}, which), input),
  };
}

/** A result that was sent. */
export function resultCard({ name, text }) {
  const head = element(
    "p",
    { class: "card-head" },
    icon("back"),
    "Result of ",
    element("span", { class: "call-name" }, name),
  );
  return element(
    "div",
    { class: "card" },
    head,
    element("pre", { class: "raw", tabindex: 0 }, text || "(empty)"),
  );
}
