/**
 * The way of the sound from the caller's mouth to the first sound of the agent that can depend on it, stage by stage.
 * Pure. Server figures come from `ext.stats`, network figures from the browser; what neither can know is assumed, and
 * marked as such.
 */

/** @typedef {import("./call.js").NetworkStats} NetworkStats */

/**
 * `ext.stats`, once a second; a server may leave out what it does not know.
 * @typedef {object} ServerStats
 * @property {number} [jb_ms] sound waits in the server's jitter buffer
 * @property {number} [frame_wait_ms] until its frame of 80 ms is full, and its tick comes
 * @property {number} [step_ms] the model's step
 * @property {number} [model_delay_ms] until what it has decided in a step is heard whole
 * @property {number} [out_buffer_ms] between the step and the packet
 * @property {number} [concealed_ms] sound of the caller that the server had to make up, since the call began
 */

/**
 * @typedef {object} Stage
 * @property {string} name
 * @property {number} ms
 * @property {"network" | "server" | "model" | "device"} kind
 * @property {boolean} assumed
 */

/** Microphone with its echo canceller, and an Opus packet of 20 ms with 6.5 ms of look-ahead. */
const CAPTURE_MS = 20 + 26.5;
/** Opus again on the way back: 6.5 ms. */
const OPUS_BACK_MS = 6.5;
const PLAYOUT_MS = 20;

/**
 * @param {ServerStats | null} server
 * @param {NetworkStats | null} network
 * @param {number | null} outputLatencyMs of this browser's sound output, where it tells
 * @returns {Stage[]} the known stages, in the order of the sound
 */
export function soundWay(server, network, outputLatencyMs) {
  const oneWayMs = network?.rttMs == null ? null : network.rttMs / 2;
  const playoutMs = outputLatencyMs || PLAYOUT_MS;
  /** @type {[string, number | null | undefined, Stage["kind"], boolean][]} */
  const stages = [
    ["Microphone, Opus", CAPTURE_MS, "device", true],
    ["Network, there", oneWayMs, "network", false],
    ["Jitter buffer", server?.jb_ms, "server", false],
    ["Frame and tick", server?.frame_wait_ms, "server", false],
    ["Model step", server?.step_ms, "model", false],
    ["Model’s own delay", server?.model_delay_ms, "model", false],
    ["Send buffer", server?.out_buffer_ms, "server", false],
    ["Network, back", oneWayMs, "network", false],
    ["Browser’s buffer", network?.bufferMs, "network", false],
    ["Opus, loudspeaker", OPUS_BACK_MS + playoutMs, "device", !outputLatencyMs],
  ];
  return stages.flatMap(([name, ms, kind, assumed]) => (ms == null ? [] : [{ name, ms, kind, assumed }]));
}

/**
 * @param {Stage[]} stages
 * @returns {number} milliseconds
 */
export function total(stages) {
  return stages.reduce((sum, stage) => sum + stage.ms, 0);
}

/**
 * How the network does, in a word. Bounds: what a conversation begins to suffer from (ITU-T G.114 for the delay).
 * @param {NetworkStats} network
 * @returns {"Good" | "Fair" | "Poor"}
 */
export function quality({ rttMs, jitterMs, lostIn, lostOut }) {
  const lost = Math.max(lostIn ?? 0, lostOut ?? 0);
  if ((rttMs ?? 0) > 300 || (jitterMs ?? 0) > 50 || lost > 0.05) return "Poor";
  if ((rttMs ?? 0) > 150 || (jitterMs ?? 0) > 25 || lost > 0.01) return "Fair";
  return "Good";
}
