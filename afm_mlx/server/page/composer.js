/** The message field, and the settings of the next answer: model, format, tools, system prompt. */
import { byId, element, fitHeight, icon, iconButton } from "./dom.js";
import { toolNames } from "./settings.js";

export class Composer {
  #actions;
  #drafts = new Map(); // id of a conversation -> text
  #settings = null;
  #running = false;

  /**
   * `actions`: send(text) -> true if it was sent, stop(), editLast(), changed(), set(settings),
   * showSettings(field).
   */
  constructor(actions) {
    this.#actions = actions;
    this.field = byId("message");
    this.button = byId("send");
    this.select = byId("model");
    byId("composer").addEventListener("submit", (event) => this.#submit(event));
    this.field.addEventListener("keydown", (event) => this.#key(event));
    this.field.addEventListener("input", () => this.#changed());
    this.select.addEventListener("change", () => this.#actions.set({ model: this.select.value }));
    byId("meter").addEventListener("click", () => this.#actions.showSettings("statistics"));
  }

  focus() {
    this.field.focus();
  }

  /** Put a text into the field. */
  write(text) {
    this.field.value = text;
    this.#changed();
    this.focus();
  }

  keepDraft(id) {
    this.#drafts.set(id, this.field.value);
  }

  restoreDraft(id) {
    this.field.value = this.#drafts.get(id) ?? "";
    this.#changed();
  }

  setModels(models) {
    const groups = Map.groupBy(models, ({ id }) => id.split(":")[0]);
    this.select.replaceChildren(
      ...[...groups].map(([base, ids]) =>
        element(
          "optgroup",
          { label: base },
          ...ids.map(({ id }) => element("option", { value: id }, id)),
        ),
      ),
    );
  }

  show(settings, { running, openCalls }) {
    this.#settings = settings;
    this.#running = running;
    this.select.value = settings.model;
    this.button.replaceChildren(icon(running ? "stop" : "send"));
    const label = running ? "Stop" : "Send message";
    this.button.setAttribute("aria-label", label);
    this.button.title = running ? `${label} (Esc)` : `${label} (Enter)`;
    this.field.placeholder = openCalls ? "Enter the tool result above" : "Type a message";
    this.#showChips();
    this.#enable();
  }

  #showChips() {
    const chips = [];
    const chip = (name, label, field, off) => {
      const show = element(
        "button",
        { type: "button", onclick: () => this.#actions.showSettings(field) },
        icon(name),
        label,
      );
      const remove = () => {
        this.#actions.set(off);
        this.focus();
      };
      chips.push(
        element("span", { class: "chip" }, show, iconButton("close", `Remove ${label}`, remove)),
      );
    };
    const { system, format, tools } = this.#settings;
    if (system.trim()) chip("edit", "System prompt", "system", { system: "" });
    if (format === "json_object") chip("format", "JSON", "format", { format: "text" });
    if (format === "json_schema") chip("format", "JSON schema", "schema", { format: "text" });
    const count = tools.trim() ? toolNames(this.#settings).length : 0;
    if (count)
      chip("tool", `${count} tool${count > 1 ? "s" : ""}`, "tools", {
        tools: "",
        tool_choice: "auto",
      });
    byId("chips").replaceChildren(...chips);
    byId("chips").hidden = !chips.length;
  }

  #enable() {
    // Not `disabled`, because disabled buttons lose the focus.
    this.button.setAttribute("aria-disabled", !this.#running && !this.field.value.trim());
  }

  #changed() {
    fitHeight(this.field);
    this.#enable();
    this.#actions.changed();
  }

  #submit(event) {
    event.preventDefault();
    if (this.#running) return this.#actions.stop();
    const text = this.field.value;
    if (!text.trim() || !this.select.value) return;
    if (!this.#actions.send(text)) return;
    this.field.value = "";
    this.#changed();
  }

  #key(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      if (!this.#running) this.#submit(event);
    }
    if (event.key === "ArrowUp" && !this.field.value) {
      event.preventDefault();
      this.#actions.editLast();
    }
  }
}
