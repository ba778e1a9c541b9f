// The front: what the fullest device holds, and the step. Plans are dots, stock Megatron's settings diamonds.

const FRAME = { width: 640, height: 330, left: 62, right: 20, top: 24, bottom: 44 };

function scatterOf(points, capacity, choose) {
  const bytes = [...points.map((point) => point.memory_bytes), ...(capacity ? [capacity] : [])];
  const x = scale(bytes, FRAME.left, FRAME.width - FRAME.right);
  const y = scale(points.map((point) => point.step_s), FRAME.height - FRAME.bottom, FRAME.top);
  const unit = Math.max(...bytes) >= 2 ** 30 ? ["GiB", 2 ** 30] : ["MiB", 2 ** 20];
  const plans = points.filter((point) => point.by === "plan").sort((a, b) => a.memory_bytes - b.memory_bytes || b.step_s - a.step_s);
  const marks = points.map((point) => markOf(point, x, y, choose));
  const svg = element("svg:svg", { viewBox: `0 0 ${FRAME.width} ${FRAME.height}`, role: "group", "aria-label": "memory of the fullest device against the step's seconds" },
    ...axisOf(x, y, unit),
    ...(capacity ? limitOf(x(capacity)) : []),
    element("svg:polyline", { class: "line", points: plans.map((point) => `${x(point.memory_bytes)},${y(point.step_s)}`).join(" ") }),
    ...marks.flat());
  return { svg, choose: (chosen) => points.forEach((point, place) => marks[place][0].classList.toggle("chosen", point === chosen)) };
}

function scale(values, from, to) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const room = 0.08 * (most - least) || 0.05 * most || 1;
  const [low, high] = [Math.max(0, least - room), most + room];
  return Object.assign((value) => from + ((value - low) / (high - low)) * (to - from), { low, high });
}

function axisOf(x, y, [name, size]) {
  const { left, right, top, bottom, width, height } = FRAME;
  const across = ticks(x.low / size, x.high / size, 7);
  const up = ticks(y.low, y.high, 5);
  return [
    ...across.found.map((at) => element("svg:text", { x: x(at * size), y: height - bottom + 18, "text-anchor": "middle" }, trimmed(at, across.step))),
    ...up.found.flatMap((at) => [
      element("svg:line", { class: "axis", x1: left, x2: width - right, y1: y(at), y2: y(at) }),
      element("svg:text", { x: left - 8, y: y(at) + 4, "text-anchor": "end" }, trimmed(at, up.step)),
    ]),
    element("svg:line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }),
    element("svg:text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, `fullest device, ${name}`),
    element("svg:text", { x: -(top + height - bottom) / 2, y: 14, transform: "rotate(-90)", "text-anchor": "middle" }, "step, seconds"),
  ];
}

const trimmed = (value, step) => value.toFixed(Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)));

function limitOf(x) {
  return [
    element("svg:line", { class: "capacity", x1: x, x2: x, y1: FRAME.top, y2: FRAME.height - FRAME.bottom }),
    element("svg:text", { x, y: FRAME.top - 7, "text-anchor": "middle" }, "may be used"),
  ];
}

function markOf(point, x, y, choose) {
  const [at, high] = [x(point.memory_bytes), y(point.step_s)];
  const title = element("svg:title", {}, `${point.label}: ${formatBytes(point.memory_bytes)}, ${formatSeconds(point.step_s)}`);
  const handlers = { tabindex: 0, role: "button", "aria-label": title.textContent, onclick: () => choose(point), onkeydown: (event) => { if (event.key === "Enter") choose(point); } };
  if (point.by === "plan") {
    const mark = element("svg:circle", { class: "plan", cx: at, cy: high, r: point.shown ? 7 : 5, ...handlers }, title);
    return point.shown ? [mark, element("svg:text", { class: "strong", x: at, y: high + 22, "text-anchor": "middle" }, point.label)] : [mark];
  }
  const mark = element("svg:path", { class: "stock", d: `M${at} ${high - 6}L${at + 6} ${high}L${at} ${high + 6}L${at - 6} ${high}Z`, ...handlers }, title);
  const left = at > FRAME.width - 140;
  return [mark, element("svg:text", { x: left ? at - 10 : at + 10, y: high - 6, "text-anchor": left ? "end" : "start" }, point.label)];
}
