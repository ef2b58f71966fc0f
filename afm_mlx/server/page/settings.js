/**
 * The settings of a conversation, as typed, and the fields of a request that they make.
 *
 * Empty settings are not sent, so that the server's defaults apply.
 */
import { byId, element } from "./dom.js";

export const defaultSettings = () => ({
  model: "",
  system: "",
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  seed: "",
  max_tokens: "",
  stop: "",
  format: "text",
  schema: "",
  tools: "",
  tool_choice: "auto",
});

const NUMBERS = {
  temperature: { label: "Temperature", from: 0, to: 2 },
  top_p: { label: "Top-p", from: 0, to: 1 },
  top_k: { label: "Top-k", from: 0, whole: true },
  min_p: { label: "Min-p", from: 0, to: 1 },
  seed: { label: "Seed", from: 0, whole: true },
  max_tokens: { label: "Max tokens", from: 1, whole: true },
};

/** The sampling settings, which a new chat keeps. */
export const SAMPLING = [...Object.keys(NUMBERS), "stop"];

export const EXAMPLE_SCHEMA = {
  title: "Event",
  description: "An event",
  type: "object",
  properties: {
    title: { type: "string" },
    person: { type: "string" },
    day: { type: "string" },
    time: { type: "string" },
    place: { type: "string" },
  },
  required: ["title", "person", "day", "time", "place"],
};

export const EXAMPLE_TOOLS = [
  {
    name: "track_order",
    description: "Find an order",
    parameters: { type: "object", properties: { order: { type: "string" } }, required: ["order"] },
  },
];

export const pretty = (value) => JSON.stringify(value, null, 2);

/** The fields of a request, and errors: { fields, problems: [{ setting, message }] }. */
export function requestFields(settings) {
  const fields = {};
  const problems = [];
  const read = (setting, make) => {
    try {
      Object.assign(fields, make(settings[setting].trim()));
    } catch (error) {
      problems.push({ setting, message: error.message });
    }
  };
  for (const [name, range] of Object.entries(NUMBERS)) {
    read(name, (typed) => (typed ? { [name]: readNumber(typed, range) } : {}));
  }
  const stops = settings.stop.split("\n").filter(Boolean).map(unescapeStop);
  if (stops.length) fields.stop = stops;
  if (settings.format === "json_object") fields.response_format = { type: "json_object" };
  if (settings.format === "json_schema")
    read("schema", (typed) => ({ response_format: readSchema(typed) }));
  read("tools", (typed) => (typed ? toolFields(typed, settings.tool_choice) : {}));
  return { fields, problems };
}

function readNumber(typed, { from, to = Infinity, whole = false }) {
  const value = Number(typed);
  const fits = value >= from && value <= to && (!whole || Number.isSafeInteger(value));
  if (fits) return value;
  const range = to === Infinity ? `of ${from} or more` : `from ${from} to ${to}`;
  throw new Error(`Enter a ${whole ? "whole " : ""}number ${range}.`);
}

/** Resolve `\n`, `\t` and `\\` in a stop string; each line of the field is one stop string. */
function unescapeStop(line) {
  return line.replace(/\\([nt\\])/g, (_, char) => ({ n: "\n", t: "\t", "\\": "\\" })[char]);
}

function readJson(typed) {
  try {
    return JSON.parse(typed);
  } catch (error) {
    throw new Error(`Invalid JSON: ${error.message}.`);
  }
}

function readSchema(typed) {
  if (!typed) throw new Error("Enter a JSON schema, or choose another format.");
  const schema = readJson(typed);
  if (!isObject(schema)) throw new Error("A JSON schema must be an object.");
  const title =
    typeof schema.title === "string" ? schema.title.replace(/[^\w-]/g, "_").slice(0, 64) : "";
  const described =
    typeof schema.description === "string" ? { description: schema.description } : {};
  return {
    type: "json_schema",
    json_schema: { name: title || "answer", ...described, schema, strict: true },
  };
}

function toolFields(typed, choice) {
  const found = readJson(typed);
  const tools = (Array.isArray(found) ? found : [found]).map(readTool);
  if (!tools.length) return {};
  const names = tools.map((tool) => tool.function.name);
  const named = names.includes(choice) ? { type: "function", function: { name: choice } } : null;
  return { tools, tool_choice: named ?? (["none", "required"].includes(choice) ? choice : "auto") };
}

/** A tool in OpenAI's form, from that form or its `function` alone. */
function readTool(tool) {
  const definition = isObject(tool?.function) ? tool.function : tool;
  if (!isObject(definition) || typeof definition.name !== "string" || !definition.name) {
    throw new Error(
      'Each tool must be an object with a "name", and usually a "description" and "parameters".',
    );
  }
  const { type: _, ...fields } = definition;
  return { type: "function", function: fields };
}

/** The setting that a field of a request comes from: `tools[0].function.name` comes from `tools`. */
function settingOf(field) {
  const name = field.split(/[.[]/)[0];
  return { response_format: "schema" }[name] ?? name;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** Names of the defined tools; none while the definitions are invalid. */
export function toolNames(settings) {
  const { fields } = requestFields({ ...defaultSettings(), tools: settings.tools });
  return (fields.tools ?? []).map((tool) => tool.function.name);
}

/** The JSON schema of answers, or null. */
export function answerSchema(settings) {
  return requestFields(settings).fields.response_format?.json_schema?.schema ?? null;
}

/** A number field with its error message. */
function numberField(name) {
  const { label, whole } = NUMBERS[name];
  const problem = `problem-${name}`;
  const inputmode = whole ? "numeric" : "decimal";
  const field = { name, inputmode, placeholder: "default", "aria-describedby": problem };
  return element(
    "div",
    {},
    element("label", { class: "labelled" }, element("span", {}, label), element("input", field)),
    element("p", { class: "problem", id: problem }),
  );
}

/** The form: writes typed values to the settings, and shows errors at their fields. */
export class SettingsForm {
  #settings = defaultSettings();
  #onchange;

  /** `onchange()` is called when a setting has changed. */
  constructor(onchange) {
    this.#onchange = onchange;
    this.element = byId("settings");
    byId("sampling-numbers").append(...Object.keys(NUMBERS).map(numberField));
    this.element.addEventListener("input", ({ target }) => this.#changed(target));
    this.element.addEventListener("submit", (event) => event.preventDefault());
    byId("example-schema").addEventListener("click", () =>
      this.set({ schema: pretty(EXAMPLE_SCHEMA) }),
    );
    byId("example-tools").addEventListener("click", () =>
      this.set({ tools: pretty(EXAMPLE_TOOLS) }),
    );
    byId("reset-sampling").addEventListener("click", () => this.#resetSampling());
  }

  show(settings) {
    this.#settings = settings;
    for (const field of this.#fields())
      if (field.name !== "tool_choice") field.value = settings[field.name];
    this.#refresh();
  }

  /** Change settings as if they were typed. */
  set(values) {
    Object.assign(this.#settings, values);
    this.show(this.#settings);
    this.#onchange();
  }

  has(field) {
    return this.#field(settingOf(field)) !== null;
  }

  isRight() {
    return requestFields(this.#settings).problems.length === 0;
  }

  focus(name) {
    let field = this.#field(name) ?? byId(name);
    const section = field.closest("details");
    if (section) section.open = true;
    if (!field.checkVisibility()) field = this.#field("format"); // the schema field is hidden
    field.focus();
  }

  /** Show a server's error at its field, which the form must have. */
  point(field, message) {
    this.#showProblems([{ setting: settingOf(field), message }]);
    this.focusProblem();
  }

  /** Put the focus on the first field with a problem. */
  focusProblem() {
    const field = this.#fields().find((input) => input.getAttribute("aria-invalid") === "true");
    if (field) this.focus(field.name);
  }

  #fields() {
    return [...this.element.elements].filter((field) => field.name);
  }

  #field(name) {
    return this.element.elements.namedItem(name);
  }

  #changed(field) {
    if (!(field.name in this.#settings)) return;
    this.#settings[field.name] = field.value;
    this.#refresh();
    this.#onchange();
  }

  #resetSampling() {
    this.set(Object.fromEntries(SAMPLING.map((name) => [name, ""])));
  }

  #refresh() {
    byId("schema-field").hidden = this.#settings.format !== "json_schema";
    this.#showToolChoices();
    this.#showProblems(requestFields(this.#settings).problems);
  }

  #showToolChoices() {
    const choices = { auto: "Auto", none: "None", required: "Required" };
    const options = Object.entries(choices).map(([value, label]) =>
      element("option", { value }, label),
    );
    const names = toolNames(this.#settings).map((name) =>
      element("option", { value: name }, name),
    );
    const field = this.#field("tool_choice");
    field.replaceChildren(...options, ...names);
    field.value = this.#settings.tool_choice;
    if (!field.value) this.#settings.tool_choice = field.value = "auto";
  }

  #showProblems(problems) {
    const messages = Object.fromEntries(problems.map(({ setting, message }) => [setting, message]));
    for (const field of this.#fields()) {
      const shown = byId(`problem-${field.name}`);
      if (!shown) continue;
      shown.textContent = messages[field.name] ?? "";
      field.setAttribute("aria-invalid", field.name in messages);
    }
  }
}
