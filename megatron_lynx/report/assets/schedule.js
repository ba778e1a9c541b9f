// All rows over time, below an axis. Rows of stages seen twice stand one above the other.

const GUTTER = 128;
const AXIS = 22;

class Schedule {
  constructor(canvas, island, range, theme) {
    Object.assign(this, { canvas, range, theme });
    this.byView = new Map(island.views.map((view) => [view.name, view.rows.map((row) => new Row(row, view, island.kinds, view.name))]));
    this.rows = [];
    this.selection = null;
    range.onChange(() => this.later());
    theme.onChange(() => this.later());
    new ResizeObserver(() => this.later()).observe(canvas);
  }

  show(names) {
    const rows = names.flatMap((name) => this.byView.get(name));
    this.rows = rows.map((row, place) => [row, place]).sort(([a, i], [b, j]) => a.data.stage - b.data.stage || i - j).map(([row]) => row);
    this.mixed = names.length > 1;
    this.dense = this.rows.length > 8;
    this.later();
  }

  later() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = null;
      this.draw();
    });
  }

  get height() {
    return AXIS + this.rows.reduce((sum, row) => sum + row.height(this.dense), 0);
  }

  draw() {
    const surface = fitted(this.canvas, this.height);
    const { context, width } = surface;
    this.width = width - GUTTER;
    drawAxis(context, { left: GUTTER, width: this.width, height: surface.height }, this.range, this.theme);
    let top = AXIS;
    for (const row of this.rows) {
      const height = row.height(this.dense);
      this.drawLabel(context, row, top);
      row.draw(surface, { left: GUTTER, top, width: this.width }, this.range, this.theme, this.dense);
      top += height;
    }
    this.drawSelection(context, surface.height);
    Object.assign(this.canvas.dataset, { start: this.range.start, end: this.range.end, rows: this.rows.length });
  }

  drawLabel(context, row, top) {
    const of = row.heights(this.dense);
    const middle = top + of.passes + of.compute / 2;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.font = "600 12.5px system-ui, sans-serif";
    context.fillStyle = this.theme.named.text;
    context.fillText(row.data.label, 0, middle);
    if (!this.mixed) return;
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = this.theme.named.soft;
    context.fillText(row.seen, 0, middle + 14);
  }

  drawSelection(context, height) {
    if (!this.selection) return;
    const [from, to] = this.selection;
    context.fillStyle = this.theme.named.mark;
    context.fillRect(Math.min(from, to), AXIS, Math.abs(to - from), height - AXIS);
  }

  timeAt(x) {
    return this.range.start + ((x - GUTTER) / this.width) * this.range.length;
  }

  // The row, the lane and the span under a point of the canvas; span -1 where there is none.
  hit(x, y) {
    let top = AXIS;
    for (const row of this.rows) {
      const height = row.height(this.dense);
      if (y >= top && y < top + height) {
        const found = row.laneAt(y - top, this.dense);
        const slack = (1.5 / this.width) * this.range.length;
        return { row, lane: found, span: found && x >= GUTTER ? found.lane.at(this.timeAt(x), slack) : -1 };
      }
      top += height;
    }
    return { row: null, lane: null, span: -1 };
  }
}

function drawAxis(context, box, range, theme) {
  const { step, found } = ticks(range.start, range.end, box.width / 110);
  context.font = "11.5px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "center";
  for (const at of found) {
    const x = box.left + ((at - range.start) / range.length) * box.width;
    context.fillStyle = theme.named.line;
    context.fillRect(x, AXIS - 4, 1, box.height - AXIS + 4);
    const text = formatTick(at, step);
    const half = context.measureText(text).width / 2;
    context.fillStyle = theme.named.soft;
    context.fillText(text, Math.min(Math.max(x, box.left + half), box.left + box.width - half), AXIS / 2 - 1);
  }
}
