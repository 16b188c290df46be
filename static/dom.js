/**
 * Elements of the page by their ids, and what is written into them; shared by the caller's page and the operator's.
 */

export const find = (/** @type {string} */ id) => /** @type {HTMLElement} */ (document.getElementById(id));
export const input = (/** @type {string} */ id) => /** @type {HTMLInputElement} */ (document.getElementById(id));
export const select = (/** @type {string} */ id) => /** @type {HTMLSelectElement} */ (document.getElementById(id));
export const button = (/** @type {string} */ id) => /** @type {HTMLButtonElement} */ (document.getElementById(id));
export const canvas = (/** @type {string} */ id) => /** @type {HTMLCanvasElement} */ (document.getElementById(id));

/** @param {string} tag @param {string} text */
export function element(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}

/** @param {number} seconds @returns {string} as 1:05 */
export function asClock(seconds) {
  return `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
}
