// Elements, made and kept up to date. Text goes in as text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** An HTML element with attributes and children (elements or text). */
export const element = (name, attributes = {}, ...children) =>
  build(document.createElement(name), attributes, children);

/** The same of SVG. */
export const shape = (name, attributes = {}, ...children) =>
  build(document.createElementNS(SVG, name), attributes, children);

export const byId = (id) => document.getElementById(id);

/** Set an element's text, if it is another: a selection in it stays as long as it can. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Set a text and what is shown when pointed at: the exact value. */
export function setValue(node, text, title) {
  setText(node, text);
  setTitle(node, title);
}

export function setTitle(node, title) {
  if (title) {
    if (node.title !== title) node.title = title;
  } else {
    node.removeAttribute("title");
  }
}

const shown = new WeakMap();

/**
 * Make `parent` show `items`, in order. Elements of items that stay are kept, with their focus.
 *
 * `make()` returns an element as `node`, and `update(item)`, which is called each time.
 */
export function sync(parent, items, key, make) {
  const focused = document.activeElement;
  const old = shown.get(parent) ?? new Map();
  const rows = new Map(items.map((item) => [key(item), old.get(key(item)) ?? make()]));
  for (const [id, row] of old) if (!rows.has(id)) row.node.remove();
  let place = parent.firstChild;
  for (const row of rows.values()) {
    if (row.node === place) place = place.nextSibling;
    else parent.insertBefore(row.node, place);
  }
  for (const item of items) rows.get(key(item)).update(item);
  shown.set(parent, rows);
  // A row that was moved lost it.
  if (focused?.isConnected && focused !== document.activeElement) focused.focus();
}
