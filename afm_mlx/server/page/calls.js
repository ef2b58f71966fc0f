/** Tool calls: their arguments while they stream, and the form for their results. */
import { element, icon } from "./dom.js";
import { JsonTree, readPartialJson } from "./json_tree.js";

/** A tool call: its name, and its arguments as a tree. */
export class CallCard {
  #tree = new JsonTree();

  constructor(call) {
    this.name = element("span", { class: "call-name" }, call.name);
    const head = element("p", { class: "card-head" }, icon("tool"), "Tool call ", this.name);
    this.raw = element("pre", { class: "raw", tabindex: 0, hidden: true });
    this.element = element("div", { class: "card call" }, head, this.#tree.element, this.raw);
  }

  update(call) {
    this.name.textContent = call.name;
    let isJson = true;
    try {
      const { value, isWhole } = readPartialJson(call.arguments);
      this.#tree.update(value, !isWhole);
    } catch {
      isJson = false;
    }
    this.#tree.element.hidden = !isJson;
    this.raw.hidden = isJson;
    this.raw.textContent = call.arguments;
  }
}

/** A form with a field for each call's result; calls `onresults([{ call, name, text }])`. */
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

/** A sent result. */
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
