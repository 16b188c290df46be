/**
 * The page: what a person sees, hears and presses. The call itself is in call.js; this file only shows it.
 */

import { Refusal, describeModel, keepKey } from "./api.js";
import { Call, ConnectionError } from "./call.js";
import { Conversation } from "./conversation.js";
import { WakeLock, listDevices, onDeviceChange } from "./devices.js";
import { quality, soundWay, total } from "./latency.js";
import { Meter, asHeight } from "./sound.js";
import { History, MOMENT_MS, TimelineView } from "./timeline.js";

/** @typedef {import("./conversation.js").Turn} Turn */
/** @typedef {import("./latency.js").ServerStats} ServerStats */

const QUEUE_S = 30;
const MEASURE_EVERY_MS = 1_000;

/** Every phase the page can be in, and what it says of it. */
const PHASES = {
  loading: "The model is loading",
  idle: "Ready",
  asking: "Asking for your microphone",
  connecting: "Connecting",
  queued: "Waiting in line",
  live: "Connected",
  resuming: "Connection lost, resuming",
  refused: "All seats taken",
  locked: "Locked",
  ended: "Call ended",
  failed: "No call",
};

/** The phases of a running call. */
const RUNNING = ["asking", "connecting", "queued", "live", "resuming"];

/** Why the server ends a call, for people. What is not here needs no notice. @type {Record<string, string>} */
const ENDINGS = {
  at_capacity: "No seat became free in time.",
  connection_lost: "The connection broke and could not be made again in time.",
  connect_timeout: "The browser and the server did not reach each other in time.",
  ice_failed: "The browser and the server found no way to each other.",
  dtls_failed: "The browser and the server could not agree on encryption.",
  media_timeout: "The server heard nothing of you for too long.",
  idle_timeout: "Nobody said anything for a long time.",
  max_duration: "The call reached its longest duration.",
  drained: "The server is being shut down.",
  evicted_slow: "The server could not keep up with this call.",
  server_error: "Something broke on the server.",
};

/** Hints for `ext.warning`. @type {Record<string, string>} */
const HINTS = {
  echo_suspected: "The agent may be hearing itself. Headphones help.",
  input_silent: "The agent hears only silence. Is this the right microphone?",
  gpu_late: "The server is busy; answers may come late.",
  clock_drift: "Your sound card’s clock is off; small glitches are possible.",
};

/** Roles to try, for models that take instructions. @type {Record<string, string>} */
const EXAMPLES = {
  Assistant: "You are a patient assistant. You answer in one or two short sentences, and say so when you do not know.",
  "Front desk":
    "You are Mara, at the front desk of the Harbour Hotel. Double rooms cost 120 euros, breakfast is from seven to ten, " +
    "and the pool is closed until Friday. You are quick, kind and precise.",
  Tutor: "You teach arithmetic to a ten-year-old. You never give the result away; you ask the next small question.",
  Companion: "You like small talk. You have just come back from a week of walking in the rain in Norway, and loved it.",
};

const find = (/** @type {string} */ id) => /** @type {HTMLElement} */ (document.getElementById(id));
const input = (/** @type {string} */ id) => /** @type {HTMLInputElement} */ (document.getElementById(id));
const select = (/** @type {string} */ id) => /** @type {HTMLSelectElement} */ (document.getElementById(id));
const button = (/** @type {string} */ id) => /** @type {HTMLButtonElement} */ (document.getElementById(id));
const player = /** @type {HTMLAudioElement} */ (find("agent"));

const wakeLock = new WakeLock();
const timelineView = new TimelineView(/** @type {HTMLCanvasElement} */ (find("timeline")));
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** Everything that lives as long as one call. */
class Conference {
  /** @type {ServerStats | null} */
  serverStats = null;
  history = new History();
  conversation = new Conversation();
  #startedMs = performance.now();
  #context = new AudioContext();
  #you = new Meter(this.#context);
  #agent = new Meter(this.#context);
  /** @type {number[]} */
  #timers = [];

  /** @param {Call} call */
  constructor(call) {
    this.call = call;
    call.addEventListener("microphone", (event) => this.#you.listenTo(new MediaStream([detail(event)])));
    call.addEventListener("sound", (event) => this.#play(detail(event)));
    call.addEventListener("message", (event) => this.#hear(detail(event)));
    call.addEventListener("state", (event) => this.#follow(detail(event)));
  }

  get ageMs() {
    return performance.now() - this.#startedMs;
  }

  /** @param {{ state: import("./call.js").CallState, reason: string | null }} change */
  #follow({ state, reason }) {
    if (state === "live" && document.body.dataset.phase !== "resuming") this.#begin();
    if (state === "ended") this.#end();
    if (state !== "ended") showPhase(state);
    else if (reason !== "failed") showEnding(reason);
  }

  #begin() {
    this.#startedMs = performance.now();
    this.#timers = [setInterval(() => this.#watch(), MOMENT_MS), setInterval(() => this.#measure(), MEASURE_EVERY_MS)];
    const draw = () => {
      if (this.call.state === "ended") return;
      if (!calm.matches) timelineView.draw(this.history.moments, this.ageMs);
      requestAnimationFrame(draw);
    };
    draw();
  }

  #end() {
    this.#timers.forEach((timer) => clearInterval(timer));
    this.conversation.end(this.ageMs).forEach(showTurn);
    this.#context.close();
    player.srcObject = null;
    wakeLock.keep(false);
    if (conference === this) conference = null;
    showLevels(0, 0);
  }

  /** @param {MediaStream} stream */
  #play(stream) {
    player.srcObject = stream;
    this.#agent.listenTo(stream);
  }

  /** @param {Record<string, any>} event */
  #hear(event) {
    if (event.type === "ext.stats") this.serverStats = event;
    if (event.type === "ext.warning") showHint(HINTS[event.code]);
    if (event.type === "ext.queue") showQueue(event.position, event.eta_s);
    if (event.type === "session.created") find("recorded").hidden = !event.session.recording;
    if (event.type !== "ext.queue" && document.body.dataset.phase === "queued") showPhase("live");
    const turn = this.conversation.hear(event, this.ageMs);
    if (turn) showTurn(turn);
  }

  /** Twenty times a second: the two levels. */
  #watch() {
    const [you, agent] = [this.call.muted ? -Infinity : this.#you.read(), this.#agent.read()];
    this.history.add(you, agent, this.ageMs);
    showLevels(asHeight(you), asHeight(agent));
  }

  /** Once a second: the clock, the sums, the delay. */
  async #measure() {
    showClock(this.ageMs);
    showTalk(this.history.talk);
    if (calm.matches) timelineView.draw(this.history.moments, this.ageMs);
    const network = await this.call.measure();
    if (!network) return;
    showDelay(soundWay(this.serverStats, network, this.#context.outputLatency * 1000));
    showNetwork(network, this.serverStats);
  }
}

/** The call that runs, if one does. @type {Conference | null} */
let conference = null;

// ---- what a person does

/** @param {number} [queueS] */
async function startCall(queueS = 0) {
  clearLastCall();
  const call = new Call({ wishes: readWishes(), microphone: readMicrophone(), queueS });
  conference = new Conference(call);
  wakeLock.keep(true);
  try {
    await call.start();
    await listAllDevices();
  } catch (error) {
    showFailure(error);
  }
}

function pressCall() {
  if (conference) conference.call.hangUp();
  else if (button("call").ariaDisabled !== "true") startCall();
}

function pressMute() {
  if (!conference) return;
  conference.call.mute(!conference.call.muted);
  showMuted(conference.call.muted);
}

async function changeMicrophone() {
  remember();
  await conference?.call.changeMicrophone(readMicrophone()).catch(showHintOf);
}

async function changeSpeaker() {
  await player.setSinkId(select("speaker").value).catch(showHintOf);
}

// ---- what a person wishes

/** @returns {import("./api.js").Wishes} what was filled in, and a seed */
function readWishes() {
  const number = (/** @type {string} */ id) => (input(id).value === "" ? undefined : Number(input(id).value));
  return {
    voice: select("voice").value || undefined,
    instructions: input("instructions").value.trim() || undefined,
    seed: number("seed") ?? drawSeed(),
    textTemperature: number("text-temperature"),
    audioTemperature: number("audio-temperature"),
    record: input("record").checked || undefined,
  };
}

/** A seed for this call, shown so that it can be played again. */
function drawSeed() {
  const seed = crypto.getRandomValues(new Uint32Array(1))[0] >>> 12;
  input("seed").placeholder = `new each call, last ${seed}`;
  return seed;
}

/** @returns {import("./devices.js").MicrophoneChoice} */
function readMicrophone() {
  return {
    deviceId: select("microphone").value,
    noiseSuppression: input("noise-suppression").checked,
    autoGainControl: input("gain-control").checked,
  };
}

const REMEMBERED = ["microphone", "voice", "instructions"];

function remember() {
  for (const id of REMEMBERED) localStorage.setItem(id, input(id).value);
}

function recall() {
  for (const id of REMEMBERED) {
    const value = localStorage.getItem(id);
    const field = input(id);
    if (value === null) continue;
    field.value = value;
    if (field.value === "" && field instanceof HTMLSelectElement) field.selectedIndex = 0;
  }
}

async function listAllDevices() {
  await listDevices(select("microphone"), "audioinput");
  const speakers = "setSinkId" in player ? await listDevices(select("speaker"), "audiooutput") : 0;
  find("speaker-field").hidden = speakers < 2;
}

// ---- what a person sees

/** @param {keyof typeof PHASES} phase */
function showPhase(phase) {
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

function clearLastCall() {
  stopCountdown();
  find("notice").hidden = true;
  find("hint").hidden = true;
  find("recorded").hidden = true;
  find("transcript").replaceChildren();
  showMuted(false);
  showClock(0);
}

/** @param {string | null} reason */
function showEnding(reason) {
  showPhase("ended");
  const why = ENDINGS[reason ?? ""];
  if (why) showNotice("The call has ended", why);
}

/** @param {unknown} error */
function showFailure(error) {
  if (error instanceof Refusal && error.status === 503 && error.code === "at_capacity") return showRefusal(error);
  if (error instanceof Refusal && error.status === 401) return showLock();
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

/** @param {Refusal} refusal */
function showRefusal(refusal) {
  showPhase("refused");
  showNotice("Every seat is taken", "Each caller has the model’s full attention, and there is no seat left right now.");
  button("queue").hidden = false;
  countDown(refusal.retryAfterS ?? 5);
}

function showLock() {
  showPhase("locked");
  showNotice("This server wants a key", "Ask whoever runs it for one. It is kept until you close this tab.");
  find("key-form").hidden = false;
  find("key").focus();
}

/** @param {Event} event */
function useKey(event) {
  event.preventDefault();
  keepKey(input("key").value);
  find("notice").hidden = true;
  showModel().catch(showFailure);
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
  say(`Every seat is taken. You can call again in ${seconds} seconds, or wait in line.`);
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
function showQueue(position, etaS) {
  showPhase(position > 0 ? "queued" : "live");
  if (position === 0) return;
  find("state").textContent = `Number ${position} in line` + (etaS ? `, about ${Math.ceil(etaS)} s` : "");
}

const HINT_FOR_MS = 15_000;
/** @type {number | undefined} */
let hintTimer;

/** @param {string | undefined} text */
function showHint(text) {
  if (!text) return;
  find("hint").textContent = text;
  find("hint").hidden = false;
  clearTimeout(hintTimer);
  hintTimer = setTimeout(() => (find("hint").hidden = true), HINT_FOR_MS);
  say(text);
}

/** @param {Error} error */
function showHintOf(error) {
  showHint(sentence(error.message));
}

/** @param {number} you @param {number} agent heights, 0..1 */
function showLevels(you, agent) {
  for (const [id, level] of /** @type {[string, number][]} */ ([
    ["meter-you", you],
    ["meter-agent", agent],
  ])) {
    find(id).style.setProperty("--level", level.toFixed(3));
    find(id).ariaValueNow = String(Math.round(level * 100));
  }
}

/** @param {boolean} muted */
function showMuted(muted) {
  button("mute").ariaPressed = String(muted);
  button("mute").ariaLabel = muted ? "Microphone is muted" : "Mute microphone";
  document.body.classList.toggle("muted", muted);
}

/** @param {number} ms */
function showClock(ms) {
  const seconds = Math.floor(ms / 1000);
  find("clock").textContent = `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
}

/** @param {Turn} turn */
function showTurn(turn) {
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
function showTalk(talk) {
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
function showDelay(stages) {
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
function showNetwork(network, server) {
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

/** @param {string} tag @param {string} text */
function element(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}

/** Tell a screen reader. @param {string} text */
function say(text) {
  find("announcer").textContent = text;
}

/** @param {string} text @returns {string} with a capital and a full stop */
function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

/** @param {Event} event */
function detail(event) {
  return /** @type {CustomEvent} */ (event).detail;
}

// ---- the page itself

/** @returns {Promise<import("./api.js").Model>} as soon as the server has loaded one */
async function awaitModel() {
  for (;;) {
    try {
      return await describeModel();
    } catch (error) {
      if (!(error instanceof Refusal) || error.status !== 503) throw error;
      await new Promise((resolve) => setTimeout(resolve, Math.min(error.retryAfterS ?? 2, 5) * 1000));
    }
  }
}

async function showModel() {
  const model = await awaitModel();
  find("model").textContent = model.name;
  find("voice-field").hidden = model.voices.length < 2;
  select("voice").replaceChildren(...model.voices.map((voice) => new Option(voice)));
  if (model.defaultVoice) select("voice").value = model.defaultVoice;
  find("instructions-field").hidden = !model.takesInstructions;
  if (model.longestInstructions) input("instructions").maxLength = model.longestInstructions;
  find("record-field").hidden = !model.records;
  recall();
  showPhase("idle");
}

function offerExamples() {
  for (const [role, text] of Object.entries(EXAMPLES)) {
    const example = document.createElement("button");
    example.type = "button";
    example.textContent = role;
    example.onclick = () => (input("instructions").value = text);
    find("examples").append(example);
  }
}

function wire() {
  button("call").onclick = pressCall;
  button("mute").onclick = pressMute;
  find("key-form").onsubmit = useKey;
  button("queue").onclick = () => startCall(QUEUE_S);
  for (const id of ["microphone", "noise-suppression", "gain-control"]) input(id).onchange = changeMicrophone;
  for (const id of ["voice", "instructions"]) input(id).onchange = remember;
  select("speaker").onchange = changeSpeaker;
  addEventListener("pagehide", () => conference?.call.hangUp());
  onDeviceChange(listAllDevices);
}

wire();
offerExamples();
showPhase("loading");
listAllDevices().then(recall);
showModel().catch(showFailure);
