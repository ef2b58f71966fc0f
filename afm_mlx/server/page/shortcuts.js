/** Keys that work everywhere in the page. All of them hold a modifier, so that no key that types is taken. */
import { byId } from "./dom.js";

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
      // A menu or a panel over the page is closed first.
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
