/**
 * The server's HTTP API, as far as the page needs it.
 */

const CALLS = "v1/realtime/calls";
const KEY = "key";

/**
 * What the caller wishes of the agent. Whatever is left out is the model's own.
 * @typedef {object} Wishes
 * @property {string} [voice]
 * @property {string} [instructions]
 * @property {number} [seed]
 * @property {number} [textTemperature]
 * @property {number} [audioTemperature]
 * @property {boolean} [record] keep a recording of this call; a server that keeps none refuses the call
 */

/**
 * @typedef {object} Answer
 * @property {string} sdp
 * @property {string} callId
 * @property {string | null} secret what its owner shows to end or resume the call, where the server wants that
 */

/**
 * @typedef {object} Model
 * @property {string} name
 * @property {boolean} takesInstructions
 * @property {number | null} longestInstructions in characters
 * @property {string[]} voices
 * @property {string | null} defaultVoice
 * @property {boolean} recordsCalls whether a caller may ask for a recording
 */

/** The server said no, with a reason for people (`message`) and one for programs (`code`). */
export class Refusal extends Error {
  /**
   * @param {string} message
   * @param {{ status: number, code: string, retryAfterS?: number | null }} why
   */
  constructor(message, { status, code, retryAfterS = null }) {
    super(message);
    this.name = "Refusal";
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }
}

/**
 * Show this key with every request, for as long as the tab is open.
 * @param {string} key
 */
export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** @returns {Promise<Model>} what the model can be asked for */
export async function describeModel() {
  const [models, voices] = await Promise.all([getJson("v1/models"), getJson("v1/voices")]);
  const model = models.data[0];
  return {
    name: model.id,
    takesInstructions: Boolean(model.takes_text),
    longestInstructions: model.max_text_chars ?? null,
    voices: voices.data.map((/** @type {{ id: string }} */ voice) => voice.id),
    defaultVoice: voices.default ?? null,
    recordsCalls: Boolean(model.recording),
  };
}

/** @returns {Promise<RTCIceServer[]>} STUN and TURN servers; none where the server offers none */
export async function findIceServers() {
  try {
    return (await getJson("v1/realtime/ice-servers")).iceServers ?? [];
  } catch (error) {
    if (error instanceof Refusal && error.status === 404) return [];
    throw error;
  }
}

/**
 * Ask for a call, or for a lost one to go on (`resume`).
 * @param {string} sdp the offer
 * @param {object} options
 * @param {Wishes} options.wishes
 * @param {Answer | null} [options.resume] the answer that the lost call had
 * @param {number} [options.queueS] how long to wait in line for a free row; 0: not at all
 * @returns {Promise<Answer>}
 * @throws {Refusal}
 */
export async function openCall(sdp, { wishes, resume = null, queueS = 0 }) {
  const query = queueS > 0 ? `?queue=${queueS}` : "";
  const body = {
    type: "offer",
    sdp,
    session: asSession(wishes),
    ...(resume && { pc_id: resume.callId, restart_pc: true }),
  };
  const response = await fetch(CALLS + query, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...asOwner(resume) },
    body: JSON.stringify(body),
  });
  const answer = await readJson(response);
  return { sdp: answer.sdp, callId: answer.call_id, secret: answer.client_secret?.value ?? resume?.secret ?? null };
}

/**
 * End a call. Outlives the page that asks, so that closing the tab frees the row.
 * @param {Answer} call
 */
export function endCall(call) {
  const address = `${CALLS}/${encodeURIComponent(call.callId)}`;
  return fetch(address, { method: "DELETE", keepalive: true, headers: asOwner(call) });
}

/** @param {Wishes} wishes */
function asSession({ voice, instructions, seed, textTemperature, audioTemperature, record }) {
  return {
    type: "realtime",
    instructions,
    audio: voice === undefined ? undefined : { output: { voice } },
    seed,
    text_temperature: textTemperature,
    audio_temperature: audioTemperature,
    recording: record,
  };
}

/**
 * Shows the call's own secret, else the key, else nothing.
 * @param {Answer | null} [call]
 * @returns {Record<string, string>}
 */
function asOwner(call = null) {
  const shown = call?.secret ?? sessionStorage.getItem(KEY);
  return shown ? { Authorization: `Bearer ${shown}` } : {};
}

/** @param {string} path */
async function getJson(path) {
  return readJson(await fetch(path, { headers: { Accept: "application/json", ...asOwner() } }));
}

/** @param {Response} response */
async function readJson(response) {
  if (response.ok) return response.json();
  const { error } = await response.json().catch(() => ({ error: null }));
  throw new Refusal(error?.message ?? `The server answered ${response.status}.`, {
    status: response.status,
    code: error?.code ?? "unknown",
    retryAfterS: asSeconds(response.headers.get("Retry-After")),
  });
}

/** @param {string | null} header Retry-After: seconds, or a date */
function asSeconds(header) {
  if (header === null) return null;
  const seconds = /^\d+$/.test(header) ? Number(header) : (Date.parse(header) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.max(1, Math.ceil(seconds)) : null;
}
