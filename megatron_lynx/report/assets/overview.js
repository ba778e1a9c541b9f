// The whole step in one strip, with the part that is drawn marked; dragging moves it.

class Overview {
  constructor(canvas, schedule, range, theme) {
    Object.assign(this, { canvas, schedule, range, theme });
    range.onChange(() => this.later());
    theme.onChange(() => this.anew());
    new ResizeObserver(() => this.later()).observe(canvas);
    const move = (event) => {
      const at = ((event.clientX - canvas.getBoundingClientRect().left - GUTTER) / this.width) * range.whole;
      range.set(at - range.length / 2, at + range.length / 2);
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      move(event);
    });
    canvas.addEventListener("pointermove", (event) => { if (event.buttons & 1) move(event); });
  }

  later() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = null;
      this.draw();
    });
  }

  // The rows' compute lanes, one below the other; they are drawn anew only when they, the width or the theme change.
  painted(columns, high) {
    const strip = element("canvas", { width: columns, height: high });
    const { rows } = this.schedule;
    const each = Math.max(1, Math.floor(high / Math.max(1, rows.length)));
    rows.forEach((row, place) => {
      const shares = sharesOf(row.lanes[0].lane, 0, this.range.whole, columns, row.kinds.length);
      strip.getContext("2d").putImageData(painted(strip.getContext("2d"), shares, columns, each, row.kinds.map((kind) => this.theme.pixel(kind))), 0, place * each);
    });
    return strip;
  }

  anew() {
    this.strip = null;
    this.later();
  }

  draw() {
    const surface = fitted(this.canvas, 30);
    const { context, ratio } = surface;
    this.width = surface.width - GUTTER;
    if (this.strip?.width !== Math.round(this.width * ratio)) this.strip = this.painted(Math.round(this.width * ratio), Math.round(24 * ratio));
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.drawImage(this.strip, Math.round(GUTTER * ratio), Math.round(3 * ratio));
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = "11.5px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = this.theme.named.soft;
    context.fillText("whole step", 0, 15);
    const left = GUTTER + (this.range.start / this.range.whole) * this.width;
    const right = GUTTER + (this.range.end / this.range.whole) * this.width;
    context.globalAlpha = 0.72;
    context.fillStyle = this.theme.named.page;
    context.fillRect(GUTTER, 0, left - GUTTER, 30);
    context.fillRect(right, 0, GUTTER + this.width - right, 30);
    context.globalAlpha = 1;
    context.strokeStyle = this.theme.named.accent;
    context.lineWidth = 1.5;
    context.strokeRect(left + 0.75, 1, Math.max(2, right - left - 1.5), 28);
  }
}
