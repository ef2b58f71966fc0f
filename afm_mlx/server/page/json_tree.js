/**
 * JSON as a tree of rows that fills in while it is streamed.
 *
 * Rows are kept from one update to the next, so that what the reader has folded stays folded. Properties that
 * the schema has and the text has not reached yet are shown as pending rows.
 */
import { element } from "./dom.js";

const PENDING = Symbol("a value that has not begun");
const LAST_TOKENS = /,?\s*("(?:[^"\\]|\\.)*"\s*:?\s*)?[^\s",:{}[\]]*$/s;

/**
 * Read JSON that may be cut off: { value, isWhole }. What is open is closed, and an unfinished key or value at
 * the end is left out, except a string. `value` is undefined before the first value.
 *
 * Raises a SyntaxError for text that is not JSON, however it continues.
 */
export function readPartialJson(text) {
  if (!text.trim()) return { value: undefined, isWhole: false };
  try {
    return { value: JSON.parse(text), isWhole: true };
  } catch {
    // cut off, or not JSON
  }
  const closers = [];
  let inString = false;
  for (let i = 0; i < text.length; i += 1) {
    const char = text[i];
    if (inString && char === "\\") i += 1;
    else if (char === '"') inString = !inString;
    else if (inString) continue;
    else if (char === "{") closers.unshift("}");
    else if (char === "[") closers.unshift("]");
    else if (char === "}" || char === "]") closers.shift();
  }
  const end = closers.join("");
  const head = inString ? `${text.replace(/\\(u[\da-fA-F]{0,3})?$/, "")}"` : text;
  for (const candidate of [head + end, head.replace(LAST_TOKENS, "") + end]) {
    try {
      if (candidate.trim()) return { value: JSON.parse(candidate), isWhole: false };
    } catch {
      // the next candidate
    }
  }
  const literal = text.trimStart();
  const isBegun = ["true", "false", "null"].some((word) => word.startsWith(literal));
  if (isBegun || /^-?(0|[1-9]\d*)?(\.\d*)?([eE][-+]?\d*)?$/.test(literal))
    return { value: undefined, isWhole: false };
  throw new SyntaxError("The text is not JSON.");
}

export class JsonTree {
  #schema;
  #row = null;

  constructor(schema = null) {
    this.#schema = schema;
    this.element = element("ul", { class: "tree" });
  }

  /** Show a value; undefined is a value that has not begun. Without `isOpen` nothing is pending. */
  update(value, isOpen) {
    const schema = isOpen ? this.#schema : null;
    this.#row ??= new Row(null, this.#schema);
    if (value === undefined) value = resolve(schema, this.#schema)?.type === "object" ? {} : PENDING;
    this.#row.update(value, schema, isOpen);
    if (!this.#row.element.isConnected) this.element.replaceChildren(this.#row.element);
  }
}

/** One `<li>`: a key, if it has one, and a value or the rows below it. */
class Row {
  #root; // the whole schema, in which references point
  #kind = null;
  #rows = [];

  constructor(key, root) {
    this.#root = root;
    this.key = element("span", { class: "key" }, key ?? "");
    this.element = element("li");
  }

  update(value, schema, isOpen) {
    const kind = typeof value === "object" && value !== null ? "branch" : "leaf";
    if (kind !== this.#kind) this.#build(kind);
    this.element.classList.toggle("unfinished", isOpen);
    if (kind === "branch") this.#updateBranch(value, schema, isOpen);
    else this.#updateLeaf(value, schema);
  }

  #build(kind) {
    this.#kind = kind;
    this.#rows = [];
    if (kind === "leaf") {
      this.value = element("span");
      this.element.replaceChildren(this.key, this.value);
      return;
    }
    this.count = element("span", { class: "count" });
    this.list = element("ul");
    const summary = element("summary", {}, this.key, this.count);
    this.element.replaceChildren(element("details", { open: true }, summary, this.list));
  }

  #updateLeaf(value, schema) {
    let kind = typeof value === "boolean" || value === null ? "literal" : typeof value;
    let shown = String(value);
    if (value === PENDING) {
      const type = resolve(schema, this.#root)?.type;
      [kind, shown] = ["pending", typeof type === "string" ? type : "…"];
    } else if (value === "") [kind, shown] = ["string empty", "(empty)"];
    this.value.className = `value ${kind}`;
    if (this.value.textContent !== shown) this.value.textContent = shown;
  }

  #updateBranch(value, schema, isOpen) {
    const entries = childrenOf(value, resolve(schema, this.#root), isOpen);
    const count = Object.keys(value).length;
    const word = Array.isArray(value) ? "item" : "field";
    this.count.textContent = `${count} ${word}${count === 1 ? "" : "s"}`;
    entries.forEach(([key, child, below], i) => {
      const row = (this.#rows[i] ??= new Row(key, this.#root));
      if (row.key.textContent !== key) row.key.textContent = key;
      row.update(child, below, isOpen && i === count - 1);
      if (row.element.parentNode !== this.list) this.list.append(row.element);
    });
    for (const row of this.#rows.splice(entries.length)) row.element.remove();
  }
}

/** [key, value, schema] of what is below a value: what it has, then pending properties. */
function childrenOf(value, schema, isOpen) {
  if (Array.isArray(value)) return value.map((item, i) => [String(i + 1), item, schema?.items]);
  const properties = isObject(schema?.properties) ? schema.properties : {};
  const own = (key) => (Object.hasOwn(properties, key) ? properties[key] : null);
  const children = Object.entries(value).map(([key, item]) => [key, item, own(key)]);
  if (!isOpen) return children;
  const pending = Object.keys(properties).filter((key) => !Object.hasOwn(value, key));
  return [...children, ...pending.map((key) => [key, PENDING, properties[key]])];
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** The schema that a local reference (`#/$defs/Name`) points to; others are not followed. */
function resolve(schema, root) {
  for (let steps = 0; isObject(schema) && typeof schema.$ref === "string"; steps += 1) {
    if (!schema.$ref.startsWith("#") || steps > 20) return null;
    const names = schema.$ref.slice(1).split("/").filter(Boolean).map(unescapePointer);
    schema = names.reduce(
      (at, name) => (isObject(at) && Object.hasOwn(at, name) ? at[name] : null),
      root,
    );
  }
  return isObject(schema) ? schema : null;
}

const unescapePointer = (name) => name.replaceAll("~1", "/").replaceAll("~0", "~");
