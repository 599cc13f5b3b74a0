// Numbers and times as people read them. What is not known is a dash.

export const DASH = "–";

export function number(value, digits = 1) {
  if (value === undefined || value === null) return DASH;
  if (Number.isInteger(value) || Math.abs(value) >= 100) return Math.round(value).toLocaleString("en");
  return value.toFixed(digits);
}

/** With at most four characters where a number has little room: 320, 1.2k, 45k, 3.4M. */
export function compact(value) {
  if (value === undefined || value === null) return DASH;
  const units = ["", "k", "M", "G"];
  let rest = value;
  let unit = 0;
  while (rest >= 999.5 && unit < units.length - 1) {
    rest /= 1000;
    unit += 1;
  }
  return `${rest.toFixed(unit > 0 && rest < 9.95 ? 1 : 0)}${units[unit]}`;
}

export function percent(share) {
  return share === undefined || share === null ? DASH : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

export function milliseconds(value) {
  if (value === undefined || value === null) return DASH;
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  return value >= 100 ? `${Math.round(value)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} ms`;
}

/** A time that is round, without digits that say nothing: 2.5 ms, 20 ms, 1 s. */
export function roundTime(seconds) {
  return seconds >= 1 ? `${Number(seconds.toPrecision(3))} s` : `${Number((1000 * seconds).toPrecision(3))} ms`;
}

export function bytes(value) {
  if (value === undefined || value === null) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value;
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${size.toFixed(size < 10 && unit > 0 ? 1 : 0)} ${units[unit]}`;
}

/** 42 s, 3 min, 5.2 h, 2.4 d. */
export function duration(seconds) {
  if (seconds === undefined || seconds === null) return DASH;
  const whole = Math.max(0, seconds);
  if (whole < 10) return `${whole.toFixed(1)} s`;
  if (whole < 120) return `${Math.round(whole)} s`;
  if (whole < 7200) return `${Math.round(whole / 60)} min`;
  return whole < 172_800 ? `${(whole / 3600).toFixed(1)} h` : `${(whole / 86_400).toFixed(1)} d`;
}

export function clock(unixSeconds) {
  return new Date(1000 * unixSeconds).toLocaleTimeString("en-GB");
}

/** "1 engine", "2 engines". */
export function counted(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}
