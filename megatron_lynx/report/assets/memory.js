// What each stage's layers hold over the same stretch of time: kinds stacked, the most of each column of pixels, one scale for all.

class MemoryChart {
  constructor(canvas, island, range, theme) {
    Object.assign(this, { canvas, range, theme });
    this.kinds = new Map(island.memory_kinds.map((kind) => [kind.name, kind]));
    this.byView = new Map(island.views.map((view) => [view.name, view.rows.filter((row) => row.memory).map((row) => new Curve(row, view.name))]));
    this.curves = [];
    range.onChange(() => this.later());
    theme.onChange(() => this.later());
    new ResizeObserver(() => this.later()).observe(canvas);
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => { byId("tooltip").hidden = true; });
  }

  show(names) {
    this.curves = names.flatMap((name) => this.byView.get(name)).sort((a, b) => a.row.stage - b.row.stage);
    this.most = Math.max(1, ...this.curves.map((curve) => curve.peak));
    this.each = this.curves.length > 8 ? 44 : 72;
    this.later();
    return this.curves.length > 0;
  }

  later() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = null;
      this.draw();
    });
  }

  draw() {
    const surface = fitted(this.canvas, AXIS + this.each * this.curves.length);
    const { context } = surface;
    this.width = surface.width - GUTTER;
    drawAxis(context, { left: GUTTER, width: this.width, height: surface.height }, this.range, this.theme);
    this.curves.forEach((curve, place) => this.drawCurve(surface, curve, AXIS + place * this.each));
  }

  drawCurve({ context, ratio }, curve, top) {
    const high = this.each - 14;
    const columns = Math.round(this.width * ratio);
    const shares = curve.columns(this.range.start, this.range.end, columns).map((bytes) => bytes / this.most);
    const pixels = curve.names.map((name) => this.theme.pixel(this.kinds.get(name)));
    const image = painted(context, shares, columns, Math.round(high * ratio), pixels);
    context.putImageData(image, Math.round(GUTTER * ratio), Math.round(top * ratio));
    context.fillStyle = this.theme.named.line;
    context.fillRect(GUTTER, top + high, this.width, 1);
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillStyle = this.theme.named.text;
    context.font = "600 12.5px system-ui, sans-serif";
    context.fillText(curve.row.label, 0, top + high / 2 - 8);
    context.fillStyle = this.theme.named.soft;
    context.font = "11px system-ui, sans-serif";
    context.fillText(`at most ${formatBytes(curve.peak)}`, 0, top + high / 2 + 8);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const curve = this.curves[Math.floor((event.clientY - box.top - AXIS) / this.each)];
    const tooltip = byId("tooltip");
    const x = event.clientX - box.left;
    tooltip.hidden = !curve || x < GUTTER;
    if (tooltip.hidden) return;
    const time = this.range.start + ((x - GUTTER) / this.width) * this.range.length;
    const lines = curve.at(time).map((bytes, kind) => `${this.kinds.get(curve.names[kind]).label}: ${formatBytes(bytes)}`);
    tooltip.replaceChildren(element("div", {}, element("b", {}, `${curve.row.label} at ${formatSeconds(time / 1e9)}`)), ...lines.map((line) => element("div", {}, line)));
    tooltip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - 240)}px`;
    tooltip.style.top = `${event.clientY + 18}px`;
  }
}

class Curve {
  constructor(row, seen) {
    Object.assign(this, { row, seen });
    this.times = Float64Array.from(row.memory.time_ns);
    this.names = Object.keys(row.memory.kinds);
    this.bytes = this.names.map((name) => Float64Array.from(row.memory.kinds[name]));
    this.totals = this.times.map((_, place) => this.bytes.reduce((sum, kind) => sum + kind[place], 0));
    this.peak = this.totals.reduce((most, total) => Math.max(most, total), 0);
  }

  // The last point at or before a time, or -1.
  before(time) {
    let [low, high] = [0, this.times.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.times[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  at(time) {
    const place = this.before(time);
    return this.bytes.map((kind) => (place < 0 ? 0 : kind[place]));
  }

  // Of each column the fullest moment, kind by kind.
  columns(from, to, columns) {
    const held = new Float64Array(this.names.length * columns);
    let place = this.before(from);
    for (let column = 0; column < columns; column += 1) {
      const end = from + ((column + 1) / columns) * (to - from);
      let most = place;
      for (; place + 1 < this.times.length && this.times[place + 1] < end; place += 1) if (most < 0 || this.totals[place + 1] >= this.totals[most]) most = place + 1;
      if (most >= 0) this.bytes.forEach((kind, which) => { held[which * columns + column] = kind[most]; });
    }
    return held;
  }
}
