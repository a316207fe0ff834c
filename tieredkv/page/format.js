// Numbers, times and names as people read them. All take what JSON holds and return text.

const NONE = "–";
const exactNumber = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clockTime = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const minuteTime = new Intl.DateTimeFormat("en-GB", { timeStyle: "short" });
const fullTime = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });

/** 1234567 as "1,234,567". */
export const exact = (n) => (n == null ? NONE : exactNumber.format(n));

/** 31415 as "31k", 1234 as "1.2k". */
export function count(n) {
  if (n == null) return NONE;
  const units = ["", "k", "M", "G", "T"];
  let i = 0;
  while (n >= 999.5 && i < units.length - 1) {
    n /= 1000;
    i += 1;
  }
  return (i && n < 9.95 ? n.toFixed(1) : n.toFixed(0)) + units[i];
}

/** Powers of 1000, as the command line writes them. */
export function bytes(n) {
  if (n == null) return NONE;
  const units = ["B", "KB", "MB", "GB", "TB"];
  let i = 0;
  while (n >= 999.95 && i < units.length - 1) {
    n /= 1000;
    i += 1;
  }
  return `${i ? n.toFixed(1) : n.toFixed(0)} ${units[i]}`;
}

/** A part of a whole as "84%"; only what is nothing is "0%", and only what is all "100%". */
export function share(part, whole) {
  if (!whole) return NONE;
  const percent = (100 * part) / whole;
  if (percent > 0 && percent < 1) return "<1%";
  if (percent < 100 && percent > 99) return ">99%";
  return `${percent.toFixed(0)}%`;
}

/** Seconds as "42 s", "12 min", "3 h 5 min" or "2 d 4 h". */
export function duration(seconds) {
  if (seconds == null) return NONE;
  if (seconds === 0) return "0 s";
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 59.5) return `${seconds.toFixed(0)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** Seconds as "5 s", "12 min", "3 h" or "10 d": the largest unit, and no more than there are. */
export function about(seconds) {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const [unit, size] = units.find(([, n]) => seconds >= n) ?? units.at(-1);
  return `${Math.floor(seconds / size)} ${unit}`;
}

/** How long ago, at the time `now`, something was. */
export function ago(time, now) {
  if (!time) return NONE;
  return now - time < 1 ? "now" : `${about(now - time)} ago`;
}

/** How long from `now` something will be. */
export function ahead(time, now) {
  if (!time) return "never";
  return time <= now ? "expired" : `in ${about(time - now)}`;
}

/** Milliseconds without their unit: columns of them are compared. */
export function milliseconds(n) {
  if (n == null) return NONE;
  return n > 0 && n < 0.5 ? "<1" : exactNumber.format(n);
}

export const clock = (time) => clockTime.format(time * 1000);
export const minute = (time) => minuteTime.format(time * 1000);
export const moment = (time) => (time ? fullTime.format(time * 1000) : "");

/** "1 block", "3 blocks". */
export const plural = (n, noun, text = exact(n)) => `${text} ${noun}${n === 1 ? "" : "s"}`;

/** What is left of a model's name or path when its folders are taken away. */
export const modelName = (name) => name.split("/").filter(Boolean).pop() ?? name;
