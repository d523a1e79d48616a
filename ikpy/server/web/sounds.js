import { dataUrl } from "./files.js";

// What the server decodes, by the names that browsers give it.
const FORMATS = {
  "audio/mpeg": "mp3", "audio/mp3": "mp3", "audio/flac": "flac", "audio/x-flac": "flac",
  "audio/wav": "wav", "audio/x-wav": "wav", "audio/wave": "wav", "audio/vnd.wave": "wav",
};
const LARGEST_BYTES = 1 << 20, RATE = 16000; // samples a second that encoders hear

// A data URL of a file's sound; one that is large, or of another kind, becomes a WAV file of one channel. MP3 is smaller.
export async function soundOf(file) {
  const format = FORMATS[file.type];
  if (format === "mp3" || (format && file.size <= LARGEST_BYTES)) return dataUrl(file);
  const sound = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await file.arrayBuffer());
  return dataUrl(new Blob([wav(mixed(sound))], { type: "audio/wav" }));
}

// The format and the base64 of a sound's data URL, as requests have them.
export function soundParts(url) {
  const [head, data] = url.split(",");
  return { data, format: FORMATS[head.slice("data:".length).split(";")[0]] };
}

function mixed(sound) {
  const channels = Array.from({ length: sound.numberOfChannels }, (_, i) => sound.getChannelData(i));
  return Float32Array.from(channels[0], (_, t) => channels.reduce((sum, channel) => sum + channel[t], 0) / channels.length);
}

// A file of 16 bits a sample.
function wav(samples) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (at, letters) => [...letters].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt()));
  text(0, "RIFF"); text(8, "WAVE"); text(12, "fmt "); text(36, "data");
  for (const [at, value] of [[4, 36 + 2 * samples.length], [16, 16], [24, RATE], [28, 2 * RATE], [40, 2 * samples.length]]) view.setUint32(at, value, true);
  for (const [at, value] of [[20, 1], [22, 1], [32, 2], [34, 16]]) view.setUint16(at, value, true);
  samples.forEach((sample, i) => view.setInt16(44 + 2 * i, Math.round(32767 * Math.max(-1, Math.min(1, sample))), true));
  return view.buffer;
}
