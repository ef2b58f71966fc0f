/**
 * A little of Markdown, as elements: paragraphs, headings, lists with boxes, quotes, code, emphasis, links to
 * the web.
 *
 * Everything else, HTML above all, is shown as the text that it is.
 */
import { element, iconButton, toast } from "./dom.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(.+)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^>\s?(.*)$/;
const RULE = /^([-*_])(\s*\1){2,}\s*$/;
const BOX = /^\[([ xX])\]\s+/;
const INLINE =
  /(`+)(.+?)\1|\*\*(\S(?:.*?\S)?)\*\*|\*(\S(?:[^*]*?\S)?)\*|\[([^\][]+)\]\(((?:https?:|mailto:)[^\s()<>]+)\)/;

const shownBlocks = new WeakMap(); // container -> sources of the blocks that it shows

/**
 * Show `text` in `container`. Blocks that have not changed since the last call stay the elements that they are.
 */
export function showMarkdown(container, text) {
  const blocks = splitBlocks(text);
  const before = shownBlocks.get(container) ?? [];
  const sources = blocks.map((block) => JSON.stringify(block));
  let same = 0;
  while (same < sources.length && sources[same] === before[same]) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  container.append(...blocks.slice(same).map(makeBlock));
  shownBlocks.set(container, sources);
}

function splitBlocks(text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  let i = 0;
  while (i < lines.length) {
    const fence = lines[i].match(FENCE);
    if (fence) {
      const end = lines.findIndex((line, k) => k > i && line.trim() === fence[1]);
      const code = lines.slice(i + 1, end < 0 ? lines.length : end).join("\n");
      blocks.push({ kind: "code", language: fence[2], text: code });
      i = end < 0 ? lines.length : end + 1;
      continue;
    }
    const kind = kindOf(lines[i]);
    const from = i;
    i += 1;
    if (kind === "blank") continue;
    if (kind !== "heading" && kind !== "rule")
      while (i < lines.length && goesOn(kind, lines[i])) i += 1;
    blocks.push({ kind, lines: lines.slice(from, i) });
  }
  return blocks;
}

function kindOf(line) {
  if (!line.trim()) return "blank";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (ITEM.test(line)) return /\d/.test(line.match(ITEM)[2]) ? "numbers" : "bullets";
  return QUOTE.test(line) ? "quote" : "paragraph";
}

function goesOn(kind, line) {
  if (FENCE.test(line)) return false;
  const isList = kind === "numbers" || kind === "bullets";
  const next = kindOf(line);
  return next === kind || (isList && /^\s+\S/.test(line));
}

function makeBlock(block) {
  if (block.kind === "code") return codeBlock(block);
  if (block.kind === "rule") return element("hr");
  if (block.kind === "quote") {
    return element(
      "blockquote",
      {},
      ...inlineLines(block.lines.map((line) => line.match(QUOTE)[1])),
    );
  }
  if (block.kind === "heading") {
    const [, marks, text] = block.lines[0].match(HEADING);
    return element("p", { class: `heading level-${Math.min(marks.length, 3)}` }, ...inline(text));
  }
  if (block.kind === "paragraph") return element("p", {}, ...inlineLines(block.lines));
  return list(block.lines);
}

function codeBlock({ language, text }) {
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    toast("The code was copied.");
  };
  const head = element("div", { class: "code-head" }, element("span", {}, language || "code"));
  if (navigator.clipboard) head.append(iconButton("copy", "Copy this code", copy));
  const label = language ? `Code, ${language}` : "Code";
  const pre = element(
    "pre",
    { tabindex: 0, role: "region", "aria-label": label },
    element("code", {}, text),
  );
  return element("div", { class: "code" }, head, pre);
}

/** Items by their indentation: one that is indented further than the item above lies in it. */
function list(lines) {
  const items = [];
  for (const line of lines) {
    const match = line.match(ITEM);
    if (match) items.push({ indent: match[1].length, mark: match[2], lines: [match[3]] });
    else items.at(-1).lines.push(line.trim());
  }
  const build = (from, indent) => {
    const ordered = /\d/.test(items[from].mark);
    const made = element(
      ordered ? "ol" : "ul",
      ordered ? { start: parseInt(items[from].mark, 10) } : {},
    );
    let i = from;
    while (i < items.length && items[i].indent >= indent) {
      if (items[i].indent > indent + 1 && made.lastChild) {
        const [below, next] = build(i, items[i].indent);
        made.lastChild.append(below);
        i = next;
      } else {
        made.append(listItem(items[i].lines));
        i += 1;
      }
    }
    return [made, i];
  };
  return build(0, Math.min(...items.map((item) => item.indent)))[0];
}

function listItem(lines) {
  const box = lines[0].match(BOX);
  if (!box) return element("li", {}, ...inlineLines(lines));
  const ticked = box[1] !== " ";
  const label = ticked ? "Done: " : "To do: ";
  const mark = element("span", { class: `box${ticked ? " ticked" : ""}`, "aria-hidden": "true" });
  const spoken = element("span", { class: "visually-hidden" }, label);
  return element(
    "li",
    { class: "boxed" },
    mark,
    spoken,
    ...inlineLines([lines[0].replace(BOX, ""), ...lines.slice(1)]),
  );
}

function inlineLines(lines) {
  return lines.flatMap((line, i) => (i ? [element("br"), ...inline(line)] : inline(line)));
}

const LONGEST_LINE = 5000; // characters; the patterns look at longer lines for too long

function inline(text) {
  const made = [];
  let match;
  while (text.length <= LONGEST_LINE && (match = text.match(INLINE))) {
    if (match.index) made.push(text.slice(0, match.index));
    made.push(inlineElement(match));
    text = text.slice(match.index + match[0].length);
  }
  return text ? [...made, text] : made;
}

function inlineElement([, , code, strong, emphasis, label, address]) {
  if (code !== undefined) return element("code", {}, code.trim() || code);
  if (strong !== undefined) return element("strong", {}, ...inline(strong));
  if (emphasis !== undefined) return element("em", {}, ...inline(emphasis));
  return element(
    "a",
    { href: address, target: "_blank", rel: "noopener noreferrer" },
    ...inline(label),
  );
}
