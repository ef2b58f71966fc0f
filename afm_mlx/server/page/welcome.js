/** Examples for an empty chat, one for each feature. */
import { byId, element, icon } from "./dom.js";
import { EXAMPLE_SCHEMA, EXAMPLE_TOOLS, pretty } from "./settings.js";

const EVENT =
  "Pull out the event.\nReminder from Hana: Film Lecture, Monday in Gallery Sain, 22:55.";
const MESSAGE =
  "Good morning, I am Maria. A stranger from Porto logged in as me. Can you call me at 14:30?";

const EXAMPLES = [
  {
    kind: "Chat",
    icon: "send",
    title: "Make a message formal",
    text: "Make this formal:\nhey Hana, can't make it to the Film Lecture",
    settings: {},
  },
  {
    kind: "Structured output",
    icon: "format",
    title: "Extract an event as JSON",
    text: EVENT,
    settings: { format: "json_schema", schema: pretty(EXAMPLE_SCHEMA) },
  },
  {
    kind: "Tool",
    icon: "tool",
    title: "Track an order",
    text: "Track order L5526.",
    settings: { tools: pretty(EXAMPLE_TOOLS) },
  },
  {
    kind: "Adapter",
    icon: "check",
    title: "List the to-dos",
    text: `List the to-dos: ${MESSAGE}`,
    adapter: "todo",
    settings: {},
  },
];

/** Show the examples, except for missing adapters; `choose({ text, settings })` is called with the chosen one. */
export function showExamples(models, choose) {
  const offered = EXAMPLES.flatMap((example) => {
    if (!example.adapter) return [example];
    const model = models.find(({ id }) => id.endsWith(`:${example.adapter}`));
    return model ? [{ ...example, settings: { ...example.settings, model: model.id } }] : [];
  });
  byId("examples").replaceChildren(
    ...offered.map((example) => {
      const kind = element("span", { class: "kind" }, icon(example.icon), example.kind);
      const parts = [
        kind,
        element("strong", {}, example.title),
        element("span", { class: "sample" }, example.text),
      ];
      return element(
        "li",
        {},
        element("button", { type: "button", onclick: () => choose(example) }, ...parts),
      );
    }),
  );
}
