/**
 * A value of JSON as a tree of rows that fills in while it is written.
 *
 * Rows are kept from one update to the next, so that what the reader has folded stays folded. Properties that
 * the schema has and the text has not reached yet are shown as rows to come.
 */
import { element } from "./dom.js";

export class JsonTree {
  #schema;
  #row = null;

  constructor(schema = null) {
    this.#schema = schema;
    this.element = element("ul", { class: "tree" });
  }

  /**
   * Show `root` of a PartialJson; null is a value of which nothing is there yet. What has `ended` awaits
   * nothing.
   */
  update(root, ended = false) {
    const schema = ended ? null : this.#schema;
    this.#row ??= new Row(null, this.#schema);
    this.#row.update(root ?? beginning(schema, this.#schema), schema);
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

  update(node, schema) {
    const branch = node.kind === "object" || node.kind === "array";
    const kind = branch ? "branch" : "leaf";
    if (kind !== this.#kind) this.#build(kind);
    this.element.classList.toggle("unfinished", !node.done);
    if (branch) this.#updateBranch(node, schema);
    else this.#updateLeaf(node);
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

  #updateLeaf(node) {
    const shown = node.kind === "pending" ? node.text : node.text || (node.done ? "(empty)" : "");
    this.value.className = `value ${node.kind}${node.done && !node.text ? " empty" : ""}`;
    if (this.value.textContent !== shown) this.value.textContent = shown;
  }

  #updateBranch(node, schema) {
    const children = childrenOf(node, resolve(schema, this.#root), this.#root);
    const word = node.kind === "object" ? "field" : "item";
    const there = (node.entries ?? node.items).length;
    this.count.textContent = `${there} ${word}${there === 1 ? "" : "s"}`;
    children.forEach((child, i) => {
      const row = (this.#rows[i] ??= new Row(child.key, this.#root));
      if (row.key.textContent !== child.key) row.key.textContent = child.key;
      row.update(child.node, child.schema);
      if (!row.element.isConnected || row.element.parentNode !== this.list)
        this.list.append(row.element);
    });
    for (const row of this.#rows.splice(children.length)) row.element.remove();
  }
}

/** What is below a node: what was written, then the properties that are still to come. */
function childrenOf(node, schema, root) {
  if (node.kind === "array") {
    return node.items.map((item, i) => ({ key: String(i + 1), node: item, schema: schema?.items }));
  }
  const properties = isObject(schema?.properties) ? schema.properties : {};
  const children = node.entries.map(({ key, value }) => {
    const below = Object.hasOwn(properties, key) ? properties[key] : null;
    return { key, node: value ?? waiting(below, root), schema: below };
  });
  if (node.done) return children;
  const written = node.entries.map((entry) => entry.key);
  // A key that is only half written is the property that begins so, which must not be listed twice.
  const half = node.entries.length && !node.entries.at(-1).keyDone ? written.at(-1) : null;
  const toCome = Object.keys(properties).filter((key) => !written.includes(key));
  const beginning = half === null ? -1 : toCome.findIndex((key) => key.startsWith(half));
  if (beginning >= 0) {
    children.at(-1).key = toCome[beginning];
    toCome.splice(beginning, 1);
  }
  return children.concat(
    toCome.map((key) => ({ key, node: waiting(properties[key], root), schema: properties[key] })),
  );
}

/** What is shown before the first character: an object's properties, where the schema says that it is one. */
function beginning(schema, root) {
  if (resolve(schema, root)?.type !== "object") return waiting(schema, root);
  return { kind: "object", done: false, entries: [] };
}

/** Stands for a value that has not begun: its type in the schema, where that is one word. */
function waiting(schema, root) {
  const type = resolve(schema, root)?.type;
  return { kind: "pending", done: false, text: typeof type === "string" ? type : "…" };
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
