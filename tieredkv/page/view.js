// Shows one answer of /v1/cache/stats.

import { Chart, SOURCES, tokensOf } from "/cache/chart.js";
import { byId, element, setText, setValue, sync } from "/cache/dom.js";
import * as format from "/cache/format.js";
import { counterItem, faultItem, fill, prefixRow, reasonItem, requestRow } from "/cache/tables.js";

const FEW = 10;

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

/** One tier: its name and size, a bar against its cap, and what there is to say of it. */
class Gauge {
  constructor(host, name, what) {
    this.size = element("span", { class: "size" });
    this.bar = element("span", { class: "bar", role: "meter", "aria-label": `${name}, ${what}` });
    this.bar.setAttribute("aria-valuemin", "0");
    this.notes = element("p", { class: "notes" });
    const title = element("h3", {}, name, " ", element("small", {}, what));
    host.append(element("div", { class: "line" }, title, this.size), this.bar, this.notes);
  }

  /** `parts` are `[class, bytes]` from the left; `notes` texts or elements. */
  show(n, cap, parts, notes) {
    const text = cap ? `${format.bytes(n)} of ${format.bytes(cap)}` : "none";
    setValue(this.size, text, cap && `${format.exact(n)} of ${format.exact(cap)} bytes`);
    this.bar.hidden = !cap;
    this.bar.setAttribute("aria-valuemax", String(cap));
    this.bar.setAttribute("aria-valuenow", String(Math.min(n, cap)));
    this.bar.setAttribute("aria-valuetext", text);
    fill(this.bar, parts.map(([name, size]) => [name, size / cap]));
    // What somebody has selected, such as the path, stays selected.
    const said = notes.map((note) => note.textContent ?? note).join("\n");
    if (said !== this.said) this.notes.replaceChildren(...notes);
    this.said = said;
  }
}

/** A part that scrolls sideways can be scrolled with the keyboard, and has a name then. */
function reachable(scroller, title) {
  const attributes = { tabindex: "0", role: "region", "aria-labelledby": title };
  new ResizeObserver(() => {
    const scrolls = scroller.scrollWidth > scroller.clientWidth;
    for (const [name, value] of Object.entries(attributes)) {
      if (scrolls) scroller.setAttribute(name, value);
      else scroller.removeAttribute(name);
    }
  }).observe(scroller);
}

/** Counters by name; those of a group, such as a reason, are named after it. */
const flat = (counters) => Object.entries(counters).flatMap(([name, value]) =>
  value !== null && typeof value === "object"
    ? flat(value).map(([label, n]) => [`${name}: ${label}`, n])
    : value === null ? [] : [[name, value]]);

function coldNotes({ blocks, directory, pinned_bytes: pinned }) {
  if (directory == null) return ["Prompts are kept in memory only."];
  const size = element("b", { title: `${format.exact(pinned)} bytes` }, format.bytes(pinned));
  return [
    format.plural(blocks, "block"),
    element("span", { class: "source pinned" }, "pinned ", size),
    element("span", { class: "path" }, directory),
  ];
}

export class View {
  #hot = new Gauge(byId("hot"), "Hot", "in memory");
  #cold = new Gauge(byId("cold"), "Cold", "on disk");
  #queue = new Gauge(byId("queue"), "Queue", "not yet on disk");
  #chart = new Chart(byId("chart"), (...picked) => this.#read(...picked));
  #toggle;
  #last = null;
  #sources = SOURCES;
  #showsAll = false;

  /** `toggle(prefix, button)` pins or unpins a prefix. */
  constructor(toggle) {
    this.#toggle = toggle;
    for (const id of ["prefixes", "requests"]) reachable(byId(`${id}-rows`), `${id}-title`);
    byId("more").addEventListener("click", () => {
      this.#showsAll = !this.#showsAll;
      this.#requests(this.#last);
    });
  }

  show(stats) {
    this.#last = stats;
    this.#source(stats);
    this.#about(stats);
    this.#start(stats);
    this.#figures(stats);
    this.#tiers(stats);
    this.#chart.show(stats.history, stats.time);
    this.#prefixes(stats);
    this.#requests(stats);
    this.#misses(stats);
    this.#list("faults", stats.faults, (f) => `${f.time} ${f.kind} ${f.text}`, faultItem);
    this.#counters(stats);
  }

  /** Nothing is said of a remote tier where there is none. */
  #source({ counters }) {
    const isShared = counters.remote != null;
    this.#sources = SOURCES.filter((name) => isShared || name !== "remote");
    document.documentElement.classList.toggle("shared", isShared);
    byId("tokens-head").colSpan = this.#sources.length + 3;
  }

  #about({ version, models, started, time }) {
    const names = models.map(format.modelName).join(", ");
    const parts = [`version ${version}`, names, `up ${format.duration(time - started)}`];
    setValue(byId("about"), parts.filter(Boolean).join(" · "),
      [...models, `started ${format.moment(started)}`].join("\n"));
  }

  #start({ requests, hits, misses, cold, models }) {
    const isNew = !requests.length && !hits && !sum(Object.values(misses));
    byId("start").hidden = !isNew;
    if (!isNew) return;
    const stored = cold.blocks
      ? ` ${format.plural(cold.blocks, "block")} of earlier prompts are on disk and ready.`
      : "";
    setText(byId("start-text"),
      "Send the server a prompt, and then the same again with more after it: " +
      `the second is answered from the cache.${stored}`);
    const body = JSON.stringify({
      model: models[0] ?? "default_model",
      messages: [{ role: "user", content: "Hello" }],
    });
    setText(byId("start-command"),
      `curl ${location.origin}/v1/chat/completions \\\n` +
      "  -H 'Content-Type: application/json' \\\n" +
      `  -d '${body.replaceAll("'", "'\\''")}'`);
  }

  #figures({ prompt_tokens: tokens, saved_seconds: saved, hits, misses }) {
    const cached = tokens.hot + tokens.cold + tokens.remote;
    const parts = this.#sources.filter((name) => name !== "computed");
    const each = (written) => parts.map((name) => `${name} ${written(tokens[name])}`).join(", ");
    const all = cached + tokens.computed;
    const asked = hits + sum(Object.values(misses));
    setText(byId("rate"), format.share(cached, all));
    setValue(byId("rate-note"), `of ${format.count(all)} prompt tokens`,
      `${format.exact(cached)} of ${format.exact(all)}`);
    setValue(byId("avoided"), format.count(cached), format.exact(cached));
    setValue(byId("avoided-note"), each(format.count), each(format.exact));
    setValue(byId("saved"), format.duration(saved), `${format.exact(saved)} seconds`);
    setValue(byId("hits"), format.count(hits), format.exact(hits));
    const part = asked ? `, ${format.share(hits, asked)}` : "";
    setValue(byId("hits-note"), `of ${format.count(asked)}${part}`, format.exact(asked));
  }

  #tiers({ hot, cold, queue, entries }) {
    this.#hot.show(hot.bytes, hot.cap_bytes, [["hot", hot.bytes]],
      [`${format.plural(hot.blocks, "block")} in ${format.plural(entries, "prompt")}`]);
    this.#cold.show(cold.bytes, cold.cap_bytes,
      [["pinned", cold.pinned_bytes], ["cold", cold.bytes - cold.pinned_bytes]],
      coldNotes(cold));
    this.#queue.show(queue.bytes, hot.cap_bytes, [["queue", queue.bytes]],
      [`${format.plural(queue.blocks, "block")}, held in the hot tier`]);
  }

  /** Say what the chart shows of a bucket, or of the whole hour. */
  #read(bucket, all, isNow) {
    const shown = bucket ?? { requests: sum(all.map((b) => b.requests)) };
    if (!bucket) for (const name of SOURCES) shown[name] = sum(all.map((b) => b[name]));
    const when = bucket ? `${format.minute(bucket.time)}${isNow ? ", so far" : ""}` : "last hour";
    const cached = format.share(tokensOf(shown) - shown.computed, tokensOf(shown));
    const rest = shown.requests
      ? `${format.plural(shown.requests, "request")}, ${cached} from the cache`
      : "no request";
    setText(byId("reading-when"), when);
    for (const name of SOURCES) {
      setValue(byId(`reading-${name}`), format.count(shown[name]), format.exact(shown[name]));
    }
    setText(byId("reading-rest"), rest);
    const said = this.#sources.map((name) => `${name} ${format.exact(shown[name])}`).join(", ");
    return `${when}: ${said}; ${rest}`;
  }

  #prefixes({ prefixes, time }) {
    const items = prefixes.map((prefix) => ({ prefix, now: time }));
    this.#rows("prefixes", items, (item) => item.prefix.id, () => prefixRow(this.#toggle));
  }

  #requests({ requests }) {
    const shown = this.#showsAll ? requests : requests.slice(0, FEW);
    const items = shown.map((request) => ({ request, sources: this.#sources }));
    this.#rows("requests", items, ({ request: r }) => `${r.time} ${r.id}`, requestRow);
    byId("more").hidden = requests.length <= FEW;
    setText(byId("more"), this.#showsAll ? `Show the last ${FEW}` : `Show all ${requests.length}`);
  }

  #misses({ misses }) {
    const all = sum(Object.values(misses));
    const items = Object.entries(misses).map(([reason, n]) => ({ reason, n, all }));
    items.sort((a, b) => b.n - a.n);
    this.#list("misses", items, (item) => item.reason, reasonItem);
  }

  #counters({ counters }) {
    const items = flat(counters).map(([name, n]) => [name.replaceAll("_", " "), format.exact(n)]);
    sync(byId("counters"), items, ([name]) => name, counterItem);
  }

  #rows(id, items, key, make) {
    byId(`${id}-rows`).hidden = !items.length;
    byId(`${id}-empty`).hidden = items.length > 0;
    sync(byId(id).tBodies[0], items, key, make);
  }

  #list(id, items, key, make) {
    byId(id).hidden = !items.length;
    byId(`${id}-empty`).hidden = items.length > 0;
    sync(byId(id), items, key, make);
  }
}
