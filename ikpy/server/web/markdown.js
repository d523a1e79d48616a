// Markdown to DOM nodes. Text never becomes HTML: every node is made here, and links lead to web and mail addresses only.
import { copy } from "./clipboard.js";

const INLINE = /(`+)([\s\S]+?)\1|\*{3}(?=[^\s*])([^*]+)\*{3}|\*\*(?=\S)([\s\S]+?)\*\*|__(?=\S)([\s\S]+?)__|\*(?=\S)([^*]+?)\*|(?<![\w])_(?=\S)([^_]+?)_(?![\w])|~~([\s\S]+?)~~|\[([^\]]+)\]\(((?:[^()\s]|\([^()\s]*\))+)(?:\s+"[^"]*")?\)|(https?:\/\/[^\s<>()]*[^\s<>()[\].,;:!?'"*_~`|\\])|\\([\\`*_~#|>-])/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
// A model in a loop writes a line of thousands of ">" or "- ", and browsers end a page with as many elements in each other.
const DEEPEST = 20;

function make(tag, ...children) {
  const node = document.createElement(tag);
  node.append(...children);
  return node;
}

export function inline(text) {
  const nodes = [];
  for (let match; (match = INLINE.exec(text)); ) {
    if (match.index) nodes.push(text.slice(0, match.index));
    const [all, , code, both, bold, bold2, italic, italic2, struck, label, target, bare, escaped] = match;
    if (code !== undefined) nodes.push(make("code", code.replace(/^ (.+) $/, "$1")));
    else if (escaped) nodes.push(escaped);
    else if (both) nodes.push(make("strong", make("em", ...inline(both))));
    else if (bold ?? bold2) nodes.push(make("strong", ...inline(bold ?? bold2)));
    else if (italic ?? italic2) nodes.push(make("em", ...inline(italic ?? italic2)));
    else if (struck) nodes.push(make("del", ...inline(struck)));
    else nodes.push(link(label ?? bare, target ?? bare));
    text = text.slice(match.index + all.length);
  }
  if (text) nodes.push(text);
  return nodes;
}

function link(label, target) {
  if (!/^(https?:|mailto:)/i.test(target)) return label;
  const node = make("a", label);
  node.href = target;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

function code(lines, language) {
  const text = lines.join("\n");
  const button = make("button", "Copy");
  button.type = "button";
  button.onclick = () => copy(text);
  const node = make("pre", make("code", text), button);
  if (language) node.dataset.language = language;
  return node;
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map(cell => cell.trim().replaceAll("\\|", "|"));
}

function table(lines) {
  const row = (line, tag) => make("tr", ...cells(line).map(cell => make(tag, ...inline(cell))));
  return make("table", make("thead", row(lines[0], "th")), make("tbody", ...lines.slice(2).map(line => row(line, "td"))));
}

function isTable(line, next = "") {
  return line.includes("|") && next.includes("-") && DIVIDER.test(next);
}

// Index behind the last line of the list that begins at a line; blank lines belong to it if an item or indented text follows.
function endOfList(lines, start) {
  let end = start + 1;
  for (let i = end; i < lines.length; i++) {
    if (!lines[i].trim()) continue;
    if (!ITEM.test(lines[i]) && !(i === end ? /^\s/ : /^(\s{2}|\t)/).test(lines[i])) break;
    end = i + 1;
  }
  return end;
}

function list(lines, depth) {
  const first = ITEM.exec(lines[0]);
  const node = make(/\d/.test(first[2]) ? "ol" : "ul");
  if (/\d/.test(first[2])) node.start = parseInt(first[2]);
  let item = [];
  const finish = () => { if (item.length) node.append(make("li", ...blocks(item, depth + 1, true))); };
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= first[1].length) {
      finish();
      item = [match[3]];
    } else item.push(line.replace(new RegExp(`^\\s{0,${first[1].length + first[2].length + 1}}`), ""));
  }
  finish();
  return node;
}

function blocks(lines, depth = 0, tight = false) {
  if (depth > DEEPEST) return [lines.join("\n")];
  const out = [];
  for (let i = 0; i < lines.length; ) {
    const line = lines[i];
    const fence = /^(\s*)(`{3,}|~{3,})\s*([\w+#.-]*)/.exec(line);
    const heading = /^(#{1,6})\s+(.*?)\s*#*$/.exec(line);
    const start = i++;
    const take = test => { while (i < lines.length && test(lines[i])) i++; return lines.slice(start, i); };
    if (!line.trim()) continue;
    if (fence) {
      const [, indent, marks, language] = fence, margin = new RegExp(`^\\s{0,${indent.length}}`);
      const body = take(next => !next.trim().startsWith(marks)).slice(1);
      i++;
      out.push(code(body.map(next => next.replace(margin, "")), language));
    } else if (heading) out.push(make("h" + heading[1].length, ...inline(heading[2])));
    else if (RULE.test(line)) out.push(make("hr"));
    else if (/^\s*>/.test(line)) out.push(make("blockquote", ...blocks(take(next => /^\s*>/.test(next)).map(next => next.replace(/^\s*> ?/, "")), depth + 1)));
    else if (isTable(line, lines[i])) out.push(table(take(next => next.includes("|"))));
    else if (ITEM.test(line)) out.push(list(lines.slice(start, i = endOfList(lines, start)), depth));
    else {
      const text = take(next => next.trim() && !/^\s*(`{3,}|~{3,}|>|#{1,6}\s)/.test(next) && !ITEM.test(next) && !RULE.test(next) && !isTable(next, lines[i + 1])).join("\n");
      out.push(...(tight && out.length === 0 ? inline(text) : [make("p", ...inline(text))]));
    }
  }
  return out;
}

export function markdown(text) {
  return blocks(text.split(/\r?\n/));
}
