// Rows of a table that is told everything anew twice a second: each keeps its element, so that focus, selection and screen
// readers are not disturbed by what has not changed.

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Writes only what differs. */
export function write(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

export function mark(target, name, value) {
  if (target.getAttribute(name) !== value) target.setAttribute(name, value);
}

/** Keeps one row for each item. `make()` returns {row, show(item)}; `key(item)` names an item. */
export function keyedRows(body, columns, key, make) {
  const kept = new Map();
  const nothing = element("tr", { role: "row" }, element("td", { role: "cell", class: "nothing", colspan: columns }));
  nothing.firstChild.textContent = body.dataset.empty;
  body.append(nothing);
  return (items) => {
    const present = new Set();
    let previous = null;
    for (const item of items) {
      const name = key(item);
      if (present.has(name)) continue;
      present.add(name);
      if (!kept.has(name)) kept.set(name, make(item));
      const { row, show } = kept.get(name);
      show(item);
      const place = previous === null ? body.firstChild : previous.nextSibling;
      if (place !== row) body.insertBefore(row, place);
      previous = row;
    }
    for (const [name, { row }] of kept) {
      if (!present.has(name)) {
        row.remove();
        kept.delete(name);
      }
    }
    nothing.hidden = present.size > 0;
    if (!nothing.hidden && !nothing.isConnected) body.append(nothing);
  };
}

/** A row with a header cell and one cell for each label, each empty. */
export function emptyRow(labels) {
  const row = element("tr", { role: "row" });
  const cells = labels.map((label, index) =>
    index === 0
      ? element("th", { scope: "row", role: "rowheader" })
      : element("td", { role: "cell", "data-label": label }, element("div")),
  );
  row.append(...cells);
  return [row, cells.map((cell) => cell.querySelector("div") ?? cell)];
}

/** A bar of parts side by side. `parts`: [class, amount]; `words` says it to those who do not see it. */
export function bar() {
  const drawn = element("div", { class: "bar", role: "img" });
  const spans = new Map();
  return [
    drawn,
    (parts, words) => {
      const whole = parts.reduce((sum, [, amount]) => sum + amount, 0) || 1;
      for (const [name, amount] of parts) {
        if (!spans.has(name)) {
          spans.set(name, element("span", { class: name }));
          drawn.append(spans.get(name));
        }
        spans.get(name).style.width = `${(100 * amount) / whole}%`;
      }
      mark(drawn, "aria-label", words);
    },
  ];
}
