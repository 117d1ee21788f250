// What every other part uses: elements, the page's data, numbers as text, colours.
// All strings of the data enter the document through textContent, so none of them can be markup.
const $ = (id) => document.getElementById(id);

const make = (tag, text, className) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
};

/** Text of the model or the corpus: its own direction stays inside it. */
const quoted = (tag, text, className) => {
  const node = make(tag, text, className);
  node.dir = "auto";
  return node;
};

const button = (text, className, act) => {
  const node = make("button", text, className);
  node.type = "button";
  node.addEventListener("click", act);
  return node;
};

const row = (cells, tag = "td", first = "th") => {
  const line = make("tr");
  cells.forEach((cell, index) => {
    const node = cell instanceof Node ? cell : make(index ? tag : first, cell);
    if (node.tagName === "TH") node.scope = tag === "th" ? "col" : "row";
    line.append(node);
  });
  return line;
};

// -- data -----------------------------------------------------------------------------------------
const ARRAYS = { u1: Uint8Array, u2: Uint16Array, f4: Float32Array };

/** The record inside a base64 zlib stream: its length, JSON, then the arrays. */
const unpack = async (text) => {
  const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const start = 4 + new DataView(buffer).getUint32(0, true);
  const record = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, start - 4)));
  for (const [name, [kind, offset, size]] of Object.entries(record.arrays)) {
    record.arrays[name] = new ARRAYS[kind](buffer, start + offset, size);
  }
  return record;
};

/** The numbers that codes stand for; null where there is none. */
const decode = (codes, [low, high], soft) => {
  if (codes instanceof Float32Array) return Array.from(codes, (value) => (Number.isNaN(value) ? null : value));
  const none = codes instanceof Uint8Array ? 255 : 65535;
  const step = (high - low) / (none - 1);
  return Array.from(codes, (code) => (code === none ? null : Math.sinh(low + code * step) * soft));
};

// -- numbers as text --------------------------------------------------------------------------------
const label = (one) => one.name.replaceAll("_", " ");
const count = (number) => number.toLocaleString("en-US");
const some = (amount, noun) => `${count(amount)} ${noun}${amount === 1 ? "" : "s"}`;
const typeset = (text) => text.replace("e+", "e").replaceAll("-", "−");
const far = (value) => value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3);
const number = (value, digits = 4) => {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0"; // not −0
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return typeset(count(value));
  const whole = Math.floor(Math.log10(Math.abs(value))) + 1;
  return typeset(far(value) ? value.toExponential(2) : value.toPrecision(Math.max(digits, whole)));
};
const brief = (value, kind) => {
  if (value === null) return "–";
  const size = Math.abs(value);
  if (kind !== "unit" && far(value)) return typeset(value.toExponential(0));
  if (kind !== "unit" && size > 0 && size < 0.1) return typeset(String(Number(value.toPrecision(2))));
  return typeset(value.toFixed(size < 10 || kind === "unit" ? 2 : size < 100 ? 1 : 0));
};
/** A share as a percentage, with one decimal where that says more. */
const percent = (share) => {
  if (share === null || share === undefined) return "–";
  const value = 100 * share, size = Math.abs(value);
  return typeset(size && size < 0.05 ? "under 0.1%" : `${size < 9.95 && size > 0 ? value.toFixed(1) : size > 99 && size < 100 ? value.toFixed(1) : value.toFixed(0)}%`);
};
const plain = (value) => typeset(far(value) ? value.toExponential(0) : String(Number(value.toPrecision(3))));
const signed = (value) => `${value > 0 ? "+" : ""}${number(value, 2)}`;
const unit = (one) => (one.unit === "1" ? "" : one.unit);
const withUnit = (one) => (one.unit === "1" || label(one).includes(one.unit) ? label(one) : `${label(one)}, ${one.unit}`);
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const spread = (values) => [...new Set([Math.min(...values), Math.max(...values)])].map(count).join(" to ");

// -- colour -----------------------------------------------------------------------------------------
/** Colour at 0..1 of the scale, and black or white, whichever reads better on it. */
const painter = (anchors) => {
  const parts = anchors.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  return (place) => {
    const at = Math.min(1, Math.max(0, place)) * (parts.length - 1);
    const index = Math.min(Math.floor(at), parts.length - 2);
    const rgb = parts[index].map((part, side) => Math.round(part + (parts[index + 1][side] - part) * (at - index)));
    const [r, g, b] = rgb.map((part) => (part <= 10 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4));
    return [`rgb(${rgb.join(" ")})`, 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff"];
  };
};
