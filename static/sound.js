/**
 * How loud each voice is, and who is speaking: read beside the call, never in its way. The agent is played by an <audio>
 * element, which keeps the browser's echo canceller informed; Web Audio only listens.
 */

const SILENCE_DB = -60;
const LOUD_DB = -12;
/** Speech stands this much above the room. */
const ABOVE_ROOM_DB = 10;
const QUIETEST_SPEECH_DB = -48;
/** Pauses inside a word are no pauses. */
const HANGOVER_MS = 250;

/** The level of one stream in decibels below full scale. */
export class Meter {
  /** @type {MediaStreamAudioSourceNode | null} */
  #source = null;
  #context;
  #analyser;
  #window = new Float32Array(2048);

  /** @param {AudioContext} context */
  constructor(context) {
    this.#context = context;
    this.#analyser = new AnalyserNode(context, { fftSize: this.#window.length });
  }

  /** @param {MediaStream} stream */
  listenTo(stream) {
    this.#source?.disconnect();
    this.#source = new MediaStreamAudioSourceNode(this.#context, { mediaStream: stream });
    this.#source.connect(this.#analyser);
  }

  /** @returns {number} dB below full scale, SILENCE_DB at the least */
  read() {
    this.#analyser.getFloatTimeDomainData(this.#window);
    const power = this.#window.reduce((sum, x) => sum + x * x, 0) / this.#window.length;
    return Math.max(SILENCE_DB, 10 * Math.log10(power + 1e-12));
  }
}

/**
 * @param {number} db
 * @returns {number} 0 for silence to 1 for loud, for the eye
 */
export function asHeight(db) {
  return Math.min(1, Math.max(0, (db - SILENCE_DB) / (LOUD_DB - SILENCE_DB)));
}

/** Tells speech from the room, by level: enough for a picture. The agent itself does not go by it. */
export class VoiceActivity {
  speaking = false;
  /** When speech was last heard; `speaking` holds on a little longer. */
  lastHeardMs = -Infinity;
  #roomDb = QUIETEST_SPEECH_DB - ABOVE_ROOM_DB;

  /**
   * @param {number} db
   * @param {number} nowMs
   */
  hear(db, nowMs) {
    if (db > Math.max(QUIETEST_SPEECH_DB, this.#roomDb + ABOVE_ROOM_DB)) this.lastHeardMs = nowMs;
    // The floor falls at once with the room, and rises so slowly that a sentence does not lift it.
    this.#roomDb = db < this.#roomDb ? db : Math.min(this.#roomDb + 0.02, -30);
    this.speaking = nowMs - this.lastHeardMs < HANGOVER_MS;
    return this.speaking;
  }
}
