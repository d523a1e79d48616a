// Pictures and sounds of messages, which are data URLs: how they are taken from files, shown and sent.
import { pictureOf } from "./pictures.js";
import { soundOf, soundParts } from "./sounds.js";

// What a file or a data URL holds, as the server's lists of models call it.
export function kindOf(type) {
  return type.replace(/^data:/, "").startsWith("audio/") ? "audio" : "image";
}
export function nameOf(url) {
  return kindOf(url) === "audio" ? "sound" : "picture";
}
export function mediaOf(file) {
  return kindOf(file.type) === "audio" ? soundOf(file) : pictureOf(file);
}
export function shown(url) {
  const isSound = kindOf(url) === "audio", node = document.createElement(isSound ? "audio" : "img");
  node.src = url;
  if (isSound) node.controls = true;
  else node.alt = "picture";
  return node;
}
export function asParts(content) {
  return typeof content === "string" ? [{ type: "text", text: content }] : content;
}
// The content of a message as requests have it.
export function sentContent({ content, media }) {
  if (!media?.length) return content;
  return [...media.map(part), ...(content ? asParts(content) : [])];
}
function part(url) {
  if (kindOf(url) === "audio") return { type: "input_audio", input_audio: soundParts(url) };
  return { type: "image_url", image_url: { url } };
}
