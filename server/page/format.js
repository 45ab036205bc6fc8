// Numbers for people. Every function gives "–" where there is nothing to say.

const NONE = '–';
const is = (value) => typeof value === 'number' && Number.isFinite(value);

export function count(value) {
  if (!is(value)) return NONE;
  if (Math.abs(value) >= 1e9) return `${trim(value / 1e9)} G`;
  if (Math.abs(value) >= 1e7) return `${trim(value / 1e6)} M`;
  return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, '\u202f');
}

// Three digits that mean something.
export function trim(value) {
  if (!is(value)) return NONE;
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 100) return count(value);
  if (size >= 1) return Number(value.toPrecision(3)).toString();
  if (size >= 0.001) return Number(value.toPrecision(2)).toString();
  const [digits, power] = value.toExponential(1).split('e');
  return `${digits}e${Number(power)}`;
}

export function share(value) {
  if (!is(value)) return NONE;
  const percent = value * 100;
  if (percent !== 0 && Math.abs(percent) < 0.01) return `${percent < 0 ? '−' : ''}< 0.01 %`;
  return `${percent.toFixed(Math.abs(percent) < 10 && percent !== 0 ? (Math.abs(percent) < 1 ? 2 : 1) : 0)} %`;
}

export const part = (some, all) => (all > 0 ? some / all : NaN);

export function seconds(value) {
  if (!is(value)) return NONE;
  if (value < 1) return `${trim(value * 1000)} ms`;
  if (value < 120) return `${trim(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${trim(value / 3600)} h`;
  return `${Math.round(value / 86400)} days`;
}

export function bytes(value) {
  if (!is(value)) return NONE;
  for (const [unit, size] of [['GiB', 2 ** 30], ['MiB', 2 ** 20], ['KiB', 1024]]) {
    if (value >= size) return `${trim(value / size)} ${unit}`;
  }
  return `${value} B`;
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString([], { hour12: false });
}
