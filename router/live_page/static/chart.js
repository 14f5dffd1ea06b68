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
  const reading = element("span", { class: "reading" });
  const keys = lines.length > 1 ? lines.map(({ name }, index) => element("span", { class: index ? "key second" : "key" }, name)) : [];
  const svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title });
  for (const height of [0, HEIGHT / 2, HEIGHT]) {
    svg.append(drawn("line", { class: "grid", x1: 0, x2: WIDTH, y1: height, y2: height }));
  }
  const area = drawn("path", { class: "area" });
  const paths = lines.map((_, index) => drawn("path", { class: index ? "line second" : "line first" }));
  svg.append(area, ...paths.reverse());
  paths.reverse();
  const top = element("span", { class: "key-top quiet small" });
  const figure = element(
    "figure",
    { class: "chart" },
    element("figcaption", {}, element("span", {}, title), ...keys, reading),
    svg,
    top,
  );

  const show = (samples) => {
    const recent = samples.slice(-POINTS);
    const values = lines.map(({ read }) => recent.map(read));
    const limit = ceiling(Math.max(0, ...values.flat().filter((value) => value !== null)));
    values.forEach((line, index) => paths[index].setAttribute("d", pathOf(line, limit)));
    area.setAttribute("d", lines.length === 1 ? areaOf(values[0], limit) : "");
    const last = values.map((line) => line.at(-1) ?? null);
    const words = last.map((value, index) => (value === null ? null : `${lines[index].name} ${say(value)}`)).filter(Boolean);
    write(reading, words.length ? words.join(", ") : "nothing yet");
    write(top, `scale: 0 to ${say(limit)}`);
    mark(svg, "aria-label", `${title}: ${words.length ? `now ${words.join(", ")}` : "nothing yet"}`);
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
