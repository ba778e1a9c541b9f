// What there is to say of one bar: beside the pointer, and, when it is clicked, below the schedule.

class Details {
  constructor(tooltip, panel) {
    Object.assign(this, { tooltip, panel });
  }

  point({ row, span }, event) {
    if (span < 0) return this.leave();
    this.tooltip.replaceChildren(...linesOf(row, span).slice(0, 6).map((line) => element("div", {}, ...line)));
    this.tooltip.hidden = false;
    const { width, height } = this.tooltip.getBoundingClientRect();
    this.tooltip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - width - 8)}px`;
    this.tooltip.style.top = `${event.clientY + 18 + height > window.innerHeight ? event.clientY - height - 12 : event.clientY + 18}px`;
    return undefined;
  }

  leave() {
    this.tooltip.hidden = true;
  }

  pin({ row, span }) {
    this.panel.hidden = span < 0;
    if (span >= 0) this.panel.replaceChildren(...linesOf(row, span).map((line) => element("div", {}, ...line)));
  }
}

function linesOf(row, span) {
  const { start_ns: start, length_ns: length, micro_batch: micro, subject } = row.data.spans;
  const about = row.subjects[subject[span]];
  const kind = row.kinds[row.kindOf(span)];
  const lines = [[element("b", {}, about.name)], [`${kind.label}, ${row.data.label}, ${row.seen}`]];
  lines.push([`${formatSeconds(length[span] / 1e9)}, from ${formatSeconds(start[span] / 1e9)} on`]);
  if (micro[span] !== null) lines.push([`micro-batch ${micro[span]}`]);
  if (kind.lane === "communication" || kind.name === "wait") {
    const used = usedIn(row, start[span], start[span] + length[span]);
    if (length[span]) lines.push([`${formatSeconds(used.ns / 1e9)} of it used (${((100 * used.ns) / length[span]).toFixed(0)} %)${used.names.length ? `: ${used.names.join(", ")}` : ""}`]);
  } else if (about.window) {
    lines.push([["on_demand", "flushed"].includes(about.window) ? "no wait hides it" : `hidden by ${about.window}`]);
  }
  return lines;
}

// What ran in a wait: nanoseconds and names.
function usedIn(row, from, to) {
  const { lane } = row.lanes[0];
  const names = new Set();
  let ns = 0;
  for (let place = lane.from(from); place < lane.count && lane.start[place] < to; place += 1) {
    if (!["hidden", "weight_gradient"].includes(row.kinds[lane.kind[place]].name)) continue;
    ns += Math.min(to, lane.end[place]) - Math.max(from, lane.start[place]);
    names.add(row.subjects[row.data.spans.subject[lane.owner[place]]].name);
  }
  return { ns, names: [...names] };
}
