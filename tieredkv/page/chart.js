// Stacked bars of tokens a minute, from where they came, over the last hour.

import { shape } from "/cache/dom.js";
import { count, minute } from "/cache/format.js";

const MINUTES = 60;
const MARGIN = { top: 8, right: 6, bottom: 22, left: 42 };
// From the bottom up.
export const SOURCES = ["hot", "cold", "remote", "computed"];

/** The last hour as one bucket a minute, oldest first; minutes without a request are zeros. */
export function buckets(history, now) {
  const last = Math.floor(now / 60);
  const found = Array.from({ length: MINUTES }, (_, i) => ({
    time: (last - MINUTES + 1 + i) * 60, requests: 0,
    ...Object.fromEntries(SOURCES.map((name) => [name, 0])),
  }));
  for (const entry of history) {
    const bucket = found[Math.floor(entry.time / 60) - last + MINUTES - 1];
    if (!bucket) continue;
    for (const name of ["requests", ...SOURCES]) bucket[name] += entry[name];
  }
  return found;
}

export const tokensOf = (bucket) => SOURCES.reduce((sum, name) => sum + bucket[name], 0);

/** The largest value of the axis and its step: 1, 2 or 5 times a power of ten. */
function axis(most) {
  const rough = Math.max(most, 4) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  return { step, top: step * Math.max(1, Math.ceil(most / step)) };
}

/** Draw into the element `host`, which is a slider over the minutes; `read(bucket)` says which. */
export class Chart {
  #host;
  #read;
  #buckets = [];
  #picked = null;

  constructor(host, read) {
    this.#host = host;
    this.#read = read;
    host.setAttribute("aria-valuemin", "0");
    host.setAttribute("aria-valuemax", String(MINUTES - 1));
    host.addEventListener("pointermove", (event) => this.#pick(this.#at(event)));
    host.addEventListener("pointerdown", (event) => this.#pick(this.#at(event)));
    host.addEventListener("pointerleave", () => this.#pick(null));
    host.addEventListener("focus", () => this.#pick(this.#picked ?? MINUTES - 1));
    host.addEventListener("blur", () => this.#pick(null));
    host.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#draw()).observe(host);
  }

  show(history, now) {
    this.#buckets = buckets(history, now);
    this.#pick(this.#picked);
  }

  #pick(index) {
    this.#picked = index;
    this.#draw();
    const bucket = index == null ? null : this.#buckets[index];
    const text = this.#read(bucket ?? null, this.#buckets, index === MINUTES - 1);
    this.#host.setAttribute("aria-valuenow", String(index ?? MINUTES - 1));
    this.#host.setAttribute("aria-valuetext", text);
  }

  #at(event) {
    const box = this.#host.getBoundingClientRect();
    const along = (event.clientX - box.left - MARGIN.left) / this.#innerWidth();
    return Math.min(MINUTES - 1, Math.max(0, Math.floor(along * MINUTES)));
  }

  #key(event) {
    const from = this.#picked ?? MINUTES - 1;
    const to = { ArrowLeft: from - 1, ArrowDown: from - 1, ArrowRight: from + 1,
      ArrowUp: from + 1, PageDown: from - 10, PageUp: from + 10, Home: 0, End: MINUTES - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.#pick(Math.min(MINUTES - 1, Math.max(0, to)));
  }

  #innerWidth() {
    return Math.max(MINUTES, this.#host.clientWidth - MARGIN.left - MARGIN.right);
  }

  #draw() {
    if (!this.#host.clientWidth || !this.#buckets.length) return;
    const height = this.#host.clientHeight;
    const inner = { width: this.#innerWidth(), height: height - MARGIN.top - MARGIN.bottom };
    const { top, step } = axis(Math.max(...this.#buckets.map(tokensOf)));
    const y = (tokens) => MARGIN.top + inner.height * (1 - tokens / top);
    this.#host.replaceChildren(
      shape(
        "svg",
        { width: MARGIN.left + inner.width + MARGIN.right, height, "aria-hidden": "true" },
        ...this.#band(inner),
        ...lines(inner, top, step, y),
        ...this.#times(inner),
        ...this.#bars(inner, y),
      ),
    );
  }

  *#band(inner) {
    if (this.#picked == null) return;
    const width = inner.width / MINUTES;
    const x = MARGIN.left + this.#picked * width;
    yield shape("rect", { class: "band", x, y: MARGIN.top, width, height: inner.height });
  }

  *#times(inner) {
    const every = inner.width < 420 ? 20 : 10;
    for (const [i, { time }] of this.#buckets.entries()) {
      const x = MARGIN.left + ((i + 0.5) / MINUTES) * inner.width;
      const outside = x < MARGIN.left + 16 || x > MARGIN.left + inner.width - 16;
      if ((time / 60) % every || outside) continue;
      const y = MARGIN.top + inner.height;
      yield shape("line", { class: "line base", x1: x, x2: x, y1: y, y2: y + 4 });
      yield shape("text", { x, y: y + 18, "text-anchor": "middle" }, minute(time));
    }
  }

  *#bars(inner, y) {
    const step = inner.width / MINUTES;
    const gap = step > 8 ? 2 : 1;
    for (const [i, bucket] of this.#buckets.entries()) {
      let below = 0;
      for (const name of SOURCES) {
        if (!bucket[name]) continue;
        const foot = y(below);
        below += bucket[name];
        // A pixel between the sources tells them apart without their colours.
        const height = Math.max(1, foot - y(below) - (below > bucket[name] ? 1 : 0));
        const x = MARGIN.left + i * step + gap / 2;
        yield shape("rect", { class: name, x, y: y(below), width: step - gap, height });
      }
    }
  }
}

function* lines(inner, top, step, y) {
  for (let tokens = 0; tokens <= top; tokens += step) {
    const at = Math.round(y(tokens)) + 0.5;
    const ends = { x1: MARGIN.left, x2: MARGIN.left + inner.width, y1: at, y2: at };
    yield shape("line", { class: tokens ? "line" : "line base", ...ends });
    yield shape("text", { x: MARGIN.left - 6, y: at + 4, "text-anchor": "end" }, count(tokens));
  }
}
