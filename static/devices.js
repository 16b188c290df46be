/**
 * Microphones and loudspeakers.
 */

/**
 * @typedef {object} MicrophoneChoice
 * @property {string} deviceId empty: the system's default
 * @property {boolean} noiseSuppression
 * @property {boolean} autoGainControl
 */

/**
 * Open a microphone. The echo canceller is always on: the agent listens while it speaks, and must not hear itself.
 * @param {MicrophoneChoice} choice
 * @returns {Promise<MediaStreamTrack>}
 */
export async function openMicrophone({ deviceId, noiseSuppression, autoGainControl }) {
  if (!navigator.mediaDevices) {
    throw new DOMException("Browsers give a microphone only to https:// pages and to localhost.", "SecurityError");
  }
  const stream = await navigator.mediaDevices.getUserMedia({
    audio: {
      echoCancellation: true,
      noiseSuppression,
      autoGainControl,
      channelCount: 1,
      ...(deviceId && { deviceId: { exact: deviceId } }),
    },
  });
  return stream.getAudioTracks()[0];
}

/**
 * Put the devices of one kind into a <select>, keeping what was chosen. Names are unknown before the first permission.
 * @param {HTMLSelectElement} select
 * @param {"audioinput" | "audiooutput"} kind
 * @returns {Promise<number>} how many there are to choose from
 */
export async function listDevices(select, kind) {
  const devices = (await navigator.mediaDevices?.enumerateDevices()) ?? [];
  const named = devices.filter((device) => device.kind === kind && device.deviceId && device.deviceId !== "default");
  const chosen = select.value;
  const options = named.map((device, i) => new Option(device.label || `Device ${i + 1}`, device.deviceId));
  select.replaceChildren(new Option("System default", ""), ...options);
  select.value = named.some((device) => device.deviceId === chosen) ? chosen : "";
  return named.length;
}

/**
 * @param {(change: void) => void} listener called when a device comes or goes
 */
export function onDeviceChange(listener) {
  navigator.mediaDevices?.addEventListener("devicechange", () => listener());
}

/** Keeps the screen on while a call runs; the browser drops the lock whenever the page is hidden. */
export class WakeLock {
  /** @type {WakeLockSentinel | null} */
  #lock = null;
  #wanted = false;

  constructor() {
    document.addEventListener("visibilitychange", () => this.#take());
  }

  /** @param {boolean} wanted */
  async keep(wanted) {
    this.#wanted = wanted;
    if (wanted) return this.#take();
    await this.#lock?.release();
    this.#lock = null;
  }

  async #take() {
    if (!this.#wanted || document.visibilityState !== "visible" || !navigator.wakeLock) return;
    // Refused on low battery: then the screen goes dark, and the call goes on.
    this.#lock = await navigator.wakeLock.request("screen").catch(() => null);
  }
}
