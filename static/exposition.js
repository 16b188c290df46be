/**
 * Prometheus' text format, as far as the operator page needs it. Pure.
 */

/**
 * @typedef {object} Sample
 * @property {Record<string, string>} labels
 * @property {number} value
 */

/** Cumulative counts by upper bound. @typedef {Map<number, number>} Buckets */

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** What one scrape said, by name of the metric. */
export class Exposition {
  /** @type {Map<string, Sample[]>} */
  #samples = new Map();

  /** @param {string} text */
  constructor(text) {
    for (const line of text.split("\n")) {
      const [, name, labels = "", value] = LINE.exec(line) ?? [];
      if (!name) continue;
      const sample = { labels: readLabels(labels), value: readNumber(value) };
      this.#samples.set(name, [...(this.#samples.get(name) ?? []), sample]);
    }
  }

  /**
   * @param {string} name
   * @returns {Sample[]}
   */
  all(name) {
    return this.#samples.get(name) ?? [];
  }

  /**
   * @param {string} name
   * @returns {number | null} the sum over all labels; null where there is no such metric
   */
  sum(name) {
    const samples = this.all(name);
    return samples.length ? samples.reduce((sum, sample) => sum + sample.value, 0) : null;
  }

  /**
   * @param {string} name of a histogram
   * @returns {Buckets}
   */
  buckets(name) {
    return new Map(this.all(`${name}_bucket`).map(({ labels, value }) => [readNumber(labels.le), value]));
  }
}

/**
 * A quantile of what was counted between two scrapes, taken as spread evenly inside its bucket.
 * @param {Buckets} before
 * @param {Buckets} after
 * @param {number} quantile 0..1
 * @returns {number | null} null if nothing was counted
 */
export function quantileBetween(before, after, quantile) {
  const counts = [...after].map(([bound, count]) => /** @type {const} */ ([bound, count - (before.get(bound) ?? 0)]));
  const total = counts.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  const wanted = quantile * total;
  let [lower, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= wanted) {
      return bound === Infinity ? lower : lower + ((bound - lower) * (wanted - below)) / Math.max(1, count - below);
    }
    [lower, below] = [bound, count];
  }
  return lower;
}

/** @param {string} text */
function readLabels(text) {
  return Object.fromEntries([...text.matchAll(LABEL)].map(([, name, value]) => [name, value.replace(/\\(.)/g, "$1")]));
}

/** @param {string} text */
function readNumber(text) {
  return text === "+Inf" ? Infinity : Number(text);
}
