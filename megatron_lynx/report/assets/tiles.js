// The few figures at the top: what was predicted, what was measured, and how far one is from the other.

function tileOf(tile) {
  const both = tile.predicted !== null && tile.measured !== null;
  const value = tile.measured ?? tile.predicted;
  const beside = both ? `predicted ${formatCell(tile.predicted, tile.unit)}${offBy(tile)}` : tile.measured === null ? "predicted" : "measured";
  return element("div", { class: "tile", title: tile.note },
    element("div", { class: "label" }, tile.label),
    element("div", { class: "value" }, formatCell(value, tile.unit)),
    element("div", { class: "beside" }, both ? `measured; ${beside}` : beside));
}

function offBy({ unit, predicted, measured }) {
  if (unit === "share" || !measured) return "";
  const off = (100 * (predicted - measured)) / measured;
  return ` (${off < 0 ? "−" : "+"}${Math.abs(off).toFixed(1)} %)`;
}
