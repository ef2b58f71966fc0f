/**
 * JSON as far as it has been written. Text is fed in pieces; each character is looked at once.
 *
 * `root` is what the text holds so far: null before the first value, then a node. Nodes have `kind`, `done`,
 * and
 *
 *     object           entries: [{ key, keyDone, value: node or null }]
 *     array            items: [node]
 *     string           text, with its escapes resolved
 *     number, literal  text, as it was written
 *
 * `error` says what makes the text no JSON, and stays null while more text could make it whole.
 */
const NUMBER = /^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/;
const ESCAPES = { b: "\b", f: "\f", n: "\n", r: "\r", t: "\t", '"': '"', "\\": "\\", "/": "/" };
const LITERALS = ["true", "false", "null"];

export class PartialJson {
  root = null;
  error = null;
  #at = 0;
  #open = []; // objects and arrays that are not closed, outermost first
  #expects = "value"; // value, first item, first key, key, colon, comma, end
  #string = null; // { target, field } of a string that is being written
  #escape = null; // what follows a backslash, as far as it came
  #scalar = null; // a number or literal that may go on

  feed(text) {
    for (const char of text.split("")) {
      if (this.error) return;
      this.#take(char);
      this.#at += 1;
    }
  }

  /** No more text comes: a number may end here, and what is open stays not done. */
  finish() {
    if (this.#scalar && !this.error) this.#endScalar();
  }

  get done() {
    return this.root !== null && this.root.done && !this.error;
  }

  #take(char) {
    if (this.#string) return this.#takeInString(char);
    if (this.#scalar) {
      if (/[\w+.-]/.test(char)) {
        this.#scalar.text += char;
        return;
      }
      this.#endScalar();
      if (this.error) return;
    }
    if (" \t\r\n".includes(char)) return;
    if (char === "}" || char === "]") return this.#close(char);
    if (this.#expects === "colon")
      return char === ":" ? (this.#expects = "value") : this.#fail(char);
    if (this.#expects === "comma") return char === "," ? this.#next() : this.#fail(char);
    if (this.#expects.endsWith("key")) return char === '"' ? this.#beginKey() : this.#fail(char);
    if (this.#expects === "value" || this.#expects === "first item") return this.#beginValue(char);
    this.#fail(char);
  }

  #beginKey() {
    const entry = { key: "", keyDone: false, value: null };
    this.#open.at(-1).entries.push(entry);
    this.#string = { target: entry, field: "key" };
  }

  #beginValue(char) {
    if (char === "{") this.#push({ kind: "object", done: false, entries: [] }, "first key");
    else if (char === "[") this.#push({ kind: "array", done: false, items: [] }, "first item");
    else if (char === '"') {
      const node = { kind: "string", done: false, text: "" };
      this.#place(node);
      this.#string = { target: node, field: "text" };
    } else if (/[-\dtfn]/.test(char)) {
      const kind = /[tfn]/.test(char) ? "literal" : "number";
      this.#scalar = { kind, done: false, text: char };
      this.#place(this.#scalar);
    } else this.#fail(char);
  }

  #push(node, expects) {
    this.#place(node);
    this.#open.push(node);
    this.#expects = expects;
  }

  #place(node) {
    const parent = this.#open.at(-1);
    if (!parent) this.root = node;
    else if (parent.kind === "array") parent.items.push(node);
    else parent.entries.at(-1).value = node;
  }

  #close(char) {
    const node = this.#open.at(-1);
    const fits = node && (char === "}") === (node.kind === "object");
    if (!fits || !["comma", "first key", "first item"].includes(this.#expects))
      return this.#fail(char);
    this.#open.pop();
    this.#endValue(node);
  }

  #next() {
    this.#expects = this.#open.at(-1).kind === "object" ? "key" : "value";
  }

  #endValue(node) {
    node.done = true;
    this.#expects = this.#open.length ? "comma" : "end";
  }

  #endScalar() {
    const node = this.#scalar;
    this.#scalar = null;
    const whole = node.kind === "number" ? NUMBER.test(node.text) : LITERALS.includes(node.text);
    if (whole) this.#endValue(node);
    else this.error = `${JSON.stringify(node.text)} is no value of JSON`;
  }

  #takeInString(char) {
    const { target, field } = this.#string;
    if (this.#escape !== null) return this.#takeEscape(char);
    if (char === "\\") this.#escape = "";
    else if (char === '"') {
      this.#string = null;
      if (field === "text") return this.#endValue(target);
      target.keyDone = true;
      this.#expects = "colon";
    } else if (char < " ") this.#fail(char);
    else target[field] += char;
  }

  #takeEscape(char) {
    const { target, field } = this.#string;
    this.#escape += char;
    if (this.#escape[0] === "u") {
      if (!/^u[\da-fA-F]{0,4}$/.test(this.#escape)) return this.#fail(char);
      if (this.#escape.length < 5) return;
      target[field] += String.fromCharCode(parseInt(this.#escape.slice(1), 16));
    } else if (char in ESCAPES) target[field] += ESCAPES[char];
    else return this.#fail(char);
    this.#escape = null;
  }

  #fail(char) {
    this.error = `${JSON.stringify(char)} at character ${this.#at + 1} is not what JSON has there`;
  }
}
