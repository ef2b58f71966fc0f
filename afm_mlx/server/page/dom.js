/** Makes elements. Text is always inserted as text; nothing in this page parses HTML. */

/**
 * An element with attributes and children.
 *
 * Attributes that begin with `on` are listeners; `true` sets a bare attribute; `false`, `null` and `undefined`
 * set none. Children are nodes or strings, and `null` is left out.
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined)
      made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** The element of index.html with this id. */
export const byId = (id) => document.getElementById(id);

/** A button with an icon; unless `visible`, its label is only a tooltip and for assistive technology. */
export function iconButton(name, label, onclick, { visible = false, ...attributes } = {}) {
  const hidden = visible ? {} : { "aria-label": label, title: label };
  const kind = visible ? "button" : "button icon-only";
  const text = visible ? label : null;
  return element(
    "button",
    { type: "button", class: kind, onclick, ...hidden, ...attributes },
    icon(name),
    text,
  );
}

const PATHS = {
  add: "M12 5v14M5 12h14",
  back: "m14.5 6-6 6 6 6",
  check: "m5 12.5 4.5 4.5L19 7.5",
  close: "M6 6l12 12M18 6 6 18",
  copy: "M9 9h10v11H9zM15 9V4H5v11h4",
  delete: "M4.5 7h15M9.5 7V4h5v3M6.5 7l1 13h9l1-13M10 11v5M14 11v5",
  down: "M12 5v14M6 13l6 6 6-6",
  edit: "M4 20l1-4.5L16.5 4 20 7.5 8.5 19zM14 6.5l3.5 3.5",
  forward: "m9.5 6 6 6-6 6",
  format: "M9 4.5c-3 0-1 6-4 7.5 3 1.5 1 7.5 4 7.5M15 4.5c3 0 1 6 4 7.5-3 1.5-1 7.5-4 7.5",
  retry: "M19.5 12a7.5 7.5 0 1 1-2.2-5.3L20 9.5M20 4.5v5h-5",
  search: "M10.5 17a6.5 6.5 0 1 1 0-13 6.5 6.5 0 0 1 0 13ZM15.5 15.5 20 20",
  send: "M12 19.5v-15M5.5 11 12 4.5l6.5 6.5",
  stop: "M7.5 7.5h9v9h-9z",
  tool:
    "M14 6.5a4.5 4.5 0 0 1 5.7-1.7L16.5 8l1.5 1.5 3.2-3.2" +
    "A4.5 4.5 0 0 1 15.5 12L8 19.5 4.5 16 12 8.5a4.5 4.5 0 0 1 2-2Z",
  warning: "M12 4 2.8 20h18.4zM12 10v4.5M12 17v.5",
};

/** An icon, hidden from assistive technology. */
export function icon(name) {
  const svg = svgElement("svg", {
    viewBox: "0 0 24 24",
    class: `icon icon-${name}`,
    "aria-hidden": "true",
  });
  svg.append(svgElement("path", { d: PATHS[name] }));
  return svg;
}

export function svgElement(tag, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

const TALLEST_PX = 240; // of a field that grows with its text

/** Fit the height of a field to its text, up to a limit. */
export function fitHeight(field) {
  field.style.blockSize = "auto";
  const edges = field.offsetHeight - field.clientHeight;
  field.style.blockSize = `${Math.min(field.scrollHeight + edges, TALLEST_PX)}px`;
}

/** Tells assistive technology, once; nothing is shown. */
export function announce(text) {
  const region = byId("announcements");
  region.textContent = "";
  // A region that is given the same text twice is silent, unless it was empty in between.
  setTimeout(() => (region.textContent = text), 50);
}

const TOAST_MS = 8000;

/**
 * Shows a sentence for some seconds, with one thing to do about it, which stays while it is focused or pointed
 * at.
 */
export function toast(text, action = null) {
  const shown = element("div", { class: "toast" }, element("span", {}, text));
  const remove = () => shown.remove();
  const waits = () => setTimeout(remove, TOAST_MS);
  let timer = waits();
  const stay = () => clearTimeout(timer);
  const goOn = () => {
    clearTimeout(timer);
    timer = waits();
  };
  for (const event of ["mouseenter", "focusin"]) shown.addEventListener(event, stay);
  for (const event of ["mouseleave", "focusout"]) shown.addEventListener(event, goOn);
  if (action) {
    const act = () => {
      remove();
      action.run();
    };
    shown.append(
      element("button", { type: "button", class: "button", onclick: act }, action.label),
    );
  }
  shown.append(iconButton("close", "Dismiss", remove));
  byId("toasts").append(shown);
  announce(action ? `${text} ${action.label} is available for some seconds.` : text);
}

/** Identifiers in this browser: 96 random bits. (`randomUUID` exists on https and localhost only.) */
export function newId(prefix) {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return prefix + [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
