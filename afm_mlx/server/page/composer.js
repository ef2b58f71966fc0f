/** The message field, and the settings of the next answer: model, format, tools, system prompt. */
import { byId, element, fitHeight, icon, iconButton } from "./dom.js";
import { readImages, thumbnails } from "./images.js";
import { toolNames } from "./settings.js";

export class Composer {
  #actions;
  #drafts = new Map(); // id of a conversation -> { text, images }
  #settings = null;
  #running = false;
  #images = []; // data URIs
  #sees = false; // the chosen model reads images

  /**
   * `actions`: send(text, images) -> true if it was sent, stop(), editLast(), changed(), set(settings),
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
    this.#bindImages();
  }

  #bindImages() {
    const chosen = byId("image-files");
    byId("add-images").addEventListener("click", () => chosen.click());
    chosen.addEventListener("change", () => {
      this.#attach([...chosen.files]);
      chosen.value = "";
    });
    this.field.addEventListener("paste", (event) => {
      const { files } = event.clipboardData;
      // What is copied from documents has a text, too, which is preferred.
      if (!this.#sees || !files.length || event.clipboardData.getData("text/plain")) return;
      event.preventDefault();
      this.#attach(files);
    });
    const main = byId("composer").closest("main");
    const takes = (event) => this.#sees && event.dataTransfer.types.includes("Files");
    const mark = (on) => byId("composer").classList.toggle("dropping", on);
    main.addEventListener("dragover", (event) => {
      if (!takes(event)) return;
      event.preventDefault();
      mark(true);
    });
    main.addEventListener("dragleave", () => mark(false));
    main.addEventListener("drop", (event) => {
      mark(false);
      if (!takes(event)) return;
      event.preventDefault();
      this.#attach(event.dataTransfer.files);
    });
  }

  async #attach(files) {
    const images = this.#images; // of this draft, whichever is open when they are read
    images.push(...(await readImages(files)));
    this.#changed();
    this.focus();
  }

  /** Images that the next message has: none if the model reads text only. */
  get images() {
    return this.#sees ? this.#images : [];
  }

  #showImages() {
    const remove = (index) => {
      this.#images.splice(index, 1);
      this.#changed();
      this.focus();
    };
    const { images } = this;
    byId("attached").replaceChildren(...(images.length ? [thumbnails(images, remove)] : []));
    byId("attached").hidden = !images.length;
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
    this.#drafts.set(id, { text: this.field.value, images: this.#images });
  }

  restoreDraft(id) {
    const { text, images } = this.#drafts.get(id) ?? { text: "", images: [] };
    this.field.value = text;
    this.#images = images;
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

  show(settings, { running, openCalls, sees }) {
    this.#settings = settings;
    this.#running = running;
    if (sees !== this.#sees) {
      this.#sees = sees;
      byId("add-images").hidden = !sees;
      this.#showImages();
    }
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
    this.button.setAttribute("aria-disabled", !this.#running && !this.#hasMessage());
  }

  #hasMessage() {
    return Boolean(this.field.value.trim() || this.images.length);
  }

  #changed() {
    fitHeight(this.field);
    this.#showImages();
    this.#enable();
    this.#actions.changed();
  }

  #submit(event) {
    event.preventDefault();
    if (this.#running) return this.#actions.stop();
    const text = this.field.value;
    const { images } = this;
    if (!this.#hasMessage() || !this.select.value) return;
    if (!this.#actions.send(text, [...images])) return;
    this.field.value = "";
    images.length = 0; // images that are still being read, and those not sent, are the next message's
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
