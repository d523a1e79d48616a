// Puts text on the clipboard. Pages of plain HTTP, but those of this machine, have no `navigator.clipboard`.
export function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = document.createElement("textarea");
  field.value = text;
  field.readOnly = true;
  field.style.cssText = "position: fixed; opacity: 0";
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}
