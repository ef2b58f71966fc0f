/**
 * The dialogs: the server's key, and the list of shortcuts. Menus, and panels that cover the page when it is
 * narrow.
 */
import { byId } from "./dom.js";

/** Ask for the server's key: { key, remember }, or null if the reader gives none. */
export function askForKey(refused) {
  const dialog = byId("key-dialog");
  const form = dialog.querySelector("form");
  byId("key-problem").textContent = refused ? "The server has refused this key." : "";
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

/** Place each menu under its button, and put the focus in it. */
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

/**
 * A side panel: beside the page where there is room, over it elsewhere. Only what lies on top takes the focus.
 */
export class SidePanel {
  #name;
  #wide;
  #before = null; // what had the focus

  /** `wide` is the media query under which the panel lies beside the page; there its state is remembered. */
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
      // it opens as it does at first, next time
    }
  }
}
