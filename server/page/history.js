// The last minutes, kept in this browser: counters only ever grow, so what happened in a stretch of
// time is the difference of two answers.

export const WINDOW_SECONDS = 300;
export const RATE_SECONDS = 20; // for the lines in the tiles: short, and yet more than one answer

export class History {
  constructor() {
    this.answers = []; // the oldest first
  }

  add(data) {
    const last = this.answers.at(-1);
    // Another process begins to count at 0.
    if (last && last.started !== data.started) this.answers = [];
    if (last && last.now === data.now) return; // the server gives one answer to several askers
    this.answers.push({
      now: data.now,
      started: data.started,
      prompt: data.tokens.prompt,
      generated: data.tokens.generated,
      finished: data.requests.finished,
      rejected: data.requests.rejected,
      failed: Object.fromEntries(data.requests.failed.map((row) => [`${row.method} ${row.code}`, row.count])),
      latency: data.latency,
    });
    while (this.answers[0].now < data.now - WINDOW_SECONDS - 5) this.answers.shift();
  }

  get last() {
    return this.answers.at(-1);
  }

  // The latest answer that is at least so old, or the oldest there is.
  before(seconds) {
    const from = this.last.now - seconds;
    return this.answers.findLast((answer) => answer.now <= from) ?? this.answers[0];
  }

  get windowStart() {
    return this.before(WINDOW_SECONDS);
  }

  get covered() {
    return this.last.now - this.windowStart.now;
  }
}

// {name: how much it grew}
export function grown(from, to) {
  return Object.fromEntries(Object.entries(to).map(([name, value]) => [name, value - (from[name] ?? 0)]));
}

export function grownHistogram(from, to) {
  if (!to) return undefined;
  if (!from || from.bounds.length !== to.bounds.length) return to;
  return {
    count: to.count - from.count,
    sum: to.sum - from.sum,
    bounds: to.bounds,
    cumulative: to.cumulative.map((value, i) => value - from.cumulative[i]),
  };
}

// Linear within a bucket, as PromQL's histogram_quantile; beyond the last bound it is that bound.
export function quantile(histogram, q) {
  if (!histogram || histogram.count <= 0) return NaN;
  const rank = q * histogram.count;
  const i = histogram.cumulative.findIndex((upTo) => upTo >= rank);
  if (i < 0) return histogram.bounds.at(-1);
  const low = i === 0 ? 0 : histogram.bounds[i - 1];
  const before = i === 0 ? 0 : histogram.cumulative[i - 1];
  const inside = histogram.cumulative[i] - before;
  return inside <= 0 ? histogram.bounds[i] : low + ((histogram.bounds[i] - low) * (rank - before)) / inside;
}

export const sum = (object) => Object.values(object).reduce((all, value) => all + value, 0);

export function reusedShare(prompt) {
  const all = sum(prompt);
  return all > 0 ? 1 - (prompt.computed ?? 0) / all : NaN;
}
