/** The chat history (open, search, rename and delete), and the theme switch below it. */
import { excerpt } from "./conversation.js";
import { byId, element, iconButton } from "./dom.js";

const DAY = 24 * 60 * 60 * 1000;

export class Sidebar {
  #actions;
  #shown = { conversations: [], current: null, running: new Set() };
  #renaming = null; // id of a conversation

  /** `actions`: open(id), rename(id, title), remove(id). */
  constructor(actions) {
    this.#actions = actions;
    this.list = byId("conversations");
    this.search = byId("search");
    this.search.addEventListener("input", () => this.#draw());
    this.search.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.search.value) return;
      event.stopPropagation();
      this.search.value = "";
      this.#draw();
    });
  }

  /** `running` has the ids of conversations with an answer in progress. */
  show(conversations, current, running) {
    this.#shown = { conversations, current, running };
    if (this.#renaming === null) this.#draw();
  }

  #draw() {
    const query = this.search.value.trim();
    const found = this.#shown.conversations
      .map((conversation) => ({ conversation, part: query ? excerpt(conversation, query) : "" }))
      .filter(({ part }) => part !== null)
      .sort((a, b) => b.conversation.updated - a.conversation.updated);
    const focused = this.list.contains(document.activeElement)
      ? document.activeElement.dataset
      : null;
    const groups = Map.groupBy(found, ({ conversation }) => age(conversation.updated));
    this.list.replaceChildren(...[...groups].map(([name, rows]) => this.#group(name, rows)));
    if (focused)
      this.list.querySelector(`[data-act="${focused.act}"][data-id="${focused.id}"]`)?.focus();
    const none = query
      ? "No results."
      : "No chats yet. Chats stay in this browser.";
    byId("no-conversations").textContent = found.length ? "" : none;
  }

  #group(name, rows) {
    const id = `group-${name.replaceAll(" ", "-")}`;
    const items = rows.map(({ conversation, part }) => this.#row(conversation, part));
    const list = element("ul", { "aria-labelledby": id }, ...items);
    return element("section", {}, element("h3", { id }, name), list);
  }

  #row(conversation, part) {
    const { id, title } = conversation;
    if (this.#renaming === id) return this.#renameRow(conversation);
    const current = id === this.#shown.current;
    const open = element(
      "button",
      {
        type: "button",
        class: "conversation",
        "data-act": "open",
        "data-id": id,
        "aria-current": current ? "true" : false,
        title,
        onclick: () => this.#actions.open(id),
      },
      element("span", { class: "title" }, title),
      part ? element("span", { class: "excerpt" }, part) : null,
      this.#shown.running.has(id) ? element("span", { class: "running" }, "answering…") : null,
    );
    const rename = iconButton("edit", `Rename ${title}`, () => this.rename(id), {
      "data-act": "rename",
      "data-id": id,
    });
    const remove = iconButton("delete", `Delete ${title}`, () => this.#remove(id), {
      "data-act": "remove",
      "data-id": id,
    });
    return element(
      "li",
      { class: current ? "current" : "" },
      open,
      element("span", { class: "row-actions" }, rename, remove),
    );
  }

  #remove(id) {
    const rows = [...this.list.querySelectorAll("[data-act=open]")];
    const at = rows.findIndex((row) => row.dataset.id === id);
    const next = (rows[at + 1] ?? rows[at - 1])?.dataset.id;
    this.#actions.remove(id);
    const row = next && this.list.querySelector(`[data-act=open][data-id="${next}"]`);
    (row || byId("new-chat")).focus();
  }

  rename(id) {
    this.#renaming = id;
    this.#draw();
    const field = this.list.querySelector("input");
    field?.focus();
    field?.select();
  }

  #renameRow({ id, title }) {
    const field = element("input", { "aria-label": "Chat title", maxlength: 200 });
    field.value = title;
    const finish = (keep) => {
      if (this.#renaming !== id) return;
      const refocus = document.activeElement === field;
      this.#renaming = null;
      if (keep && field.value.trim() && field.value !== title)
        this.#actions.rename(id, field.value.trim());
      this.#draw();
      if (refocus) this.list.querySelector(`[data-act=rename][data-id="${id}"]`)?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      finish(event.key === "Enter");
    });
    field.addEventListener("blur", () => finish(true));
    return element("li", {}, field);
  }
}

function age(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  return time >= midnight - 7 * DAY ? "Previous 7 days" : "Older";
}

const KEY = "afm-mlx theme";

export function bindThemeSwitch() {
  const buttons = [...document.querySelectorAll("[data-set-theme]")];
  const show = () => {
    const theme = document.documentElement.dataset.theme ?? "system";
    for (const button of buttons)
      button.setAttribute("aria-pressed", button.dataset.setTheme === theme);
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      setTheme(button.dataset.setTheme);
      show();
    });
  }
  show();
}

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // no storage: the choice lasts until the page is closed
  }
}
