// Columns of pixels: of each column, which share of its time belongs to which kind. So a hundred thousand bars cost as much as the
// page is wide, a bar that is thinner than a pixel still counts, and wide bars look like bars.

function sharesOf(lane, from, to, columns, kinds) {
  const shares = new Float32Array(columns * kinds);
  const scale = columns / (to - from);
  for (let place = lane.from(from); place < lane.count && lane.start[place] < to; place += 1) {
    const begin = Math.max(0, (lane.start[place] - from) * scale);
    const end = Math.min(columns, (lane.end[place] - from) * scale);
    const base = lane.kind[place] * columns;
    let column = Math.floor(begin);
    const last = Math.min(columns - 1, Math.floor(end));
    if (column === last) {
      shares[base + column] += end - begin;
      continue;
    }
    shares[base + column] += column + 1 - begin;
    for (column += 1; column < last; column += 1) shares[base + column] = 1;
    shares[base + last] += end - last;
  }
  return shares;
}

// Shares as pixels, stacked from the bottom in the order of kinds; what belongs to none stays transparent.
function painted(context, shares, columns, rows, pixels) {
  const image = context.createImageData(columns, rows);
  const target = new Uint32Array(image.data.buffer);
  for (let column = 0; column < columns; column += 1) {
    let filled = 0;
    let row = rows;
    for (let kind = 0; kind < pixels.length; kind += 1) {
      const share = shares[kind * columns + column];
      if (!share) continue;
      filled += share;
      const until = Math.max(0, Math.round(rows * (1 - Math.min(1, filled))));
      while (row > until) target[(row -= 1) * columns + column] = pixels[kind];
    }
  }
  return image;
}
