// The rows of the page's tables and lists. What they hold came from prompts: it is set as text.

import { SOURCES } from "/cache/chart.js";
import { element, setText, setTitle, setValue } from "/cache/dom.js";
import * as format from "/cache/format.js";

// What the reasons and statuses mean, where their names don't say it.
const REASONS = {
  absent: "nothing of the prompt was stored",
  ambiguous: "the model was never bound, and several layouts are stored for it",
  identity: "the model's files changed while it was loaded",
  ranks: "this rank had some of the prompt, another one nothing",
  fault: "a fault of the cache; the log has its traceback",
};
const STATUSES = { 499: "the client left before its answer was complete" };

/** A bar of parts, each `[class, share of the bar from 0 to 1]`. */
export function fill(bar, parts) {
  parts.forEach(([name, part], i) => {
    const piece = bar.children[i] ?? bar.appendChild(element("i"));
    if (piece.className !== name) piece.className = name;
    piece.hidden = !(part > 0);
    piece.style.width = `${Math.min(1, Math.max(0, part)) * 100}%`;
  });
}

/** A table row of cells, which are named after their columns. */
function row(columns) {
  const cells = {};
  const node = element("tr", { role: "row" });
  for (const [name, label, kind] of columns) {
    const attributes = { role: "cell", class: kind ?? "", "data-label": label };
    cells[name] = node.appendChild(element("td", attributes));
  }
  return { node, cells };
}

/** Rows of the top prefixes; `toggle(prefix, button)` is called to pin or unpin one. */
export function prefixRow(toggle) {
  const { node, cells } = row([
    ["prefix", "Prefix", "lead"],
    ["model", "Model", "model"],
    ["tokens", "Tokens", "number"],
    ["bytes", "Size", "number"],
    ["uses", "Uses", "number"],
    ["used", "Last use", "number"],
    ["expires", "Expires", "number"],
    ["pinned", "Pinned", "action"],
  ]);
  const text = element("bdi", { class: "text", dir: "auto" });
  const id = element("code");
  const state = element("span", { class: "state" });
  const button = element("button", { type: "button", class: "quiet" });
  cells.prefix.append(text, id);
  cells.pinned.append(state, button);
  let shown = null;
  button.addEventListener("click", () => toggle(shown, button));
  const update = ({ prefix, now }) => {
    shown = prefix;
    // Without a text there still is something to tell apart by: the id.
    const known = prefix.text?.trim() ? prefix.text : null;
    setValue(text, known ?? "text not shown", known);
    text.classList.toggle("unknown", known == null);
    setText(id, prefix.id);
    setValue(cells.model, format.modelName(prefix.model), prefix.model);
    setValue(cells.tokens, format.count(prefix.tokens), format.exact(prefix.tokens));
    setValue(cells.bytes, format.bytes(prefix.bytes), `${format.exact(prefix.bytes)} bytes`);
    setValue(cells.uses, format.count(prefix.uses), format.exact(prefix.uses));
    setValue(cells.used, format.ago(prefix.last_use, now), format.moment(prefix.last_use));
    // A pin holds it whatever its time is.
    const expires = prefix.pinned ? null : prefix.expires;
    setValue(cells.expires, format.ahead(expires, now), format.moment(expires));
    setText(state, prefix.pinned ? "pinned" : "");
    setText(button, prefix.pinned ? "Unpin" : "Pin");
    button.setAttribute("aria-label", `${prefix.pinned ? "Unpin" : "Pin"} prefix ${prefix.id}`);
    node.classList.toggle("pinned", prefix.pinned);
  };
  return { node, update };
}

export function requestRow() {
  const { node, cells } = row([
    ["time", "Time", "time"],
    ["model", "Model", "model"],
    ["status", "Status", "status"],
    ["prompt", "Prompt", "number"],
    ["source", "Source", "source-bar"],
    ["hot", "Hot", "number"],
    ["cold", "Cold", "number"],
    ["remote", "Remote", "number of-remote"],
    ["computed", "Computed", "number"],
    ["reply", "Reply", "number spare"],
    ["promote", "Promote ms", "number"],
    ["prefill", "Prefill ms", "number"],
    ["first", "First ms", "number"],
    ["total", "Total ms", "number"],
  ]);
  const bar = element("span", { class: "bar", role: "img" });
  const status = element("span");
  cells.source.append(bar);
  cells.status.append(status);
  const number = (cell, n) => setValue(cell, format.count(n), format.exact(n));
  const update = ({ request, sources }) => {
    setValue(cells.time, format.clock(request.time), format.moment(request.time));
    setValue(cells.model, format.modelName(request.model), request.model);
    setValue(status, String(request.status), STATUSES[request.status]);
    status.className = request.status >= 400 ? "failed" : "fine";
    number(cells.prompt, request.prompt_tokens);
    const tokens = SOURCES.map((name) => [name, request[`${name}_tokens`]]);
    for (const [name, n] of tokens) number(cells[name], n);
    const all = tokens.reduce((sum, [, n]) => sum + n, 0);
    fill(bar, tokens.map(([name, n]) => [name, all ? n / all : 0]));
    const said = tokens
      .filter(([name]) => sources.includes(name))
      .map(([name, n]) => `${name} ${format.share(n, all)}`)
      .join(", ");
    setTitle(bar, said);
    bar.setAttribute("aria-label", said);
    number(cells.reply, request.generated_tokens);
    for (const [name, field] of [["promote", "promote_ms"], ["prefill", "prefill_ms"],
      ["first", "first_token_ms"], ["total", "total_ms"]]) {
      setText(cells[name], format.milliseconds(request[field]));
    }
  };
  return { node, update };
}

export function reasonItem() {
  const node = element("li");
  const name = node.appendChild(element("code"));
  const meaning = node.appendChild(element("span", { class: "meaning" }));
  const bar = node.appendChild(element("span", { class: "bar", "aria-hidden": "true" }));
  const number = node.appendChild(element("b"));
  const update = ({ reason, n, all }) => {
    setText(name, reason);
    setText(meaning, REASONS[reason] ?? "");
    fill(bar, [["miss", n / all]]);
    setValue(number, format.count(n), format.exact(n));
  };
  return { node, update };
}

export function faultItem() {
  const node = element("li");
  const time = node.appendChild(element("time"));
  const kind = node.appendChild(element("code"));
  const text = node.appendChild(element("bdi", { dir: "auto" }));
  const update = (fault) => {
    setValue(time, format.clock(fault.time), format.moment(fault.time));
    setText(kind, fault.kind);
    setText(text, fault.text);
  };
  return { node, update };
}

export function counterItem() {
  const node = element("div");
  const name = node.appendChild(element("dt"));
  const value = node.appendChild(element("dd"));
  const update = ([label, n]) => {
    setText(name, label);
    setText(value, n);
  };
  return { node, update };
}
