/**
 * Who spoke when: the history of both voices, what it adds up to, and its picture. The caller's voice grows upwards
 * from the middle line, the agent's downwards; where both speak, the ground is tinted.
 */

import { VoiceActivity, asHeight } from "./sound.js";

/**
 * @typedef {object} Moment
 * @property {number} atMs since the call began
 * @property {number} you height of the caller's voice, 0..1
 * @property {number} agent
 * @property {boolean} youSpeak
 * @property {boolean} agentSpeaks
 * @property {boolean} cut the agent gave way here
 */

/**
 * @typedef {object} Talk
 * @property {number} youMs
 * @property {number} agentMs
 * @property {number} bothMs
 * @property {number} interruptions times the agent fell silent because the caller spoke
 * @property {number | null} answerMs median time from the end of the caller's speech to the agent's first sound
 */

export const MOMENT_MS = 50;
const WINDOW_MS = 30_000;
const BAR_PX = 3;
/** Later than this it is no answer, but a new start. */
const LONGEST_ANSWER_MS = 6_000;
/** The agent has been interrupted if it falls silent within this time. */
const YIELD_MS = 1_500;

/** Levels go in every MOMENT_MS; moments for the picture and sums for the whole call come out. */
export class History {
  /** The last WINDOW_MS, oldest first. @type {Moment[]} */
  moments = [];
  /** @type {Talk} */
  talk = { youMs: 0, agentMs: 0, bothMs: 0, interruptions: 0, answerMs: null };

  #you = new VoiceActivity();
  #agent = new VoiceActivity();
  #overlapBeganMs = -Infinity;
  /** The end of the speech that was answered last. */
  #answeredMs = -Infinity;
  /** @type {number[]} */
  #answersMs = [];

  /**
   * @param {number} youDb
   * @param {number} agentDb
   * @param {number} atMs
   */
  add(youDb, agentDb, atMs) {
    const before = { you: this.#you.speaking, agent: this.#agent.speaking };
    const now = { you: this.#you.hear(youDb, atMs), agent: this.#agent.hear(agentDb, atMs) };
    this.#sum(now, atMs - (this.moments.at(-1)?.atMs ?? atMs));
    if (!before.agent && now.agent && !now.you) this.#answered(atMs);
    if (now.you && now.agent && !before.you) this.#overlapBeganMs = atMs;
    const cut = before.agent && !now.agent && now.you && atMs - this.#overlapBeganMs < YIELD_MS;
    if (cut) this.talk.interruptions += 1;
    this.#remember({
      atMs,
      you: asHeight(youDb),
      agent: asHeight(agentDb),
      youSpeak: now.you,
      agentSpeaks: now.agent,
      cut,
    });
  }

  /** @param {{ you: boolean, agent: boolean }} now @param {number} passedMs */
  #sum(now, passedMs) {
    if (now.you) this.talk.youMs += passedMs;
    if (now.agent) this.talk.agentMs += passedMs;
    if (now.you && now.agent) this.talk.bothMs += passedMs;
  }

  /** @param {number} atMs */
  #answered(atMs) {
    const waitedMs = atMs - this.#you.lastHeardMs;
    if (waitedMs > LONGEST_ANSWER_MS || this.#you.lastHeardMs === this.#answeredMs) return;
    this.#answeredMs = this.#you.lastHeardMs;
    this.#answersMs.push(waitedMs);
    this.talk.answerMs = median(this.#answersMs);
  }

  /** @param {Moment} moment */
  #remember(moment) {
    this.moments.push(moment);
    while (this.moments[0].atMs < moment.atMs - WINDOW_MS) this.moments.shift();
  }
}

/** @param {number[]} values at least one */
function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}

/**
 * Moments drawn together until they are wide enough to see. Bars begin at whole multiples of their length, so that they
 * keep their shape while they move.
 * @param {Moment[]} moments
 * @param {number} barMs
 * @returns {Moment[]}
 */
function inBars(moments, barMs) {
  /** @type {Map<number, Moment>} */
  const bars = new Map();
  for (const moment of moments) {
    const atMs = Math.floor(moment.atMs / barMs) * barMs;
    const bar = bars.get(atMs) ?? { ...moment, atMs };
    bars.set(atMs, {
      atMs,
      you: Math.max(bar.you, moment.you),
      agent: Math.max(bar.agent, moment.agent),
      youSpeak: bar.youSpeak || moment.youSpeak,
      agentSpeaks: bar.agentSpeaks || moment.agentSpeaks,
      cut: bar.cut || moment.cut,
    });
  }
  return [...bars.values()];
}

/** Draws a History on a canvas, now at the right. */
export class TimelineView {
  #canvas;
  #pen;
  /** @type {Record<string, string>} */
  #ink = {};
  /** What was drawn last, to be drawn again in another size. @type {[Moment[], number]} */
  #shown = [[], 0];

  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.#canvas = canvas;
    this.#pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    new ResizeObserver(() => this.#fit()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#fit());
    this.#fit();
  }

  /**
   * @param {Moment[]} moments
   * @param {number} nowMs
   */
  draw(moments, nowMs) {
    this.#shown = [moments, nowMs];
    const { width, height } = this.#canvas.getBoundingClientRect();
    this.#pen.clearRect(0, 0, width, height);
    const x = (/** @type {number} */ atMs) => width - ((nowMs - atMs) / WINDOW_MS) * width;
    const barMs = Math.ceil((BAR_PX * WINDOW_MS) / width / MOMENT_MS) * MOMENT_MS;
    const barPx = (barMs / WINDOW_MS) * width;
    this.#drawSeconds(nowMs, x, height);
    for (const bar of inBars(moments, barMs)) this.#drawBar(bar, x(bar.atMs), barPx, height);
  }

  /** @param {Moment} bar @param {number} left @param {number} step @param {number} height */
  #drawBar(bar, left, step, height) {
    const pen = this.#pen;
    const middle = height / 2;
    const tall = (/** @type {number} */ level) => Math.max(1, level * (middle - 8));
    if (bar.youSpeak && bar.agentSpeaks) {
      pen.fillStyle = this.#ink["--both-ground"];
      pen.fillRect(left, 0, step, height);
    }
    pen.fillStyle = this.#ink[bar.youSpeak ? "--you" : "--line"];
    pen.fillRect(left, middle - 1 - tall(bar.you), step * 0.66, tall(bar.you));
    pen.fillStyle = this.#ink[bar.agentSpeaks ? "--agent" : "--line"];
    pen.fillRect(left, middle + 1, step * 0.66, tall(bar.agent));
    if (bar.cut) this.#drawCut(left, height);
  }

  /** @param {number} left @param {number} height */
  #drawCut(left, height) {
    this.#pen.fillStyle = this.#ink["--ink"];
    this.#pen.fillRect(left - 0.75, height / 2, 1.5, height / 2);
    this.#pen.beginPath();
    this.#pen.arc(left, height - 4, 3.5, 0, 2 * Math.PI);
    this.#pen.fill();
  }

  /** @param {number} nowMs @param {(atMs: number) => number} x @param {number} height */
  #drawSeconds(nowMs, x, height) {
    const pen = this.#pen;
    pen.fillStyle = this.#ink["--line"];
    for (let at = Math.ceil((nowMs - WINDOW_MS) / 5000) * 5000; at <= nowMs; at += 5000) {
      if (at >= 0) pen.fillRect(x(at), 0, 1, height);
    }
  }

  /** As many pixels as the screen has, and the colours of the style sheet. */
  #fit() {
    const { width, height } = this.#canvas.getBoundingClientRect();
    this.#canvas.width = Math.round(width * devicePixelRatio);
    this.#canvas.height = Math.round(height * devicePixelRatio);
    this.#pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    const style = getComputedStyle(this.#canvas);
    for (const name of ["--you", "--agent", "--both-ground", "--line", "--ink"]) {
      this.#ink[name] = style.getPropertyValue(name).trim();
    }
    if (width > 0) this.draw(...this.#shown);
  }
}
