// One row of the schedule: a stage, or a rank of it. Its lanes, from top to bottom:
//
//     F 3   B 0   ...     which micro-batch passes
//     ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇     compute, with the waits as holes and what ran in them
//     ▔▔▔  ▔▔ ▔▔▔▔        what was waited for
//     ▔▔▔▔▔▔              copies to the host and back, where there are any

class Row {
  constructor(data, view, kinds, seen) {
    this.data = data;
    this.seen = seen;
    this.subjects = view.subjects;
    this.kinds = kinds;
    this.places = new Map(kinds.map((kind, place) => [kind.name, place]));
    this.lanes = ["compute", "communication", "copies"].map((name) => ({ name, lane: this.laneOf(name) })).filter(({ name, lane }) => name === "compute" || lane.count);
    this.passes = this.passesOf();
  }

  kindOf(span) {
    return this.places.get(this.subjects[this.data.spans.subject[span]].kind);
  }

  laneOf(name) {
    const chosen = [];
    for (let span = 0; span < this.data.spans.subject.length; span += 1) if (this.kinds[this.kindOf(span)].lane === name) chosen.push(span);
    return new Lane(this.data.spans, chosen, (span) => this.kindOf(span));
  }

  // Stretches of halves of one pass of one micro-batch.
  passesOf() {
    const { start_ns: start, length_ns: length, micro_batch: micro } = this.data.spans;
    const passes = [];
    for (let span = 0; span < start.length; span += 1) {
      const kind = this.kinds[this.kindOf(span)].name;
      if (kind !== "forward" && kind !== "backward") continue;
      const last = passes[passes.length - 1];
      if (last && last.kind === kind && last.micro === micro[span]) last.end = Math.max(last.end, start[span] + length[span]);
      else passes.push({ kind, micro: micro[span], start: start[span], end: start[span] + length[span] });
    }
    return passes;
  }

  heights(dense) {
    return { passes: 15, compute: dense ? 20 : 32, communication: dense ? 7 : 12, copies: 7, gap: 2, below: dense ? 8 : 14 };
  }

  height(dense) {
    const of = this.heights(dense);
    return of.passes + this.lanes.reduce((sum, { name }) => sum + of[name] + of.gap, 0) + of.below;
  }

  // The lane at a height below the row's top.
  laneAt(y, dense) {
    const of = this.heights(dense);
    let top = of.passes;
    for (const each of this.lanes) {
      if (y >= top - 1 && y <= top + of[each.name] + 1) return each;
      top += of[each.name] + of.gap;
    }
    return null;
  }

  draw(surface, box, range, theme, dense) {
    const of = this.heights(dense);
    this.drawPasses(surface.context, box, range, theme, of);
    let top = box.top + of.passes;
    for (const { name, lane } of this.lanes) {
      this.drawLane(surface, lane, { ...box, top, height: of[name] }, range, theme, name === "compute");
      top += of[name] + of.gap;
    }
  }

  drawLane({ context, ratio }, lane, box, range, theme, compute) {
    const [columns, rows] = [Math.round(box.width * ratio), Math.round(box.height * ratio)];
    const shares = sharesOf(lane, range.start, range.end, columns, this.kinds.length);
    const image = painted(context, shares, columns, rows, this.kinds.map((kind) => theme.pixel(kind)));
    context.putImageData(image, Math.round(box.left * ratio), Math.round(box.top * ratio));
    this.drawNames(context, lane, box, range, theme, compute);
  }

  drawNames(context, lane, box, range, theme, compute) {
    const scale = box.width / range.length;
    const named = new Set();
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "center";
    const first = lane.from(range.start);
    if (lane.from(range.end) - first > 4 * box.width) return;
    for (let place = first; place < lane.count && lane.start[place] < range.end; place += 1) {
      const left = box.left + Math.max(0, (lane.start[place] - range.start) * scale);
      const right = box.left + Math.min(box.width, (lane.end[place] - range.start) * scale);
      if (right - left < 3) continue;
      const owner = lane.owner[place];
      if (this.data.spans.start_ns[owner] === lane.start[place] && left > box.left) {
        context.fillStyle = theme.named.page;
        context.fillRect(left - 0.5, box.top, 1, box.height);
      }
      const text = right - left < 14 || box.height < 12 || named.has(owner) ? "" : this.shortName(context, owner, right - left - 6);
      if (!text) continue;
      named.add(owner);
      context.fillStyle = inkOn(theme.colour(this.kinds[lane.kind[place]]));
      context.fillText(text, (left + right) / 2, box.top + box.height / 2 + 0.5);
    }
  }

  // The longest name that fits: "attention 12", "A12", or none.
  shortName(context, span, width) {
    const subject = this.subjects[this.data.spans.subject[span]];
    const kind = this.kinds[this.kindOf(span)];
    if (kind.name === "wait") return "";
    const half = subject.half && subject.layer !== null ? [`${subject.half} ${subject.layer}`, `${subject.half[0].toUpperCase()}${subject.layer}`] : [];
    const names = kind.lane !== "compute" ? [subject.window ?? subject.name] : subject.name.startsWith("weight gradient") ? [subject.name] : half;
    return names.find((name) => context.measureText(name).width <= width) ?? "";
  }

  drawPasses(context, box, range, theme, of) {
    const scale = box.width / range.length;
    const shown = this.passes.filter((pass) => pass.end > range.start && pass.start < range.end);
    if (shown.length > box.width) return;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "alphabetic";
    context.textAlign = "center";
    for (const pass of shown) {
      const left = box.left + Math.max(0, (pass.start - range.start) * scale);
      const right = box.left + Math.min(box.width, (pass.end - range.start) * scale);
      context.fillStyle = theme.colour(this.kinds[this.places.get(pass.kind)]);
      context.fillRect(left, box.top + of.passes - 3, Math.max(0.5, right - left - 1), 1.5);
      if (pass.micro === null) continue;
      const names = [`${pass.kind} ${pass.micro}`, `${pass.kind[0].toUpperCase()}${pass.micro}`, `${pass.micro}`];
      const text = names.find((name) => context.measureText(name).width + 5 <= right - left);
      if (!text) continue;
      context.fillStyle = theme.named.soft;
      context.fillText(text, (left + right) / 2, box.top + of.passes - 5);
    }
  }
}

// Black or white, whichever is read more easily on a colour.
function inkOn(colour) {
  const value = parseInt(colour.slice(1), 16);
  const light = 0.2126 * ((value >> 16) & 255) + 0.7152 * ((value >> 8) & 255) + 0.0722 * (value & 255);
  return light > 120 ? "#111418" : "#ffffff";
}
