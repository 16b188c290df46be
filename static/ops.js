/**
 * The operator's page: rows, callers, and the time of a step against its budget, read from `metrics` and the list of
 * calls.
 */

import { asClock, canvas, element, find, input } from "./dom.js";
import { Exposition, quantileBetween } from "./exposition.js";
import { POINTS, Plot } from "./plot.js";

/** The engine tells its statistics once a second: asked more rarely, there is always something new. */
const EVERY_MS = 2_000;
const BUDGET_MS = 80;
const KEY = "operator-key";

/** Counters that are shown, and what they count. @type {Record<string, string>} */
const COUNTERS = {
  webrtc_duplex_leases_total: "Calls taken",
  webrtc_duplex_refusals_total: "Requests refused",
  webrtc_duplex_skipped_ticks_total: "Ticks skipped",
  webrtc_duplex_missing_frames_total: "Frames missing at the tick",
  webrtc_duplex_playout_underruns_total: "Underruns",
  webrtc_duplex_row_faults_total: "Faulty rows",
};

/** @typedef {{ id: string, state: string, voice: string | null, age_s: number, stats: Record<string, number> }} Caller */

/** Two quantiles of one histogram, look by look. */
class Watch {
  /** @type {import("./exposition.js").Buckets | null} */
  #before = null;
  /** @type {(number | null)[]} */
  median = [];
  /** @type {(number | null)[]} */
  worst = [];

  /** @param {string} name of a histogram in seconds */
  constructor(name) {
    this.name = name;
  }

  /** @param {Exposition} exposition */
  read(exposition) {
    const now = exposition.buckets(this.name);
    if (this.#before) {
      this.#push(this.median, quantileBetween(this.#before, now, 0.5));
      this.#push(this.worst, quantileBetween(this.#before, now, 0.99));
    }
    this.#before = now;
  }

  /** @param {(number | null)[]} values @param {number | null} seconds */
  #push(values, seconds) {
    values.push(seconds === null ? null : seconds * 1000);
    if (values.length > POINTS) values.shift();
  }
}

const step = new Watch("webrtc_duplex_step_seconds");
const late = new Watch("webrtc_duplex_step_late_seconds");
const stepPlot = new Plot(canvas("step-plot"), { least: BUDGET_MS, limit: BUDGET_MS });
const latePlot = new Plot(canvas("late-plot"), { least: 10 });

async function look() {
  const answers = await Promise.all([ask("metrics"), ask("v1/realtime/calls")]);
  const refused = answers.find((answer) => [401, 403].includes(answer.status));
  if (refused) return askForKey(refused.status);
  const exposition = new Exposition(await answers[0].text());
  const callers = answers[1].ok ? (await answers[1].json()).data : [];
  show(exposition, callers);
}

/** @param {string} path */
function ask(path) {
  const key = sessionStorage.getItem(KEY);
  return fetch(path, { headers: key ? { Authorization: `Bearer ${key}` } : {} });
}

/** @param {number} status */
function askForKey(status) {
  const tried = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  find("board").hidden = true;
  find("key-form").hidden = false;
  showState("refused", "Locked");
  if (tried)
    find("key-fault").textContent = status === 401 ? "The server does not know this key." : "This key may not.";
}

/** @param {Exposition} exposition @param {Caller[]} callers */
function show(exposition, callers) {
  find("key-form").hidden = true;
  find("board").hidden = false;
  const ready = exposition.sum("webrtc_duplex_engine_ready") === 1;
  showState(ready ? "live" : "failed", ready ? "Serving" : "No engine");
  showRows(exposition);
  showCounts(exposition);
  showCallers(callers);
  for (const [watch, plot, figure] of /** @type {const} */ ([
    [step, stepPlot, "step-now"],
    [late, latePlot, "late-now"],
  ])) {
    watch.read(exposition);
    plot.draw([
      { ink: "--agent", values: watch.worst },
      { ink: "--you", values: watch.median },
    ]);
    find(figure).textContent = watch.median.at(-1)?.toFixed(1) ?? "–";
  }
}

/** @param {string} phase @param {string} text */
function showState(phase, text) {
  document.body.dataset.phase = phase;
  if (find("state").textContent !== text) find("state").textContent = text;
}

/** @param {Exposition} exposition */
function showRows(exposition) {
  const rows = exposition.sum("webrtc_duplex_rows") ?? 0;
  const used = rows - (exposition.sum("webrtc_duplex_rows_free") ?? rows);
  find("rows-used").textContent = String(used);
  find("rows-all").textContent = String(rows);
  find("seats").ariaLabel = `${used} of ${rows} rows in use`;
  find("seats").replaceChildren(
    ...Array.from({ length: rows }, (_, i) => {
      const seat = document.createElement("i");
      seat.className = i < used ? "taken" : "";
      return seat;
    }),
  );
  const closed = exposition.sum("webrtc_duplex_admitting") === 0;
  find("admitting").textContent = closed
    ? "Admission is closed: steps have been late for a while."
    : "New calls are let in.";
}

/** @param {Exposition} exposition */
function showCounts(exposition) {
  find("counts").replaceChildren(
    ...Object.entries(COUNTERS).map(([name, title]) => {
      const pair = document.createElement("div");
      pair.append(element("dt", title), element("dd", format(exposition.sum(name) ?? 0, 0)));
      return pair;
    }),
  );
}

/** @param {Caller[]} callers */
function showCallers(callers) {
  find("callers-count").textContent = callers.length ? String(callers.length) : "none";
  find("callers").replaceChildren(
    ...callers.map(({ id, state, voice, age_s: ageS, stats }) => {
      const row = document.createElement("tr");
      const heading = element("th", id.slice(-8));
      heading.title = id;
      heading.setAttribute("scope", "row");
      const cells = [
        state,
        voice ?? "–",
        asClock(ageS),
        format(stats.rtt_ms, 1, "ms"),
        format(stats.jb_ms, 1, "ms"),
        format(stats.loss_in, 0),
        format(stats.concealed_ms, 0, "ms"),
      ];
      row.append(heading, ...cells.map((text) => element("td", text)));
      return row;
    }),
  );
}

/** @param {number | null | undefined} value @param {number} digits @param {string} [unit] */
function format(value, digits, unit = "") {
  return value == null ? "–" : `${value.toLocaleString("en", { maximumFractionDigits: digits })} ${unit}`.trim();
}

async function keepLooking() {
  await look().catch(() => showState("failed", "The server does not answer"));
  if (find("key-form").hidden) setTimeout(keepLooking, EVERY_MS);
}

find("key-form").onsubmit = (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, input("key").value);
  find("key-fault").textContent = "";
  find("key-form").hidden = true;
  keepLooking();
};
keepLooking();
