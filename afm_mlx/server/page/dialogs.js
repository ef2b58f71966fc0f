/** The API key dialog, menus, side panels, and keyboard shortcuts. */
import { byId } from "./dom.js";

/** Ask for an API key: { key, remember }, or null if the dialog is cancelled. */
export function askForKey(rejected) {
  const dialog = byId("key-dialog");
  const form = dialog.querySelector("form");
  byId("key-problem").textContent = rejected ? "The server rejected this key." : "";
  dialog.returnValue = "";
  dialog.showModal();
  form.elements.key.select();
  return new Promise((resolve) => {
    const closed = () => {
      const { key, remember } = form.elements;
      resolve(
        dialog.returnValue === "send" && key.value
          ? { key: key.value, remember: remember.checked }
          : null,
      );
    };
    dialog.addEventListener("close", closed, { once: true });
  });
}

/** Place each menu under its button, and focus its first item. */
export function bindMenus() {
  for (const menu of document.querySelectorAll("[popover]")) {
    const button = document.querySelector(`[popovertarget="${menu.id}"]`);
    menu.addEventListener("toggle", ({ newState }) => {
      button.setAttribute("aria-expanded", newState === "open");
      if (newState === "open") place(menu, button);
    });
    menu.addEventListener("click", ({ target }) => target.closest("button") && menu.hidePopover());
    menu.addEventListener("keydown", (event) => walk(menu, event));
  }
}

function place(menu, button) {
  const at = button.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = menu;
  const above = at.bottom + height + 8 > innerHeight;
  menu.style.insetBlockStart = `${above ? at.top - height - 6 : at.bottom + 6}px`;
  menu.style.insetInlineStart = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  menu.querySelector("button")?.focus();
}

function walk(menu, event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const items = [...menu.querySelectorAll("button")];
  const at = items.indexOf(document.activeElement);
  items[(at + step + items.length) % items.length].focus();
}

/** A side panel, next to the page on wide screens and over it on narrow ones. Only the top layer takes focus. */
export class SidePanel {
  #name;
  #wide;
  #before = null; // the element that had the focus

  /** `wide` is the media query for wide screens, on which the panel's state is remembered. */
  constructor(name, wide, openAtFirst) {
    this.#name = name;
    this.#wide = matchMedia(wide);
    this.element = byId(name);
    this.buttons = document.querySelectorAll(`[data-toggle="${name}"]`);
    for (const button of this.buttons) button.addEventListener("click", () => this.toggle());
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.covers) this.toggle(false);
    });
    byId("scrim").addEventListener("click", () => this.covers && this.toggle(false));
    const atFirst = () => this.#set(this.#wide.matches && this.#remembered(openAtFirst));
    this.#wide.addEventListener("change", atFirst);
    atFirst();
  }

  get isOpen() {
    return this.element.classList.contains("open");
  }

  get covers() {
    return this.isOpen && !this.#wide.matches;
  }

  toggle(open = !this.isOpen) {
    if (open === this.isOpen) return;
    if (open) this.#before = document.activeElement;
    this.#set(open);
    if (this.#wide.matches) this.#remember(open);
    if (open) this.element.querySelector(`[data-toggle="${this.#name}"], button`)?.focus();
    else (this.#before?.isConnected ? this.#before : this.buttons[0]).focus();
  }

  #set(open) {
    this.element.classList.toggle("open", open);
    this.element.inert = !open;
    for (const button of this.buttons) button.setAttribute("aria-expanded", open);
    this.element.classList.toggle("over", open && !this.#wide.matches);
    const covers = document.querySelector("aside.over") !== null;
    byId("main").inert = covers;
    byId("scrim").hidden = !covers;
  }

  #remembered(otherwise) {
    try {
      return (localStorage.getItem(`afm-mlx ${this.#name}`) ?? String(otherwise)) === "true";
    } catch {
      return otherwise;
    }
  }

  #remember(open) {
    try {
      localStorage.setItem(`afm-mlx ${this.#name}`, open);
    } catch {
      // no storage: the default holds next time
    }
  }
}

export function bindShortcuts(app) {
  const shortcuts = {
    "ctrl+shift+o": () => app.startNew(),
    "ctrl+k": () => {
      app.sidebar.toggle(true);
      byId("search").focus();
    },
    "ctrl+.": () => app.panel.toggle(),
    "ctrl+/": () => byId("shortcuts-dialog").showModal(),
    "shift+escape": () => app.composer.focus(),
  };
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Escape" && !event.shiftKey && !event.defaultPrevented) {
      // A menu or a panel over the page closes first.
      if (!document.querySelector(":popover-open, aside.over") && app.isRunning()) app.stop();
      return;
    }
    const run = shortcuts[combination(event)];
    if (!run) return;
    event.preventDefault();
    run();
  });
  byId("show-shortcuts").addEventListener("click", () => byId("shortcuts-dialog").showModal());
  const mac = /Mac|iPhone|iPad/.test(navigator.platform);
  for (const key of document.querySelectorAll("kbd[data-mac]"))
    if (mac) key.textContent = key.dataset.mac;
}

function combination(event) {
  const control = event.ctrlKey || event.metaKey;
  return `${control ? "ctrl+" : ""}${event.shiftKey ? "shift+" : ""}${event.key.toLowerCase()}`;
}
