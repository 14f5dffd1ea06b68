// The live page: takes what the router tells over one event stream, and shows it.

import { chart } from "./chart.js";
import { bar, element, emptyRow, keyedRows, mark, write } from "./rows.js";

const SAMPLES_KEPT = 300;
const STALE_AFTER_MS = 3000;
const REFUSED_PAUSE_MS = 5000;
const find = (id) => document.getElementById(id);

// --- how values are written

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function seconds(value) {
  if (value < 0.001) return `${whole.format(value * 1e6)} µs`;
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${whole.format(value * 1e3)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

function since(value) {
  if (value < 60) return `${whole.format(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${whole.format(Math.floor(value % 60))} s`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
}

function bytes(value) {
  const [size, unit] = value >= 1e9 ? [1e9, "GB"] : value >= 1e6 ? [1e6, "MB"] : value >= 1e3 ? [1e3, "kB"] : [1, "B"];
  const scaled = value / size;
  return `${scaled >= 100 || size === 1 ? whole.format(scaled) : scaled.toFixed(scaled >= 10 ? 1 : 2)} ${unit}`;
}

const speed = (value) => `${bytes(value)}/s`;
const rate = (value) => (value >= 10 || value === 0 ? whole.format(value) : value.toFixed(1));
const words = (name) => name.replace(/^node_/, "").replaceAll("_", " ");
const many = (count, one) => `${whole.format(count)} ${one}${count === 1 ? "" : "s"}`;

// --- nodes

const NODE = ["Node", "Condition", "Load", "KV blocks", "Staging", "KV lanes"];
const SLOTS = ["posted", "landed", "scattering", "sending", "quarantined", "free"];

function nodeRow() {
  const [row, [name, condition, load, blocks, slots, lanes]] = emptyRow(NODE);
  const title = element("span");
  const role = element("span", { class: "role" });
  const address = element("span", { class: "small quiet mono" });
  name.append(title, " ", role, address);
  const pill = element("span", { class: "pill" });
  const why = element("span", { class: "small quiet" });
  condition.append(pill, why);
  const running = element("span");
  const queued = element("span", { class: "small quiet" });
  load.append(running, queued);
  const [blockBar, showBlocks] = bar();
  const blockWords = element("span", { class: "small quiet" });
  blocks.append(blockBar, blockWords);
  const [slotBar, showSlots] = bar();
  const slotWords = element("span", { class: "small quiet" });
  slots.append(slotBar, slotWords);

  const show = (node) => {
    mark(row, "data-node", node.node);
    mark(row, "data-condition", node.condition);
    write(title, node.node);
    write(role, node.role);
    mark(role, "class", `role ${node.role}`);
    write(address, node.address);
    write(pill, node.refusal === null ? "ready" : words(node.refusal));
    mark(pill, "data-condition", node.condition);
    const reasons = node.reasons.map(words).join(", ");
    write(why, node.refusal === null ? "" : [reasons, `for ${since(node.since_s)}`].filter(Boolean).join(", "));
    const gone = node.refusal === "node_lost" || node.refusal === "node_gone";
    const requests = node.role === "decode" ? `${many(node.attempts, "request")}: ` : "";
    write(running, gone ? "–" : `${requests}${whole.format(node.running)} running, ${whole.format(node.waiting)} waiting`);
    const details = [];
    if (node.queued_tokens) details.push(`${whole.format(node.queued_tokens)} prompt tokens queued`);
    if (node.prompt_tokens_per_second) details.push(`${whole.format(node.prompt_tokens_per_second)} prompt tokens/s`);
    write(queued, details.join("; "));
    showKvBlocks(node);
    showStaging(node.detail);
    showLanes(lanes, node.detail);
  };

  function showKvBlocks(node) {
    const free = node.detail ? node.detail.blocks_free : node.blocks_free;
    const cached = node.detail ? node.detail.blocks_cached : 0;
    const busy = node.blocks_total - free - cached;
    const text = node.blocks_total ? `${whole.format(busy)} of ${whole.format(node.blocks_total)} in use` : "";
    const rest = cached ? `, ${whole.format(cached)} cached` : "";
    write(blockWords, text + rest);
    blockBar.hidden = !node.blocks_total;
    showBlocks([["in_use", busy], ["cached", cached], ["free", free]], `KV blocks: ${text}${rest}, ${free} free`);
  }

  function showStaging(detail) {
    const states = detail ? detail.slots : {};
    const parts = SLOTS.map((state) => [state, states[state] ?? 0]);
    const total = parts.reduce((sum, [, count]) => sum + count, 0);
    const busy = parts.filter(([state, count]) => count && state !== "free");
    const text = busy.map(([state, count]) => `${count} ${state}`).join(", ") || (total ? "all free" : "none drawn");
    slotBar.hidden = !total;
    write(slotWords, detail ? (total ? `${text} of ${total}` : text) : "");
    showSlots(parts, `Staging slots: ${text}`);
  }

  return { row, show };
}

function showLanes(cell, detail) {
  const shown = [];
  if (detail) {
    if (detail.kv_bytes_per_second !== null && detail.kv_bytes_per_second > 0) {
      shown.push(["lane", `now ${speed(detail.kv_bytes_per_second)}`]);
    }
    for (const lane of detail.lanes) {
      const measured = lane.bytes_per_second ? ` ${speed(lane.bytes_per_second)}` : "";
      shown.push([lane.broken ? "lane broken" : "lane", `${lane.peer}: ${lane.broken ? words(lane.broken) : lane.lane + measured}`]);
    }
  }
  const text = shown.map(([, line]) => line).join("\n");
  if (cell.dataset.text === text) return;
  cell.dataset.text = text;
  cell.replaceChildren(...shown.map(([name, line]) => element("span", { class: `${name} small` }, line)));
}

// --- transfers

const TRANSFER = ["Request", "From, to", "State", "Progress", "Age"];

function transferRow() {
  const [row, [request, way, state, progress, age]] = emptyRow(TRANSFER);
  request.className = "mono";
  const done = element("span", { class: "received" });
  const sent = element("span", { class: "sent" });
  const track = element("div", { class: "progress", role: "progressbar", "aria-valuemin": "0", "aria-valuemax": "100" }, sent, done);
  const figures = element("span", { class: "small quiet" });
  progress.append(track, figures);
  const show = (transfer) => {
    const tries = transfer.attempt > 1 || transfer.try_number > 1 ? ` (attempt ${transfer.attempt}, try ${transfer.try_number})` : "";
    write(request, transfer.request.slice(0, 16) + tries);
    mark(row, "data-transfer", `${transfer.request}/${transfer.attempt}/${transfer.try_number}`);
    write(way, `${transfer.source} → ${transfer.target}`);
    const ends = [["", transfer.received], ["", transfer.sent]].filter(([, end]) => end).map(([, end]) => end.state);
    write(state, [...new Set(ends)].join(" / "));
    const known = transfer.received?.bytes ? transfer.received : transfer.sent;
    const total = known?.bytes ?? 0;
    const share = (end) => (total && end ? (100 * end.bytes_done) / total : 0);
    const received = share(transfer.received);
    done.style.width = `${received}%`;
    sent.style.width = `${share(transfer.sent)}%`;
    mark(track, "aria-valuenow", String(Math.round(received)));
    mark(track, "aria-label", `KV of request ${transfer.request.slice(0, 16)} that has arrived and is verified`);
    const landed = transfer.received ?? { ...transfer.sent, parcels_done: 0, bytes_done: 0 }; // D may not have told yet
    write(figures, total ? `${landed.parcels_done} of ${landed.parcels} parcels, ${bytes(landed.bytes_done)} of ${bytes(total)}` : "not cut yet");
    write(age, since(transfer.age_s));
  };
  return { row, show };
}

// --- failures

const FAILURE = ["When", "What", "Reason", "Where", "Request"];

function failureRow() {
  const [row, [when, what, reason, where, request]] = emptyRow(FAILURE);
  request.className = "mono";
  return {
    row,
    show: (failure) => {
      write(when, `${since(failure.age_s)} ago`);
      write(what, words(failure.what) + (failure.what === "attempt" ? " lost" : " failed"));
      write(reason, words(failure.reason));
      write(where, failure.where + (failure.peer ? ` from ${failure.peer}` : ""));
      write(request, failure.request.slice(0, 16));
    },
  };
}

// --- curves

const charts = [
  chart("Time to first token", [
    { name: "p50", read: (sample) => sample.ttft_p50_s },
    { name: "p95", read: (sample) => sample.ttft_p95_s },
  ], seconds),
  chart("Between tokens", [
    { name: "p50", read: (sample) => sample.itl_p50_s },
    { name: "p95", read: (sample) => sample.itl_p95_s },
  ], seconds),
  chart("Tokens a second", [{ name: "", read: (sample) => sample.tokens_per_second }], rate),
  chart("KV transferred", [{ name: "", read: (sample) => sample.kv_bytes_per_second }], speed),
];
find("charts").append(...charts.map(([figure]) => figure));

let samples = [];

function showSamples() {
  for (const [, show] of charts) show(samples);
  const last = samples.at(-1);
  if (!last) return;
  const or = (value, say) => (value === null ? "–" : say(value));
  write(find("tokens"), rate(last.tokens_per_second));
  write(find("ttft"), or(last.ttft_p50_s, seconds));
  write(find("ttft95"), last.ttft_p95_s === null ? "none in the last 10 s" : `median; p95 ${seconds(last.ttft_p95_s)}`);
  write(find("itl"), or(last.itl_p50_s, seconds));
  write(find("itl95"), last.itl_p95_s === null ? "none in the last 10 s" : `median; p95 ${seconds(last.itl_p95_s)}`);
  write(find("kv"), or(last.kv_bytes_per_second, speed));
}

// --- everything else

const showNodes = keyedRows(find("node-rows"), NODE.length, (node) => node.node, nodeRow);
const showTransfers = keyedRows(
  find("transfer-rows"), TRANSFER.length, (one) => `${one.request}/${one.attempt}/${one.try_number}`, transferRow,
);
const showFailures = keyedRows(
  find("failure-rows"), FAILURE.length, (one) => `${one.what}/${one.request}/${one.where}/${one.reason}/${one.peer}`, failureRow,
);

const conditions = new Map();

/** Says in words, to screen readers, which nodes have changed. */
function announce(nodes) {
  const news = [];
  for (const node of nodes) {
    const now = node.refusal === null ? "ready" : words(node.refusal);
    const before = conditions.get(node.node);
    if (before !== undefined && before !== now) news.push(`${node.node} is ${now}`);
    conditions.set(node.node, now);
  }
  if (news.length) write(find("announcement"), news.join("; "));
}

function showRouter(router, nodes, transfers) {
  write(find("model"), router.model);
  document.title = `${router.model} · Decant`;
  const problems = router.problems.map((problem) => {
    const detail = problem.detail ? ` (${problem.detail})` : "";
    return `${words(problem.reason)} for ${since(problem.since_s)}${detail}`;
  });
  const pill = find("readiness");
  write(pill, problems.length ? "not ready" : "ready");
  mark(pill, "data-condition", problems.length ? "bad" : "good");
  if (router.registry_down_for_s !== null) problems.push(`the registry does not answer, for ${since(router.registry_down_for_s)}`);
  const banner = find("problem");
  banner.hidden = problems.length === 0;
  write(banner, problems.join("; "));
  write(find("uptime"), `up ${since(router.uptime_s)}`);
  write(find("running"), whole.format(router.running));
  write(find("waiting"), `${whole.format(router.waiting)} waiting for a token`);
  write(find("flights"), many(transfers.length, "transfer") + " in flight");
  const usable = nodes.filter((node) => node.refusal === null || node.refusal === "serves_alone");
  write(find("usable"), `${usable.length} of ${nodes.length}`);
  const of = (role) => usable.filter((node) => node.role === role).length;
  write(find("roles"), `${of("prefill")} prefill, ${of("decode")} decode`);
}

// --- the stream

let heardAt = 0;

function connection(condition, text) {
  const pill = find("connection");
  write(pill, text);
  mark(pill, "data-condition", condition);
  document.body.classList.toggle("stale", condition === "bad");
}

const tell = {
  history: (told) => {
    samples = told;
    showSamples();
  },
  sample: (told) => {
    samples = [...samples, told].slice(-SAMPLES_KEPT);
    showSamples();
  },
  snapshot: ({ router, nodes, transfers, failures }) => {
    heardAt = performance.now();
    connection("good", "live");
    showRouter(router, nodes, transfers);
    showNodes(nodes);
    showTransfers(transfers);
    showFailures(failures);
    announce(nodes);
  },
};

function listen() {
  const stream = new EventSource("ui/events");
  for (const [name, show] of Object.entries(tell)) {
    stream.addEventListener(name, (event) => show(JSON.parse(event.data)));
  }
  // A broken connection is opened again by the browser; one that was refused (too many look already) is not.
  stream.addEventListener("error", () => {
    if (stream.readyState === EventSource.CLOSED) setTimeout(listen, REFUSED_PAUSE_MS);
  });
}

listen();
setInterval(() => {
  if (performance.now() - heardAt > STALE_AFTER_MS) connection("bad", "router not reached");
}, 1000);
