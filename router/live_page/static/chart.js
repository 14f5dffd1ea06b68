// A line chart of the last samples: one or two lines over time, gaps where nothing happened.

import { element, mark, write } from "./rows.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 120;
const POINTS = 300;

function drawn(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** The least of 1, 2, 5 times a power of ten that is not below the largest value. */
function ceiling(largest) {
  if (!(largest > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(largest));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= largest * 0.999);
}

/** `lines`: [{name, read(sample)}], at most two; `say(value)` writes a value with its unit. */
export function chart(title, lines, say) {
  const keys = lines.map((_, index) => element("span", { class: index ? "key second" : "key" }));
  const svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title });
  for (const height of [0, HEIGHT / 2, HEIGHT]) {
    svg.append(drawn("line", { class: "grid", x1: 0, x2: WIDTH, y1: height, y2: height }));
  }
  const area = drawn("path", { class: "area" });
  const paths = lines.map((_, index) => drawn("path", { class: index ? "line second" : "line first" }));
  svg.append(area, ...paths);
  const top = element("span", { class: "limit" });
  const figure = element(
    "figure",
    { class: "chart" },
    element("figcaption", {}, element("span", {}, title), ...keys),
    element("div", { class: "plot" }, svg, top),
    element("div", { class: "times", "aria-hidden": "true" }, element("span", {}, "5 min ago"), element("span", {}, "now")),
  );

  const show = (samples) => {
    const recent = samples.slice(-POINTS);
    const values = lines.map(({ read }) => recent.map(read));
    const limit = ceiling(Math.max(0, ...values.flat().filter((value) => value !== null)));
    const words = values.map((line, index) => {
      const last = line.at(-1) ?? null;
      return `${lines[index].name} ${last === null ? "–" : say(last)}`.trim();
    });
    values.forEach((line, index) => {
      paths[index].setAttribute("d", pathOf(line, limit));
      write(keys[index], words[index]);
    });
    area.setAttribute("d", lines.length === 1 ? areaOf(values[0], limit) : "");
    write(top, say(limit));
    mark(svg, "aria-label", `${title} in the last five minutes, from 0 to ${say(limit)}; now ${words.join(", ")}`);
  };
  return [figure, show];
}

function at(index, count, value, limit) {
  const x = WIDTH - ((count - 1 - index) * WIDTH) / (POINTS - 1);
  return `${x.toFixed(1)} ${(HEIGHT - (HEIGHT * value) / limit).toFixed(1)}`;
}

function pathOf(line, limit) {
  let open = false;
  return line
    .map((value, index) => {
      if (value === null) {
        open = false;
        return "";
      }
      const command = `${open ? "L" : "M"}${at(index, line.length, value, limit)}${open ? "" : "h0.01"}`;
      open = true;
      return command;
    })
    .join("");
}

function areaOf(line, limit) {
  const runs = [];
  line.forEach((value, index) => {
    if (value === null) return;
    if (index === 0 || line[index - 1] === null) runs.push([]);
    runs.at(-1).push(index);
  });
  return runs
    .map((run) => {
      const points = run.map((index) => at(index, line.length, line[index], limit)).join("L");
      return `M${at(run[0], line.length, 0, limit)}L${points}L${at(run.at(-1), line.length, 0, limit)}Z`;
    })
    .join("");
}
