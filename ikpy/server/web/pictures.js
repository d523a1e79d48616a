import { dataUrl } from "./files.js";

const SENT = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"]; // what the server decodes
const LARGEST_BYTES = 1 << 20, LONGEST_SIDE = 2048;

// A data URL of a file's picture; one that is large, or of another kind, becomes a JPEG.
export async function pictureOf(file) {
  if (SENT.includes(file.type) && file.size <= LARGEST_BYTES) return dataUrl(file);
  const image = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST_SIDE / Math.max(image.width, image.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  image.close();
  return canvas.toDataURL("image/jpeg", 0.9);
}
