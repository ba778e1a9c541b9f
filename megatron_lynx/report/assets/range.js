// The stretch of time that is drawn, in nanoseconds. Charts follow it, gestures move it.

class Range {
  constructor(whole) {
    this.whole = Math.max(1, whole);
    this.start = 0;
    this.end = this.whole;
    this.listeners = [];
  }

  get length() {
    return this.end - this.start;
  }

  onChange(listener) {
    this.listeners.push(listener);
  }

  set(start, end) {
    const length = Math.min(this.whole, Math.max(Range.least, end - start));
    const middle = (start + end) / 2;
    this.start = Math.min(Math.max(0, middle - length / 2), this.whole - length);
    this.end = this.start + length;
    this.listeners.forEach((listener) => listener());
  }

  all() {
    this.set(0, this.whole);
  }

  zoom(factor, at = (this.start + this.end) / 2) {
    this.set(at - (at - this.start) / factor, at + (this.end - at) / factor);
  }

  move(by) {
    this.set(this.start + by, this.end + by);
  }

  // Fills the width with a stretch, with a little room on both sides.
  fit(start, end) {
    const room = 0.08 * (end - start);
    this.set(start - room, end + room);
  }

  changeWhole(whole) {
    this.whole = Math.max(1, whole);
    this.set(this.start, this.end);
  }
}

Range.least = 200;  // nanoseconds; nothing on a device is shorter
