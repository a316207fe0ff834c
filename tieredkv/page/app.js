// Asks the server how its cache does, every two seconds while somebody looks.

import { byId, setText } from "/cache/dom.js";
import * as format from "/cache/format.js";
import { View } from "/cache/view.js";

const EVERY = 2000;
// A server that computes a long prompt may take its time, one that is gone answers at once.
const PATIENCE = 10000;

const THEMES = ["system", "light", "dark"];
const THEME_KEY = "tieredkv-theme";

const seconds = () => Date.now() / 1000;

/** What a server that refused gave as the reason. */
async function refusal(response) {
  const said = await response.text();
  try {
    const { error } = JSON.parse(said);
    return error?.message ?? error ?? said;
  } catch {
    return said || `status ${response.status}`;
  }
}

class Refused extends Error {}

/** The JSON that the server answers with; throws `Refused` with its reason, or that it is gone. */
async function ask(path, options = {}) {
  const response = await fetch(path, {
    cache: "no-store", signal: AbortSignal.timeout(PATIENCE), ...options,
  });
  if (!response.ok) throw new Refused(`${await refusal(response)}`);
  return response.json();
}

/** Says whether the server answers, and since when it doesn't. */
class Link {
  #answered = null;
  #lost = null;

  found() {
    if (this.#lost != null) setText(byId("announce"), "The server answers again.");
    this.#answered = seconds();
    this.#lost = null;
    this.#state("live", "live", format.clock(this.#answered));
    byId("lost").hidden = true;
    document.title = "tieredkv cache";
  }

  missed(failure) {
    const what = failure instanceof Refused
      ? `The server answers with an error: ${failure.message}.`
      : "The server can't be reached.";
    if (this.#lost == null) {
      this.#lost = seconds();
      setText(byId("announce"), what);
    }
    const since = `Since ${format.clock(this.#lost)} (${format.about(seconds() - this.#lost)})`;
    const values = this.#answered ? `; the values are of ${format.clock(this.#answered)}` : "";
    setText(byId("lost-what"), what);
    setText(byId("lost-since"), `${since}${values}. Still trying.`);
    byId("lost").hidden = false;
    this.#state("lost", "no answer", "");
    document.title = "no answer: tieredkv cache";
  }

  #state(state, text, time) {
    byId("link").dataset.state = state;
    setText(byId("link-text"), text);
    setText(byId("link-time"), time);
  }
}

class Poll {
  #timer = null;
  #isAsking = false;
  #link = new Link();
  #show;

  /** `show(stats)` is called with each answer. */
  constructor(show) {
    this.#show = show;
    document.addEventListener("visibilitychange", () => this.#look());
    this.#look();
  }

  /** Ask now, and from now on again and again. */
  async now() {
    clearTimeout(this.#timer);
    if (this.#isAsking) return;
    this.#isAsking = true;
    try {
      const stats = await this.#stats();
      if (stats) this.#show(stats);
    } finally {
      this.#isAsking = false;
      if (!document.hidden) this.#timer = setTimeout(() => this.now(), EVERY);
    }
  }

  async #stats() {
    try {
      const stats = await ask("/v1/cache/stats");
      this.#link.found();
      return stats;
    } catch (failure) {
      this.#link.missed(failure);
      return null;
    }
  }

  #look() {
    if (document.hidden) clearTimeout(this.#timer);
    else this.now();
  }
}

/** Pin a prefix, or let go of it, and say what came of it. */
async function toggle(prefix, button) {
  const [verb, done] = prefix.pinned ? ["unpin", "Unpinned"] : ["pin", "Pinned"];
  const result = byId("pin-result");
  button.disabled = true;
  setText(result, "");
  try {
    const { tokens, bytes } = await ask(`/v1/cache/${verb}`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ id: prefix.id }),
    });
    result.className = "result";
    const size = `${format.plural(tokens, "token")}, ${format.bytes(bytes)}`;
    setText(result, `${done} ${prefix.id}: ${size}.`);
  } catch (failure) {
    const why = failure instanceof Refused ? failure.message : "the server can't be reached";
    result.className = "result failed";
    setText(result, `Could not ${verb} ${prefix.id}: ${why}`);
  }
  button.disabled = false;
  // Disabled, it had lost it.
  if (document.activeElement === document.body) button.focus();
  poll.now();
}

function themed(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  setText(byId("theme").lastChild, theme);
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "system") + 1)
    % THEMES.length];
  themed(theme);
  try {
    localStorage.setItem(THEME_KEY, theme);
  } catch {
    // Storage is forbidden: the choice holds for this visit.
  }
}

themed(document.documentElement.dataset.theme ?? "system");
byId("theme").addEventListener("click", nextTheme);
const view = new View(toggle);
const poll = new Poll((stats) => view.show(stats));
