/**
 * The page: what a person presses and wishes, and what then happens. The call itself is in call.js, what is seen in view.js.
 */

import { Refusal, describeModel, keepKey } from "./api.js";
import { Call } from "./call.js";
import { Conversation } from "./conversation.js";
import { WakeLock, listDevices, onDeviceChange } from "./devices.js";
import { button, canvas, find, input, select } from "./dom.js";
import { soundWay } from "./latency.js";
import { Meter, asHeight } from "./sound.js";
import { History, MOMENT_MS, TimelineView } from "./timeline.js";
import {
  HINTS,
  clearLastCall,
  showClock,
  showComingEnd,
  showDelay,
  showEnding,
  showFailure,
  showHint,
  showHintOf,
  showLevels,
  showMuted,
  showNetwork,
  showPhase,
  showQueue,
  showTalk,
  showTurn,
} from "./view.js";

/** @typedef {import("./latency.js").ServerStats} ServerStats */

const QUEUE_S = 30;
const MEASURE_EVERY_MS = 1_000;

/** Roles to try, for models that take instructions. @type {Record<string, string>} */
const EXAMPLES = {
  Assistant: "You are a patient assistant. You answer in one or two short sentences, and say so when you do not know.",
  "Front desk":
    "You are Mara, at the front desk of the Harbour Hotel. Double rooms cost 120 euros, breakfast is from seven to ten, " +
    "and the pool is closed until Friday. You are quick, kind and precise.",
  Tutor: "You teach arithmetic to a ten-year-old. You never give the result away; you ask the next small question.",
  Companion: "You like small talk. You have just come back from a week of walking in the rain in Norway, and loved it.",
};

const player = /** @type {HTMLAudioElement} */ (find("agent"));

const wakeLock = new WakeLock();
const timelineView = new TimelineView(canvas("timeline"));
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** Everything that lives as long as one call. */
class CallOnPage {
  /** @type {ServerStats | null} */
  serverStats = null;
  history = new History();
  conversation = new Conversation();
  #wishes;
  #startedMs = performance.now();
  #context = new AudioContext();
  #you = new Meter(this.#context);
  #agent = new Meter(this.#context);
  /** @type {number[]} */
  #timers = [];

  /** @param {import("./call.js").CallSettings} settings */
  constructor(settings) {
    this.#wishes = settings.wishes;
    const call = new Call(settings);
    this.call = call;
    // iOS interrupts it for a telephone call.
    this.#context.onstatechange = () => this.call.state !== "ended" && this.#context.resume();
    call.addEventListener("microphone", (event) => this.#you.listenTo(new MediaStream([detail(event)])));
    call.addEventListener("sound", (event) => this.#play(detail(event)));
    call.addEventListener("message", (event) => this.#hear(detail(event)));
    call.addEventListener("state", (event) => this.#follow(detail(event)));
  }

  get ageMs() {
    return performance.now() - this.#startedMs;
  }

  /** @param {{ state: import("./call.js").CallState, reason: string }} change */
  #follow({ state, reason }) {
    if (state === "live" && document.body.dataset.phase !== "resuming") this.#begin();
    if (state === "ended") this.#end();
    if (state !== "ended") showPhase(state);
    else if (reason !== "failed") showEnding(reason);
  }

  #begin() {
    find("recorded").hidden = !this.#wishes.record;
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
    if (running === this) running = null;
    showLevels(0, 0);
  }

  /** @param {MediaStream} stream */
  #play(stream) {
    player.srcObject = stream;
    player.play().catch(({ name }) => name === "NotAllowedError" && showHint("Press anywhere to hear the agent."));
    this.#agent.listenTo(stream);
  }

  /** @param {Record<string, any>} event */
  #hear(event) {
    if (event.session?.recording !== undefined) find("recorded").hidden = !event.session.recording;
    if (event.type === "ext.stats") this.serverStats = event;
    if (event.type === "ext.warning") showHint(HINTS[event.code]);
    if (event.type === "ext.session.closing" && event.in_ms) showComingEnd(event.reason, event.in_ms);
    if (event.type === "ext.queue") showQueue(event.position, event.eta_s);
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

/** @param {Event} event what it carries */
function detail(event) {
  return /** @type {CustomEvent} */ (event).detail;
}

/** The call that runs, if one does. @type {CallOnPage | null} */
let running = null;

// ---- what a person does

/** @param {number} [queueS] */
async function startCall(queueS = 0) {
  clearLastCall();
  const { call } = (running = new CallOnPage({ wishes: readWishes(), microphone: readMicrophone(), queueS }));
  wakeLock.keep(true);
  try {
    await call.start();
    await listAllDevices();
  } catch (error) {
    showFailure(error);
  }
}

function pressCall() {
  if (running) running.call.hangUp();
  else if (button("call").ariaDisabled !== "true") startCall();
}

function pressMute() {
  if (!running) return;
  running.call.mute(!running.call.muted);
  showMuted(running.call.muted);
}

async function changeMicrophone() {
  remember();
  await running?.call.changeMicrophone(readMicrophone()).catch(showHintOf);
}

async function changeSpeaker() {
  await player.setSinkId(select("speaker").value).catch(showHintOf);
}

/** @param {Event} event */
function useKey(event) {
  event.preventDefault();
  keepKey(input("key").value);
  find("notice").hidden = true;
  showModel().catch(showFailure);
}

// ---- what a person wishes

/** @returns {import("./api.js").Wishes} what was filled in, and a seed */
function readWishes() {
  const number = (/** @type {string} */ id) => (input(id).value === "" ? undefined : Number(input(id).value));
  return {
    voice: select("voice").value || undefined,
    instructions: (!find("instructions-field").hidden && input("instructions").value.trim()) || undefined,
    seed: number("seed") ?? drawSeed(),
    textTemperature: number("text-temperature"),
    audioTemperature: number("audio-temperature"),
    record: (!find("record-field").hidden && input("record").checked) || undefined,
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
  find("record-field").hidden = !model.recordsCalls;
  if (model.longestInstructions) input("instructions").maxLength = model.longestInstructions;
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
  addEventListener("pointerdown", () => player.srcObject && player.paused && player.play());
  addEventListener("pagehide", () => running?.call.hangUp());
  onDeviceChange(listAllDevices);
}

wire();
offerExamples();
showPhase("loading");
listAllDevices().then(recall);
showModel().catch(showFailure);
