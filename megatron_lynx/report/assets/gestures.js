// What a reader does with the schedule: drags, wheels and keys move the range; pointing and clicking ask for details.

function addGestures(schedule, range, details) {
  const { canvas } = schedule;
  let drag = null;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const [x] = place(event);
    drag = { x, start: range.start, moves: event.shiftKey };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (!drag) {
      details.point(schedule.hit(x, y), event);
    } else if (drag.moves) {
      range.move(drag.start - range.start - ((x - drag.x) / schedule.width) * range.length);
    } else {
      schedule.selection = [Math.max(GUTTER, drag.x), Math.max(GUTTER, x)];
      schedule.later();
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    const [x, y] = place(event);
    const [from, moved] = [drag?.x ?? x, drag?.moves];
    drag = null;
    schedule.selection = null;
    if (Math.abs(x - from) < 4) details.pin(schedule.hit(x, y));
    else if (!moved) range.set(...[from, x].map((each) => schedule.timeAt(Math.max(GUTTER, each))).sort((a, b) => a - b));
    schedule.later();
  });
  canvas.addEventListener("pointercancel", () => { drag = schedule.selection = null; });
  canvas.addEventListener("pointerleave", () => details.leave());
  canvas.addEventListener("dblclick", (event) => {
    const { row, span } = schedule.hit(...place(event));
    if (span < 0) return range.all();
    const { start_ns: start, length_ns: length } = row.data.spans;
    return range.fit(start[span], start[span] + length[span]);
  });
  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (event.ctrlKey || event.metaKey) range.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.004)), schedule.timeAt(place(event)[0]));
    else if (sideways && (event.shiftKey || Math.abs(sideways) > Math.abs(event.deltaY))) range.move((sideways / schedule.width) * range.length);
    else return;
    event.preventDefault();
    details.leave();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const keys = {
      "+": () => range.zoom(1.6), "=": () => range.zoom(1.6), "-": () => range.zoom(1 / 1.6), 0: () => range.all(),
      ArrowLeft: () => range.move(-0.15 * range.length), ArrowRight: () => range.move(0.15 * range.length), Escape: () => details.pin({ span: -1 }),
    };
    if (event.ctrlKey || event.metaKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
}
