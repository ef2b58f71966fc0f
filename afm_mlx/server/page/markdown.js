/**
 * Markdown as elements. marked splits the text into tokens; this file makes an element of each, so that no HTML
 * is ever parsed: HTML, images and links to anything but the web are shown as the text that they are.
 */
import { element, iconButton, toast } from "./dom.js";
import { lexer } from "./vendor/marked.esm.js";

const OPTIONS = { gfm: true, breaks: true };
const WEB = /^(https?:|mailto:)/i;
const CONTAINERS = { strong: "strong", em: "em", del: "del", blockquote: "blockquote" };

const MOST_MARKS = 600; // of emphasis in a paragraph; for more, marked takes seconds
const FENCED = /^(```|~~~)[\s\S]*?(^\1|$(?![\s\S]))/gm;

const shownBlocks = new WeakMap(); // container -> sources of the blocks that it shows

/** Show `text` in `container`. Blocks that have not changed since the last call keep their elements. */
export function showMarkdown(container, text) {
  const blocks = blocksOf(text);
  const before = shownBlocks.get(container) ?? [];
  const sources = blocks.map((block) => block.raw);
  let same = 0;
  while (same < sources.length && sources[same] === before[same]) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  container.append(...blocks.slice(same).map(block));
  shownBlocks.set(container, sources);
}

/** The tokens of a text; the whole text as one if it would take too long, or is nested too deeply. */
function blocksOf(text) {
  const paragraphs = text.replace(FENCED, "").split(/\n\s*\n/);
  const marks = Math.max(...paragraphs.map((part) => part.match(/[*_~]/g)?.length ?? 0));
  try {
    if (marks <= MOST_MARKS) return lexer(text, OPTIONS).filter(({ type }) => type !== "space");
  } catch {
    // nested too deeply
  }
  return [{ type: "text", raw: text }];
}

function block(token) {
  if (token.type === "code") return codeBlock(token);
  if (token.type === "hr") return element("hr");
  if (token.type === "list") return list(token);
  if (token.type === "table") return table(token);
  if (token.type === "blockquote") return element("blockquote", {}, ...token.tokens.map(block));
  if (token.type === "heading") {
    const level = `heading level-${Math.min(token.depth, 3)}`;
    return element("p", { class: level }, ...inline(token.tokens));
  }
  if (token.type === "paragraph") return element("p", {}, ...inline(token.tokens));
  const lines = token.raw.trim().split("\n");
  return element("p", {}, ...lines.flatMap((line, i) => (i ? [element("br"), line] : [line])));
}

function codeBlock({ lang, text }) {
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    toast("Code copied.");
  };
  const head = element("div", { class: "code-head" }, element("span", {}, lang || "code"));
  if (navigator.clipboard) head.append(iconButton("copy", "Copy code", copy));
  const label = lang ? `Code, ${lang}` : "Code";
  const code = element("code", {}, text);
  const pre = element("pre", { tabindex: 0, role: "region", "aria-label": label }, code);
  return element("div", { class: "code" }, head, pre);
}

function list({ ordered, start, items }) {
  const tag = ordered ? "ol" : "ul";
  return element(tag, ordered ? { start } : {}, ...items.map(listItem));
}

function listItem({ task, checked, tokens }) {
  const content = tokens.flatMap((token) => {
    if (token.type === "checkbox" || token.type === "space") return [];
    return token.type === "text" ? inline(token.tokens ?? [token]) : [block(token)];
  });
  if (!task) return element("li", {}, ...content);
  const mark = element("span", { class: `box${checked ? " ticked" : ""}`, "aria-hidden": "true" });
  const spoken = element("span", { class: "visually-hidden" }, checked ? "Done: " : "To do: ");
  return element("li", { class: "boxed" }, mark, spoken, ...content);
}

function table({ header, rows }) {
  const cells = (tag) => (cell) => element(tag, { class: cell.align }, ...inline(cell.tokens));
  const head = element("tr", {}, ...header.map(cells("th")));
  const body = rows.map((row) => element("tr", {}, ...row.map(cells("td"))));
  const made = element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
  return element("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" }, made);
}

function inline(tokens) {
  return tokens.flatMap((token) => {
    if (token.type === "br") return [element("br")];
    if (token.type === "codespan") return [element("code", {}, token.text)];
    if (token.type in CONTAINERS)
      return [element(CONTAINERS[token.type], {}, ...inline(token.tokens))];
    if (token.type === "link" && WEB.test(token.href)) {
      const link = { href: token.href, target: "_blank", rel: "noopener noreferrer" };
      return [element("a", link, ...inline(token.tokens))];
    }
    if (token.type === "text" || token.type === "escape") {
      return token.tokens ? inline(token.tokens) : [token.text];
    }
    return [token.raw];
  });
}
