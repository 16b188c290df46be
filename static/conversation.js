/**
 * What was said: the server's events folded into turns. Pure; time is an argument.
 *
 * The agent's words come as text. The model does not write down the caller's, so a turn of the caller is a length.
 */

/**
 * @typedef {object} Turn
 * @property {string} id
 * @property {"you" | "agent"} who
 * @property {number} startedMs since the call began
 * @property {number | null} endedMs null: still open
 * @property {string} text
 * @property {boolean} interrupted the caller spoke, and the agent gave way
 */

export class Conversation {
  /** @type {Turn[]} */
  turns = [];
  /** Which turn a response speaks. @type {Map<string, Turn>} */
  #byResponse = new Map();

  /**
   * Take in an event of the server.
   * @param {Record<string, any>} event
   * @param {number} nowMs since the call began
   * @returns {Turn | null} the turn that it changed
   */
  hear(event, nowMs) {
    switch (event.type) {
      case "response.output_audio_transcript.delta":
        return this.#append(event, nowMs);
      case "response.output_audio_transcript.done":
        return this.#finish(event, nowMs);
      case "output_audio_buffer.cleared":
        return this.#interrupt(event.response_id, nowMs);
      case "response.done":
        return event.response.status === "cancelled" ? this.#interrupt(event.response.id, nowMs) : null;
      case "input_audio_buffer.speech_started":
        return this.#open(event.item_id, "you", nowMs);
      case "input_audio_buffer.speech_stopped":
        return this.#close(event.item_id, nowMs);
      default:
        return null;
    }
  }

  /**
   * The call is over.
   * @param {number} nowMs
   * @returns {Turn[]} the turns that were still open
   */
  end(nowMs) {
    const open = this.turns.filter((turn) => turn.endedMs === null);
    for (const turn of open) turn.endedMs = nowMs;
    return open;
  }

  /** @param {Record<string, any>} event @param {number} nowMs */
  #append(event, nowMs) {
    const turn = this.#turn(event.item_id) ?? this.#open(event.item_id, "agent", nowMs);
    this.#byResponse.set(event.response_id, turn);
    turn.text += event.delta;
    return turn;
  }

  /** @param {Record<string, any>} event @param {number} nowMs */
  #finish(event, nowMs) {
    const turn = this.#turn(event.item_id);
    if (!turn) return null;
    turn.text = event.transcript ?? turn.text;
    turn.endedMs = nowMs;
    return turn;
  }

  /** @param {string} responseId @param {number} nowMs */
  #interrupt(responseId, nowMs) {
    const turn = this.#byResponse.get(responseId);
    if (!turn) return null;
    turn.interrupted = true;
    turn.endedMs ??= nowMs;
    return turn;
  }

  /** @param {string} id @param {Turn["who"]} who @param {number} nowMs */
  #open(id, who, nowMs) {
    const turn = { id, who, startedMs: nowMs, endedMs: null, text: "", interrupted: false };
    this.turns.push(turn);
    return turn;
  }

  /** @param {string} id @param {number} nowMs */
  #close(id, nowMs) {
    const turn = this.#turn(id);
    if (turn) turn.endedMs = nowMs;
    return turn;
  }

  /** @param {string} id */
  #turn(id) {
    return this.turns.findLast((turn) => turn.id === id) ?? null;
  }
}
