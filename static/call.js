/**
 * One call: a microphone, a peer connection, a data channel. Knows nothing of the page.
 *
 *     asking -> connecting -> live -> ended
 *                              |^
 *                              v|
 *                           resuming
 *
 * `asking` waits for the person to allow the microphone. A connection that breaks is replaced by a new one to the same
 * row of the model, for as long as the server keeps that row.
 */

import { Refusal, endCall, findIceServers, openCall } from "./api.js";
import { openMicrophone } from "./devices.js";

/** @typedef {import("./api.js").Answer} Answer */
/** @typedef {import("./api.js").Wishes} Wishes */
/** @typedef {import("./devices.js").MicrophoneChoice} MicrophoneChoice */
/** @typedef {"asking" | "connecting" | "live" | "resuming" | "ended"} CallState */

/**
 * @typedef {object} CallSettings
 * @property {Wishes} wishes
 * @property {MicrophoneChoice} microphone
 * @property {number} [queueS] how long to wait in line if every row is taken
 */

/**
 * What the browser knows of the way, over the time since it was last asked.
 * @typedef {object} NetworkStats
 * @property {number | null} rttMs
 * @property {number | null} jitterMs of what arrives
 * @property {number | null} bufferMs how long sound waits in the browser before it is played
 * @property {number | null} lostIn share of packets lost on the way here
 * @property {number | null} lostOut share lost on the way there, as the server reports
 */

const CONNECT_TIMEOUT_MS = 15_000;
/** The server keeps the row of a vanished caller for 10 s. */
const RESUME_FOR_MS = 10_000;
const RESUME_PAUSE_MS = 1_000;
/** `disconnected` often heals by itself. */
const DISCONNECTED_PATIENCE_MS = 2_500;

/**
 * Events: `state` ({ state, reason }), `message` (a server event), `sound` (the agent's MediaStream), `microphone` (the
 * caller's MediaStreamTrack, again whenever it is replaced).
 */
export class Call extends EventTarget {
  /** @type {CallState} */
  state = "asking";
  muted = false;

  /** @type {CallSettings} */
  #settings;
  /** @type {MediaStreamTrack | null} */
  #track = null;
  /** @type {RTCPeerConnection | null} */
  #peer = null;
  /** @type {Answer | null} */
  #answer = null;
  /** Why the server is about to end the call, once it has said so. @type {string | null} */
  #closing = null;
  #abort = new AbortController();
  #stats = new StatsWindow();

  /** @param {CallSettings} settings */
  constructor(settings) {
    super();
    this.#settings = settings;
  }

  /**
   * Ask for the microphone, then for the call; returns when the agent can hear, or when the caller has hung up.
   * @throws {Refusal} the server says no
   * @throws {DOMException} no microphone
   */
  async start() {
    this.#enter("asking");
    try {
      await this.#takeMicrophone();
      this.#enter("connecting");
      await this.#connect();
      this.#enter("live");
    } catch (error) {
      if (this.#abort.signal.aborted) return;
      this.#end("failed");
      throw error;
    }
  }

  /** End the call from this side. */
  hangUp() {
    this.#end("hang_up");
  }

  /** @param {boolean} muted */
  mute(muted) {
    this.muted = muted;
    if (this.#track) this.#track.enabled = !muted;
  }

  /**
   * Speak into another microphone from now on.
   * @param {MicrophoneChoice} choice
   */
  async changeMicrophone(choice) {
    this.#settings.microphone = choice;
    await this.#takeMicrophone();
    await this.#sender()?.replaceTrack(this.#track);
  }

  /** @returns {Promise<NetworkStats | null>} */
  async measure() {
    return this.#peer && this.#stats.read(await this.#peer.getStats());
  }

  async #takeMicrophone() {
    const track = await openMicrophone(this.#settings.microphone);
    if (this.#abort.signal.aborted) track.stop();
    this.#abort.signal.throwIfAborted();
    this.#track?.stop();
    this.#track = track;
    track.enabled = !this.muted;
    // A headset pulled out ends the track; a telephone call on iOS mutes it, and leaves it silent when it is over.
    track.onended = () => this.changeMicrophone({ ...this.#settings.microphone, deviceId: "" }).catch(() => {});
    track.onmute = () => {
      track.onunmute = () => this.changeMicrophone(this.#settings.microphone).catch(() => {});
    };
    this.#tell("microphone", track);
  }

  /** @param {Answer | null} [resume] */
  async #connect(resume = null) {
    const peer = this.#newPeer(await findIceServers());
    // No candidates are waited for: the server offers its own, and learns ours from the checks that reach it.
    await peer.setLocalDescription();
    this.#answer = await openCall(/** @type {RTCSessionDescription} */ (peer.localDescription).sdp, {
      wishes: this.#settings.wishes,
      queueS: this.#settings.queueS ?? 0,
      resume,
    });
    if (this.#abort.signal.aborted) endCall(this.#answer).catch(() => {});
    this.#abort.signal.throwIfAborted();
    await peer.setRemoteDescription({ type: "answer", sdp: this.#answer.sdp });
    await connected(peer, CONNECT_TIMEOUT_MS);
    peer.onconnectionstatechange = () => this.#watch(peer);
    this.#watch(peer);
  }

  /**
   * A peer connection with everything of ours on it; it takes the place of the one before.
   * @param {RTCIceServer[]} iceServers
   */
  #newPeer(iceServers) {
    this.#dropPeer();
    const peer = new RTCPeerConnection({ iceServers });
    const channel = peer.createDataChannel("oai-events");
    channel.onmessage = ({ data }) => this.#hear(JSON.parse(data));
    channel.onclose = () => this.#closed(peer);
    const track = /** @type {MediaStreamTrack} */ (this.#track);
    peer.addTrack(track, new MediaStream([track]));
    peer.ontrack = ({ receiver, track }) => {
      // As little waiting as the network allows. Not every browser has this knob.
      if ("jitterBufferTarget" in receiver) receiver.jitterBufferTarget = 0;
      this.#tell("sound", new MediaStream([track]));
    };
    this.#peer = peer;
    this.#stats = new StatsWindow();
    return peer;
  }

  /** @param {{ type: string, reason?: string, in_ms?: number }} event */
  #hear(event) {
    if (event.type === "ext.session.closing" && !event.in_ms) this.#closing = event.reason ?? "server_error";
    this.#tell("message", event);
  }

  /** @param {RTCPeerConnection} peer */
  async #watch(peer) {
    if (peer.connectionState === "disconnected") await pause(DISCONNECTED_PATIENCE_MS);
    if (!["connected", "connecting"].includes(peer.connectionState)) await this.#closed(peer);
  }

  /**
   * The other side is gone: by its own will, or lost on the way.
   * @param {RTCPeerConnection} peer
   */
  async #closed(peer) {
    if (peer !== this.#peer || this.state !== "live") return;
    if (this.#closing) return this.#end(this.#closing);
    this.#enter("resuming");
    if (!(await this.#resume())) this.#end("connection_lost");
  }

  /** @returns {Promise<boolean>} whether the call goes on */
  async #resume() {
    const until = performance.now() + RESUME_FOR_MS;
    while (this.state === "resuming" && performance.now() < until) {
      try {
        await this.#connect(this.#answer);
        this.#enter("live");
        return true;
      } catch (error) {
        if (error instanceof Refusal && error.status < 500) return false;
      }
      await pause(RESUME_PAUSE_MS);
    }
    return false;
  }

  /** @param {string} reason */
  #end(reason) {
    if (this.state === "ended") return;
    this.#enter("ended", reason);
    this.#abort.abort();
    if (this.#answer) endCall(this.#answer).catch(() => {});
    this.#dropPeer();
    this.#track?.stop();
  }

  #dropPeer() {
    const peer = this.#peer;
    this.#peer = null;
    peer?.close();
  }

  #sender() {
    return this.#peer?.getSenders()[0];
  }

  /**
   * @param {CallState} state
   * @param {string} [reason] why it ended
   */
  #enter(state, reason = "") {
    if (this.state === "ended") return;
    this.state = state;
    this.#tell("state", { state, reason });
  }

  /**
   * @param {string} type
   * @param {unknown} detail
   */
  #tell(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}

/**
 * Resolves when the peer connection stands.
 * @param {RTCPeerConnection} peer
 * @param {number} timeoutMs
 */
function connected(peer, timeoutMs) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new ConnectionError("timeout")), timeoutMs);
    const look = () => {
      if (peer.connectionState === "connected") resolve(undefined);
      else if (["failed", "closed"].includes(peer.connectionState)) reject(new ConnectionError(peer.connectionState));
      else return;
      clearTimeout(timer);
    };
    peer.onconnectionstatechange = look;
    look();
  });
}

/** No way was found between this browser and the server. */
export class ConnectionError extends Error {
  /** @param {string} state */
  constructor(state) {
    super(`The browser and the server could not reach each other (${state}).`);
    this.name = "ConnectionError";
  }
}

/** @param {number} ms */
function pause(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

/** getStats() counts from the start of the call; this takes the differences since the last reading. */
class StatsWindow {
  /** @type {Record<string, number>} */
  #before = {};

  /**
   * @param {RTCStatsReport} report
   * @returns {NetworkStats}
   */
  read(report) {
    /** @type {Record<string, any>} */
    const byType = {};
    for (const entry of report.values()) {
      if (entry.type === "candidate-pair" && !entry.nominated) continue;
      byType[entry.type] = entry;
    }
    const inbound = byType["inbound-rtp"] ?? {};
    const delta = this.#differences({
      delayS: inbound.jitterBufferDelay,
      emitted: inbound.jitterBufferEmittedCount,
      lost: inbound.packetsLost,
      received: inbound.packetsReceived,
    });
    return {
      rttMs: inMs(byType["candidate-pair"]?.currentRoundTripTime),
      jitterMs: inMs(inbound.jitter),
      bufferMs: inMs(share(delta.delayS, delta.emitted)),
      lostIn: share(delta.lost, delta.lost + delta.received),
      lostOut: byType["remote-inbound-rtp"]?.fractionLost ?? null,
    };
  }

  /** @param {Record<string, number>} now */
  #differences(now) {
    const before = this.#before;
    this.#before = now;
    return Object.fromEntries(Object.entries(now).map(([name, value]) => [name, value - (before[name] ?? 0)]));
  }
}

/**
 * @param {number} part
 * @param {number} whole
 */
function share(part, whole) {
  return whole > 0 && Number.isFinite(part) ? Math.max(0, part / whole) : null;
}

/** @param {number | null | undefined} seconds */
function inMs(seconds) {
  return seconds == null ? null : seconds * 1000;
}
