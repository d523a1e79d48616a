import { copy } from "./clipboard.js";
import { markdown } from "./markdown.js";
import { asParts, kindOf, mediaOf, nameOf, sentContent, shown } from "./media.js";

const $ = id => document.getElementById(id);
// Labels and steps. What is left empty is not sent: the server's command line says what holds.
const FIELDS = {
  temperature: ["Temperature", 0.05], top_k: ["Top-k", 1], top_p: ["Top-p", 0.01], min_p: ["Min-p", 0.01],
  typical_p: ["Typical-p", 0.01], top_n_sigma: ["Top-n-sigma", 0.1], repeat_penalty: ["Repeat penalty", 0.05],
  presence_penalty: ["Presence penalty", 0.1], frequency_penalty: ["Frequency penalty", 0.1],
  dry_multiplier: ["DRY multiplier", 0.1], xtc_probability: ["XTC probability", 0.05],
  max_tokens: ["Most tokens (-1: no limit)", 1], seed: ["Seed (-1: random)", 1],
};
const STATUS_MS = 5000;

let chats = load("chats", []);
let settings = load("settings", {});
let current = chats.find(chat => chat.id === load("current", null)) ?? chats[0] ?? null;
let running = null;
let edited = null; // the conversation, and its messages from the one that is edited on, which go when it is sent
let attached = []; // data URLs of the pictures and sounds of the next message
let taken = ["image", "audio"]; // what of both the model takes; a server of several does not know it of those not loaded
const unfolded = new WeakMap(); // messages whose reasoning the user opened or closed

// storage

function load(name, fallback) {
  try { return JSON.parse(localStorage.getItem("ikpy." + name)) ?? fallback; } catch { return fallback; }
}
function store() {
  try {
    const { key, ...kept } = settings;
    localStorage.setItem("ikpy.settings", JSON.stringify(kept));
    storeChats();
    localStorage.setItem("ikpy.current", JSON.stringify(current?.id ?? null));
    sessionStorage.setItem("ikpy.key", key || "");
  } catch { /* private windows may forbid storage, and it may be full: the page works without it */ }
}
// Pictures and sounds may be more than there is room for: then texts stay.
function storeChats() {
  const kept = chats.map(whole);
  try { localStorage.setItem("ikpy.chats", JSON.stringify(kept)); } catch {
    localStorage.setItem("ikpy.chats", JSON.stringify(kept, (name, value) => name === "media" ? undefined : value));
  }
}
function whole(chat) {
  return chat === edited?.chat ? { ...chat, messages: [...chat.messages, ...edited.rest] } : chat;
}
// What another tab has stored, but for the conversation that is edited or answered here.
function takeStored({ key }) {
  if (key === "ikpy.settings") settings = { ...load("settings", {}), key: settings.key, model: settings.model };
  if (key !== "ikpy.chats") return;
  const id = current?.id, kept = running || edited ? current : null;
  chats = load("chats", []).map(chat => kept && chat.id === id ? kept : chat);
  if (kept && !chats.includes(kept)) chats.unshift(kept);
  current = chats.find(chat => chat.id === id) ?? null;
  if (running) drawChats(); else draw(atEnd());
}
function messages() {
  return current?.messages ?? [];
}

// drawing

function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}
function button(text, action) {
  const node = element("button", text);
  node.type = "button";
  node.onclick = action;
  return node;
}
function draw(follow = true) {
  $("log").replaceChildren(...messages().map((message, i) => drawMessage(message, i)));
  drawChats();
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  toEnd(follow);
}
function drawChats() {
  $("chats").replaceChildren(...chats.map(drawChat));
}
// While an answer comes only its own node is made anew, and the view follows only if it is at the end.
function drawLast() {
  const follow = atEnd();
  const i = messages().length - 1;
  $("log").lastElementChild?.replaceWith(drawMessage(messages()[i], i));
  toEnd(follow);
}
function atEnd() {
  const scroll = $("scroll");
  return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
}
function toEnd(wanted) {
  if (wanted) $("scroll").scrollTop = $("scroll").scrollHeight;
}
function drawMessage(message, i) {
  const node = element("div", undefined, "message " + (message.error ? "error" : message.role));
  const last = i === messages().length - 1;
  if (message.reasoning) {
    const details = element("details");
    const summary = element("summary", "Reasoning");
    summary.onclick = () => unfolded.set(message, !details.open);
    details.append(summary, element("div", message.reasoning));
    details.open = unfolded.get(message) ?? !message.content;
    node.append(details);
  }
  if (message.role === "assistant") {
    const text = element("div", undefined, "text");
    text.append(...markdown(message.content || (running && last ? "…" : "")));
    node.append(text);
  } else node.append(...(message.media ?? []).map(shown), element("span", message.content));
  if (message.error) node.append(element("div", message.error));
  if (message.rate) node.append(element("span", message.rate, "rate"));
  if (!running) node.append(drawActions(message, i, last));
  return node;
}
function drawAttached() {
  $("attached").hidden = !attached.length;
  $("attached").replaceChildren(...attached.map((url, i) => {
    const remove = button("", () => { attached.splice(i, 1); drawAttached(); });
    remove.ariaLabel = "Remove " + nameOf(url);
    remove.title = "Remove";
    remove.append(kindOf(url) === "audio" ? "♪ sound" : shown(url));
    return remove;
  }));
}
function attach(urls) {
  attached = urls;
  drawAttached();
}
async function addMedia(files) {
  for (const file of files) {
    try { attached.push(await mediaOf(file)); } catch { $("status").textContent = `${file.name} is no ${nameOf(file.type)} that this browser can read`; }
  }
  drawAttached();
}
function drawActions(message, i, last) {
  const actions = element("div", undefined, "actions");
  if (message.role === "assistant") {
    if (last) actions.append(button("Regenerate", () => { messages().pop(); answer(); }));
    if (last && (message.content || message.reasoning)) actions.append(button("Continue", () => answer(true)));
    actions.append(button("Copy", () => copy(message.content)));
  } else actions.append(button("Edit", () => edit(message, i)));
  return actions;
}
function drawChat(chat) {
  const item = element("li", undefined, chat === current ? "current" : "");
  const title = button(chat.title, () => { stop(); endEdit(); current = chat; closeMenu(); store(); draw(); $("input").focus(); });
  title.className = "title";
  const remove = button("×", () => {
    const follow = chat === current || atEnd();
    if (chat === current) { stop(); endEdit(); current = null; }
    chats = chats.filter(other => other !== chat);
    store(); draw(follow);
  });
  remove.className = "remove";
  remove.ariaLabel = "Delete " + chat.title;
  item.append(title, remove);
  return item;
}
function edit(message, i) {
  endEdit();
  edited = { chat: current, rest: messages().splice(i) };
  $("input").value = message.content;
  attach([...(message.media ?? [])]);
  draw(); resize();
  $("input").focus();
}
// Gives up what is edited: the conversation is as it was.
function endEdit() {
  if (!edited) return;
  edited.chat.messages.push(...edited.rest);
  edited = null;
  $("input").value = "";
  attach([]);
  resize();
}

// answers

function headers() {
  const out = { "Content-Type": "application/json" };
  if (settings.key) out.Authorization = "Bearer " + settings.key;
  return out;
}
// Many templates refuse questions in a row: behind an answer without a word, stopped or failed, the next question joins the
// one before. Only the message that is continued has its reasoning with it.
function sentMessages(more) {
  const sent = [];
  for (const message of messages().filter(message => message.content || message.media?.length)) {
    const { role } = message, content = sentContent(message), last = sent.at(-1);
    if (last?.role !== role) sent.push({ role, content });
    else if (typeof content === "string" && typeof last.content === "string") last.content += "\n\n" + content;
    else last.content = [...asParts(last.content), ...asParts(content)];
  }
  const { content, reasoning } = messages().at(-1);
  if (!more || !reasoning) return sent;
  return [...(content ? sent.slice(0, -1) : sent), { role: "assistant", content, reasoning_content: reasoning }];
}
function requestBody(more) {
  const sent = sentMessages(more);
  if (settings.system) sent.unshift({ role: "system", content: settings.system });
  const body = { messages: sent, timings_per_token: true };
  if (settings.model) body.model = settings.model;
  for (const name in FIELDS) if (name in settings) body[name] = Number(settings[name]);
  return { ...body, ...(settings.extra ? JSON.parse(settings.extra) : {}), stream: true };
}
async function answer(more = false) {
  const chat = current;
  edited = null;
  if (!more) messages().push({ role: "assistant", content: "" });
  const message = messages().at(-1);
  delete message.error;
  try {
    const body = requestBody(more);
    running = new AbortController();
    store(); draw();
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal });
    if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message || "HTTP " + response.status);
    await read(response.body, message, chat);
  } catch (error) {
    if (error.name !== "AbortError") message.error = String(error.message || error);
  }
  const follow = atEnd();
  running = null;
  store(); draw(follow); showStatus();
  $("input").focus();
}
async function read(body, message, chat) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", waiting = false;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) take(event, message);
    if (waiting) continue;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; if (running && chat === current) drawLast(); });
  }
}
function take(event, message) {
  const data = event.replace(/^data: /, "");
  if (data === "[DONE]") return;
  const chunk = JSON.parse(data);
  if (chunk.error) throw new Error(chunk.error.message);
  const delta = chunk.choices?.find(choice => choice.index === 0)?.delta || {};
  message.content += delta.content || "";
  if (delta.reasoning_content) message.reasoning = (message.reasoning || "") + delta.reasoning_content;
  const t = chunk.timings;
  if (t) message.rate = `${t.predicted_n} tokens, ${t.predicted_per_second.toFixed(1)} tokens/s; prompt ${t.prompt_n} tokens, ${t.prompt_per_second.toFixed(1)} tokens/s; context ${t.n_past} of ${t.n_ctx}`;
}
function stop() {
  running?.abort();
}

// controls

$("form").onsubmit = event => {
  event.preventDefault();
  const text = $("input").value.trim();
  if (!(text || attached.length) || running) return;
  const title = text.slice(0, 60) || (attached.length && kindOf(attached[0]) === "audio" ? "Sound" : "Picture");
  $("input").value = "";
  resize();
  if (!current) {
    current = { id: Date.now(), title, messages: [] };
    chats.unshift(current);
  }
  if (!messages().length) current.title = title;
  messages().push({ role: "user", content: text, ...(attached.length ? { media: attached } : {}) });
  attach([]);
  answer();
};
$("input").onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
};
function resize() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = input.scrollHeight + "px";
}
function closeMenu() {
  document.body.classList.remove("menu");
}
function newChat() {
  stop();
  endEdit();
  current = null;
  closeMenu();
  store(); draw();
  $("input").focus();
}
$("input").oninput = resize;
$("attach").onclick = () => $("files").click();
$("files").onchange = async () => { await addMedia($("files").files); $("files").value = ""; };
$("input").onpaste = event => {
  const files = [...event.clipboardData.files].filter(file => taken.some(kind => file.type.startsWith(kind + "/")));
  if ($("attach").hidden || !files.length) return;
  event.preventDefault();
  addMedia(files);
};
$("stop").onclick = stop;
$("new").onclick = newChat;
$("menu").onclick = () => document.body.classList.toggle("menu");
$("page").addEventListener("click", event => { if (event.target !== $("menu")) closeMenu(); });
document.onkeydown = event => {
  if (event.key === "Escape" && !$("settings").open) {
    stop(); closeMenu();
    if (edited) { endEdit(); draw(); }
  }
  if (event.altKey && event.key === "n") { event.preventDefault(); newChat(); }
  if (event.altKey && event.key === "s") { event.preventDefault(); openSettings(); }
};

// settings and information

function fill() {
  const form = $("settings").querySelector("form");
  $("fields").replaceChildren(...Object.entries(FIELDS).map(([name, [label, step]]) => {
    const node = element("label", label), input = element("input");
    Object.assign(input, { name, type: "number", step, value: settings[name] ?? "" });
    node.append(input);
    return node;
  }));
  for (const name of ["system", "extra", "key"]) form.elements[name].value = settings[name] || "";
  form.elements.extra.setCustomValidity("");
}
// What is wrong with other request fields; empty if nothing is.
function problemOf(text) {
  try {
    const value = JSON.parse(text);
    return value !== null && typeof value === "object" && !Array.isArray(value) ? "" : "This is no JSON object.";
  } catch (error) { return error.message; }
}
// Numbers may lie between the steps of their arrows, so that only this field is checked.
$("settings").querySelector("form").onsubmit = event => {
  if (!event.target.elements.extra.reportValidity()) event.preventDefault();
};
$("settings").onchange = event => {
  const { name, value } = event.target;
  if (name in FIELDS && value === "") { delete settings[name]; store(); return; }
  if (name === "extra" && value) {
    event.target.setCustomValidity(problemOf(value));
    if (!event.target.reportValidity()) return;
  }
  settings[name] = value;
  store();
  if (name === "key") showInfo();
};
$("defaults").onclick = () => { settings = { key: settings.key, model: settings.model }; store(); openSettings(); };
function showDefaults(server) {
  const values = { ...server, max_tokens: server.n_predict };
  for (const name in FIELDS) {
    const input = $("settings").querySelector(`[name=${name}]`);
    if (name in values) input.placeholder = Number(values[name].toPrecision(6));
  }
}
$("export").onclick = () => {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(current ?? {}, null, 1)], { type: "application/json" }));
  link.download = "conversation.json";
  link.click();
  URL.revokeObjectURL(link.href);
};
async function json(path) {
  const query = settings.model ? "?model=" + encodeURIComponent(settings.model) : "";
  const response = await fetch(path + query, { headers: headers() });
  const value = await response.json();
  if (!response.ok) throw new Error(value.error?.message || "HTTP " + response.status);
  return value;
}
function openSettings() {
  fill();
  if (!$("settings").open) $("settings").showModal();
  showInfo();
}
async function showInfo() {
  $("info").textContent = "";
  try {
    const props = await json("props");
    showDefaults(props.default_generation_settings);
    const slots = await json("slots").catch(() => []);
    const lines = slots.map(slot => `slot ${slot.id}: ${slot.state ? "busy, " + slot.next_token.n_decoded + " tokens" : "idle"}, ${slot.n_ctx} tokens of context`);
    $("info").textContent = [`model: ${props.model_path}`, `context: ${props.n_ctx} tokens, ${props.total_slots} slots`, ...lines].join("\n");
  } catch (error) { $("info").textContent = String(error.message); }
}
$("open").onclick = openSettings;
async function showModels() {
  try {
    const { data } = await (await fetch("v1/models")).json();
    const names = data.map(model => model.id);
    if (names.length > 1) {
      if (!names.includes(settings.model)) settings.model = names[0];
      $("model").replaceChildren(...names.map(name => { const node = element("option", name); node.value = name; return node; }));
      $("model").value = settings.model;
      $("model").hidden = false;
      $("model").onchange = () => { settings.model = $("model").value; store(); showTitle(); };
    } else delete settings.model;
    $("name").textContent = names.length === 1 ? names[0].split("/").pop() : "ikpy";
    if (names.length === 1) taken = taken.filter(kind => data[0].architecture?.input_modalities?.includes(kind));
    showAttach();
    showTitle();
  } catch { /* shown by the status */ }
}
function showAttach() {
  $("attach").hidden = !taken.length;
  $("files").accept = taken.map(kind => kind + "/*").join();
  const names = taken.map(kind => nameOf(kind + "/") + "s").join(" and ");
  $("attach").ariaLabel = "Add " + names;
  $("attach").title = `Add ${names}; they can be pasted as well`;
}
function showTitle() {
  document.title = "ikpy: " + (settings.model || $("name").textContent);
}
async function showStatus() {
  try {
    const h = await (await fetch("v1/health")).json();
    $("status").textContent = h.models_loaded === undefined ? `${h.slots_processing} of ${h.slots_idle + h.slots_processing} slots busy` : `${h.models_loaded} ${h.models_loaded === 1 ? "model" : "models"} loaded`;
  } catch { $("status").textContent = "the server does not answer"; }
}

addEventListener("storage", takeStored);
addEventListener("pagehide", () => { if (running) store(); });
settings.key = sessionStorage.getItem("ikpy.key") || "";
draw();
showModels();
showStatus();
setInterval(() => { if (!document.hidden) showStatus(); }, STATUS_MS);
