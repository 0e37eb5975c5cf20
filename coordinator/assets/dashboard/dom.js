// Elements and words. Nothing here takes a text for markup: what clients and nodes call themselves is text, whatever it says.

/** An element. `props`: `text`, `class`, `title`, `data` (an object), `on` (events), any other one an attribute. */
export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") made.textContent = value;
    else if (name === "class") made.className = value;
    else if (name === "data") Object.assign(made.dataset, value);
    else if (name === "on") for (const [event, call] of Object.entries(value)) made.addEventListener(event, call);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Changes a text only if it is another one: what is selected stays selected. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Changes an attribute only if it is another one. */
export function mark(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** Puts `wanted` into `parent` in this order, and takes out everything else. What is there already stays as it is. */
export function arrange(parent, wanted) {
  const keep = new Set(wanted);
  for (const child of [...parent.children]) if (!keep.has(child)) child.remove();
  wanted.forEach((child, at) => {
    if (parent.children[at] !== child) parent.insertBefore(child, parent.children[at] ?? null);
  });
}

const group = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** A whole number. */
export const whole = (number) => group.format(number ?? 0);

/** A number with as many digits as are of use. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return whole(value);
  if (value < 10) return value.toFixed(2).replace(/\.?0+$/, "");
  return value < 100 ? value.toFixed(1) : whole(value);
}

/** A time in milliseconds. */
export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 0.01) return "< 0.01 ms";
  if (value < 10) return `${value.toFixed(value < 1 ? 2 : 1)} ms`;
  if (value < 1000) return `${value.toFixed(0)} ms`;
  if (value < 100_000) return `${(value / 1000).toFixed(value < 10_000 ? 2 : 1)} s`;
  return age(value);
}

export const us = (value) => ms((value ?? 0) / 1000);

/** How long ago, or for how long. */
export function age(milliseconds) {
  const seconds = Math.floor((milliseconds ?? 0) / 1000);
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86_400)} d ${Math.floor((seconds % 86_400) / 3600)} h`;
}

/** A number of bytes. */
export function bytes(value) {
  let size = value ?? 0;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (size < 1024) return `${unit === "B" ? whole(size) : size.toFixed(1)} ${unit}`;
    size /= 1024;
  }
  return `${size.toFixed(1)} TiB`;
}

/** A share of a whole. */
export const percent = (part, all) => (all > 0 ? `${Math.round((100 * part) / all)} %` : "–");

/** A key of colours: `[name, title]` each. */
export const key = (entries, kind) =>
  entries.map(([name, title]) => el("li", {}, el("i", { class: `swatch ${kind} ${name}`, "aria-hidden": "true" }), title));
