/**
 * What the page shows. Every function here puts one thing on the screen, and tells a screen reader what it should say.
 */

import { Refusal } from "./api.js";
import { ConnectionError } from "./call.js";
import { asClock, button, element, find, input } from "./dom.js";
import { quality, total } from "./latency.js";

/** @typedef {import("./conversation.js").Turn} Turn */
/** @typedef {import("./latency.js").ServerStats} ServerStats */

/** Every phase the page can be in, and what it says of it. */
const PHASES = {
  loading: "The model is loading",
  idle: "Ready",
  asking: "Asking for your microphone",
  connecting: "Connecting",
  queued: "Waiting in line",
  live: "Connected",
  resuming: "Connection lost, resuming",
  refused: "Try again soon",
  locked: "Locked",
  ended: "Call ended",
  failed: "No call",
};

/** The phases of a running call. */
const RUNNING = ["asking", "connecting", "queued", "live", "resuming"];

/** Why a call ends, for people; "" needs no notice. @type {Record<string, string>} */
const ENDINGS = {
  hang_up: "",
  hangup: "",
  at_capacity: "No seat became free in time.",
  connection_lost: "The connection broke and could not be made again in time.",
  connect_timeout: "The browser and the server did not reach each other in time.",
  ice_failed: "The browser and the server found no way to each other.",
  dtls_failed: "The browser and the server could not agree on encryption.",
  media_timeout: "The server heard nothing of you for too long.",
  idle_timeout: "Nobody said anything for a long time.",
  max_duration: "The call reached its longest duration.",
  drained: "The server is being shut down.",
  engine_lost: "The model broke off. It is being started again.",
  evicted_slow: "The server could not keep up with this call.",
  server_error: "Something broke on the server.",
};

/** Hints for `ext.warning`. @type {Record<string, string>} */
export const HINTS = {
  input_silent: "The agent hears only silence. Is this the right microphone?",
  gpu_late: "The server is busy; answers may come late.",
  echo_suspected: "The agent hears itself through your loudspeaker. Headphones help.",
  clock_drift: "Your microphone’s clock runs unevenly; the agent may hear small gaps.",
  idle_timeout: "Nobody has spoken for a while. The call will end soon.",
};

/** @param {keyof typeof PHASES} phase */
export function showPhase(phase) {
  const inCall = RUNNING.includes(phase);
  document.body.dataset.phase = phase;
  document.body.dataset.call = inCall ? "running" : phase === "ended" ? "over" : "none";
  find("state").textContent = PHASES[phase];
  button("call").ariaDisabled = String(phase === "loading" || phase === "locked");
  find("call-label").textContent = !inCall ? "Call" : phase === "live" || phase === "resuming" ? "Hang up" : "Cancel";
  button("mute").disabled = !inCall;
  for (const id of ["wishes", "dice", "record", "noise-suppression", "gain-control"]) input(id).disabled = inCall;
  say(PHASES[phase]);
}

export function clearLastCall() {
  stopCountdown();
  find("notice").hidden = true;
  find("hint").hidden = true;
  find("recorded").hidden = true;
  find("transcript").replaceChildren();
  showMuted(false);
  showClock(0);
}

/** @param {string} reason */
export function showEnding(reason) {
  showPhase("ended");
  const why = ENDINGS[reason] ?? `The server ended it (${reason}).`;
  if (why) showNotice("The call has ended", why);
}

/** @param {unknown} error */
export function showFailure(error) {
  if (error instanceof Refusal && error.status === 401) return showLock();
  if (error instanceof Refusal && error.retryAfterS !== null) return showRefusal(error, error.retryAfterS);
  showPhase("failed");
  if (error instanceof Refusal) showNotice("The server said no", sentence(error.message));
  else if (error instanceof ConnectionError) showNotice("No connection", error.message);
  else if (error instanceof DOMException) showNotice("No microphone", explainMicrophone(error));
  else showNotice("The server does not answer", "Is it running, and is this device online?");
}

/** @param {DOMException} error */
function explainMicrophone(error) {
  switch (error.name) {
    case "NotAllowedError":
      return "The browser did not let the page listen. Allow the microphone beside the address, then call again.";
    case "NotFoundError":
    case "OverconstrainedError":
      return "No microphone was found. Plug one in or choose another, then call again.";
    default:
      return sentence(error.message);
  }
}

/** @param {Refusal} refusal @param {number} retryAfterS */
function showRefusal({ code, message }, retryAfterS) {
  const full = code === "at_capacity";
  showPhase("refused");
  if (full)
    showNotice("Every seat is taken", "Each caller has the model’s full attention, and no seat is left right now.");
  else showNotice("Not right now", sentence(message));
  button("queue").hidden = !full;
  countDown(retryAfterS);
}

function showLock() {
  showPhase("locked");
  showNotice("This server wants a key", "Ask whoever runs it for one. It is kept until you close this tab.");
  find("key-form").hidden = false;
  find("key").focus();
}

/** @type {number | undefined} */
let countdown;

/** Hold the call button back for as long as the server asked. @param {number} seconds */
function countDown(seconds) {
  const until = performance.now() + seconds * 1000;
  const tick = () => {
    const left = Math.max(0, Math.ceil((until - performance.now()) / 1000));
    button("call").ariaDisabled = String(left > 0);
    find("call-label").textContent = left > 0 ? `Call in ${left} s` : "Call again";
    find("notice-count").textContent = left > 0 ? String(left) : "";
    if (left > 0) return;
    stopCountdown();
    say("You can call again.");
  };
  say(`${find("notice-title").textContent}. You can call again in ${seconds} seconds.`);
  countdown = setInterval(tick, 250);
  tick();
}

function stopCountdown() {
  clearInterval(countdown);
  button("call").ariaDisabled = "false";
}

/** @param {string} title @param {string} text */
function showNotice(title, text) {
  find("notice-title").textContent = title;
  find("notice-text").textContent = text;
  find("notice-count").textContent = "";
  find("notice").hidden = false;
  button("queue").hidden = true;
  find("key-form").hidden = true;
  say(`${title}. ${text}`);
}

/** @param {number} position 0: it is our turn @param {number | null} etaS */
export function showQueue(position, etaS) {
  showPhase(position > 0 ? "queued" : "live");
  if (position === 0) return;
  find("state").textContent = `Number ${position} in line` + (etaS ? `, about ${Math.ceil(etaS)} s` : "");
}

const HINT_FOR_MS = 15_000;
/** @type {number | undefined} */
let hintTimer;

/** @param {string | undefined} text */
export function showHint(text) {
  if (!text) return;
  find("hint").textContent = text;
  find("hint").hidden = false;
  clearTimeout(hintTimer);
  hintTimer = setTimeout(() => (find("hint").hidden = true), HINT_FOR_MS);
  say(text);
}

/** @param {string} reason @param {number} inMs */
export function showComingEnd(reason, inMs) {
  const why = reason === "drained" ? "The server is being shut down" : "The call reaches its longest duration";
  showHint(`${why}: it ends in about ${Math.ceil(inMs / 1000)} s.`);
}

/** @param {Error} error */
export function showHintOf(error) {
  showHint(sentence(error.message));
}

/** @param {number} you @param {number} agent heights, 0..1 */
export function showLevels(you, agent) {
  for (const [id, level] of /** @type {[string, number][]} */ ([
    ["meter-you", you],
    ["meter-agent", agent],
  ])) {
    find(id).style.setProperty("--level", level.toFixed(3));
    find(id).ariaValueNow = String(Math.round(level * 100));
  }
}

/** @param {boolean} muted */
export function showMuted(muted) {
  button("mute").ariaPressed = String(muted);
  button("mute").ariaLabel = muted ? "Microphone is muted" : "Mute microphone";
  document.body.classList.toggle("muted", muted);
}

/** @param {number} ms */
export function showClock(ms) {
  find("clock").textContent = asClock(ms / 1000);
}

/** @param {Turn} turn */
export function showTurn(turn) {
  const row = find(`turn-${turn.id}`) ?? find("transcript").appendChild(newRow(turn));
  const words = /** @type {HTMLElement} */ (row.querySelector(".words"));
  row.classList.toggle("open", turn.endedMs === null);
  row.classList.toggle("interrupted", turn.interrupted);
  if (turn.who === "you") words.textContent = describeSpeech(turn);
  else showWords(words, turn.text);
  if (turn.who === "agent" && turn.endedMs !== null) say(turn.text);
}

/** @param {Turn} turn */
function newRow(turn) {
  const row = document.createElement("li");
  row.id = `turn-${turn.id}`;
  row.className = `turn ${turn.who}`;
  const who = document.createElement("span");
  who.className = "who";
  who.textContent = turn.who === "you" ? "You" : "Agent";
  const words = document.createElement("p");
  words.className = "words";
  row.append(who, words);
  return row;
}

/** Add what is new, so that only the new words fade in. @param {HTMLElement} words @param {string} text */
function showWords(words, text) {
  const shown = words.textContent ?? "";
  if (!text.startsWith(shown)) words.replaceChildren();
  const fresh = document.createElement("span");
  fresh.textContent = text.slice(words.textContent?.length ?? 0);
  if (fresh.textContent) words.append(fresh);
}

/** @param {Turn} turn */
function describeSpeech(turn) {
  if (turn.endedMs === null) return "speaking";
  return `spoke for ${((turn.endedMs - turn.startedMs) / 1000).toFixed(1)} s`;
}

/** @param {import("./timeline.js").Talk} talk */
export function showTalk(talk) {
  const seconds = (/** @type {number} */ ms) => `${Math.round(ms / 1000)} s`;
  find("talk-you").textContent = seconds(talk.youMs);
  find("talk-agent").textContent = seconds(talk.agentMs);
  find("talk-both").textContent = seconds(talk.bothMs);
  find("talk-cuts").textContent = String(talk.interruptions);
  find("talk-answer").textContent = talk.answerMs === null ? "–" : `${(talk.answerMs / 1000).toFixed(2)} s`;
  find("timeline").ariaLabel =
    `So far you spoke ${seconds(talk.youMs)}, the agent ${seconds(talk.agentMs)}, both at once ${seconds(talk.bothMs)}; ` +
    `interruptions: ${talk.interruptions}.`;
}

/** @param {import("./latency.js").Stage[]} stages */
export function showDelay(stages) {
  find("delay").textContent = String(Math.round(total(stages)));
  find("talk-delay").textContent = `${Math.round(total(stages))} ms`;
  find("stack").replaceChildren(
    ...stages.map(({ kind, ms, assumed }) => {
      const part = document.createElement("i");
      part.className = `${kind}${assumed ? " assumed" : ""}`;
      part.style.flexGrow = String(ms);
      return part;
    }),
  );
  showPairs(
    "stages",
    stages.map(({ name, ms, kind, assumed }) => [name, `${assumed ? "≈ " : ""}${ms.toFixed(0)} ms`, kind]),
  );
}

/** @param {import("./call.js").NetworkStats} network @param {ServerStats | null} server */
export function showNetwork(network, server) {
  const ms = (/** @type {number | null} */ value) => (value === null ? "–" : `${value.toFixed(value < 10 ? 1 : 0)} ms`);
  const percent = (/** @type {number | null} */ value) => (value === null ? "–" : `${(value * 100).toFixed(1)} %`);
  find("quality").textContent = quality(network);
  find("quality").dataset.quality = quality(network);
  showPairs("network", [
    ["Round trip", ms(network.rttMs)],
    ["Jitter", ms(network.jitterMs)],
    ["Lost, there", percent(network.lostOut)],
    ["Lost, back", percent(network.lostIn)],
    ["Made up, there", ms(server?.concealed_ms ?? null)],
  ]);
}

/** @param {string} id of a <dl> @param {string[][]} pairs name, value and perhaps a class */
function showPairs(id, pairs) {
  find(id).replaceChildren(
    ...pairs.map(([name, value, kind = ""]) => {
      const pair = document.createElement("div");
      pair.className = kind;
      pair.append(element("dt", name), element("dd", value));
      return pair;
    }),
  );
}

/** Tell a screen reader. @param {string} text */
function say(text) {
  find("announcer").textContent = text;
}

/** @param {string} text @returns {string} with a capital and a full stop */
function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}
