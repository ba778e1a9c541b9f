// One lane of one row: spans of which some lie over others become segments that follow one another.
//
//     spans      ├──────── backward ────────┤                kinds are in painting order: later ones lie over earlier ones
//                     ├─── wait ───┤
//                     ├ recompute ┤
//     segments   ├ b ─┼─ r ────┼ w ┼─── b ──┤

class Lane {
  constructor(spans, chosen, order) {
    const cuts = new Float64Array(2 * chosen.length);
    chosen.forEach((index, place) => {
      cuts[2 * place] = spans.start_ns[index];
      cuts[2 * place + 1] = spans.start_ns[index] + spans.length_ns[index];
    });
    cuts.sort();
    const end = (index) => spans.start_ns[index] + spans.length_ns[index];
    const [starts, ends, kinds, owners] = [[], [], [], []];
    let active = [];
    let next = 0;
    for (let cut = 0; cut + 1 < cuts.length; cut += 1) {
      const [from, to] = [cuts[cut], cuts[cut + 1]];
      if (from === to) continue;
      active = active.filter((index) => end(index) > from);
      for (; next < chosen.length && spans.start_ns[chosen[next]] <= from; next += 1) if (end(chosen[next]) > from) active.push(chosen[next]);
      let top = -1;
      for (const index of active) if (top < 0 || order(index) >= order(top)) top = index;
      if (top < 0) continue;
      const last = starts.length - 1;
      if (last >= 0 && owners[last] === top && ends[last] === from) ends[last] = to;
      else [starts, ends, kinds, owners].forEach((column, which) => column.push([from, to, order(top), top][which]));
    }
    this.start = Float64Array.from(starts);
    this.end = Float64Array.from(ends);
    this.kind = Uint8Array.from(kinds);
    this.owner = Int32Array.from(owners);
  }

  get count() {
    return this.start.length;
  }

  // The first segment that ends after a time.
  from(time) {
    let [low, high] = [0, this.count];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // The span at a time, or one that is nearer to it than `slack`.
  at(time, slack = 0) {
    const place = this.from(time - slack);
    return place < this.count && this.start[place] <= time + slack ? this.owner[place] : -1;
  }
}
