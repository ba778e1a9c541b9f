// Quantities as people read them: 0.0123 s is "12.3 ms", 1536 bytes are "1.50 KiB".

const digits = (value) => (Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2);

function formatSeconds(seconds) {
  if (seconds === 0) return "0 s";
  const [unit, size] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]].find(([, each]) => Math.abs(seconds) >= 0.9995 * each) ?? ["ns", 1e-9];
  return `${(seconds / size).toFixed(digits(seconds / size))} ${unit}`;
}

function formatBytes(bytes) {
  const found = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].find(([, each]) => Math.abs(bytes) >= each);
  return found ? `${(bytes / found[1]).toFixed(digits(bytes / found[1]))} ${found[0]}` : `${bytes} B`;
}

function formatCell(value, unit) {
  if (value === null || value === undefined || value === "") return "–";
  if (unit === "s") return formatSeconds(value);
  if (unit === "bytes") return formatBytes(value);
  if (unit === "share") return `${(100 * value).toFixed(1)} %`;
  return unit === "count" ? value.toLocaleString("en") : String(value);
}

// A step between ticks of 1, 2 or 5 times a power of ten, so that there are about `wanted` of them.
function tickStep(length, wanted) {
  const rough = length / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
}

function ticks(from, to, wanted) {
  const step = tickStep(to - from, wanted);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return { step, found };
}

// A time in nanoseconds, with as many digits as ticks this far apart need.
function formatTick(ns, step) {
  const [unit, size] = [["s", 1e9], ["ms", 1e6], ["µs", 1e3]].find(([, each]) => step >= each / 100) ?? ["ns", 1];
  const decimals = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
  return `${(ns / size).toFixed(Math.min(decimals, 6))} ${unit}`;
}
