/**
 * A line plot of the last POINTS values, drawn on a canvas, the newest at the right. It is drawn anew by itself when its
 * size changes, or the colours do.
 */

export const POINTS = 60;

/** @typedef {{ ink: string, values: (number | null)[] }} Line the newest value last; `ink`: the CSS variable of its colour */

export class Plot {
  #canvas;
  #pen;
  #least;
  #limit;
  /** What was drawn last. @type {Line[]} */
  #lines = [];

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {{ least: number, limit?: number }} scale the top of an idle plot; a limit that is drawn as a line
   */
  constructor(canvas, { least, limit }) {
    this.#canvas = canvas;
    this.#pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    this.#least = least;
    this.#limit = limit;
    const redraw = () => this.draw(this.#lines);
    new ResizeObserver(redraw).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }

  /** @param {Line[]} lines */
  draw(lines) {
    this.#lines = lines;
    const { width, height } = this.#fit();
    const style = getComputedStyle(this.#canvas);
    const ink = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
    const top = Math.max(this.#least, ...lines.flatMap(({ values }) => values.map((value) => value ?? 0))) * 1.1;
    const y = (/** @type {number} */ value) => height - 1 - (value / top) * (height - 14);
    this.#drawScale(top, width, y, ink);
    for (const line of lines) this.#drawLine(line.values, width, y, ink(line.ink));
  }

  /** @param {number} top @param {number} width @param {(value: number) => number} y @param {(name: string) => string} ink */
  #drawScale(top, width, y, ink) {
    const pen = this.#pen;
    pen.font = `11px ${ink("--sans")}`;
    for (let value = 0; value < top; value += spacing(top)) {
      pen.fillStyle = ink("--line");
      pen.fillRect(0, Math.round(y(value)), width, 1);
      pen.fillStyle = ink("--soft");
      pen.fillText(String(value), 0, y(value) - 3);
    }
    if (this.#limit === undefined) return;
    pen.strokeStyle = ink("--poor");
    pen.lineWidth = 1.5;
    pen.setLineDash([5, 4]);
    pen.beginPath();
    pen.moveTo(0, y(this.#limit));
    pen.lineTo(width, y(this.#limit));
    pen.stroke();
    pen.setLineDash([]);
  }

  /** @param {(number | null)[]} values @param {number} width @param {(value: number) => number} y @param {string} ink */
  #drawLine(values, width, y, ink) {
    const pen = this.#pen;
    pen.strokeStyle = ink;
    pen.lineWidth = 1.75;
    pen.lineJoin = "round";
    pen.beginPath();
    values.forEach((value, i) => {
      if (value === null) return;
      const x = width - ((values.length - 1 - i) / (POINTS - 1)) * width;
      if (i === 0 || values[i - 1] === null) pen.moveTo(x, y(value));
      else pen.lineTo(x, y(value));
    });
    pen.stroke();
  }

  #fit() {
    const { width, height } = this.#canvas.getBoundingClientRect();
    this.#canvas.width = Math.round(width * devicePixelRatio);
    this.#canvas.height = Math.round(height * devicePixelRatio);
    this.#pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    return { width, height };
  }
}

/** @param {number} top @returns {number} a round distance between lines, for three to six of them */
function spacing(top) {
  const size = 10 ** Math.floor(Math.log10(top / 3));
  return [5, 2, 1].map((step) => step * size).find((step) => top / step >= 3) ?? size;
}
