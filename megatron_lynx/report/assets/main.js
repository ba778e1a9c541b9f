// Reads the island and puts the page together.

const island = JSON.parse(byId("island").textContent);
const theme = new Theme(byId("theme"));

byId("title").textContent = island.title;
byId("subject").textContent = island.subject;
byId("verdict").textContent = island.verdict;
byId("tiles").append(...island.tiles.filter((tile) => tile.predicted !== null || tile.measured !== null).map(tileOf));
byId("notes").append(...[...island.notes, ...island.sources.map((source) => `Made from ${source}.`), `Written by ${island.made_by}; nothing in it asks for a network.`].map((note) => element("li", {}, note)));

if (island.views.length) showViews();
if (island.points.length) {
  byId("plans").hidden = false;
  new Plans(island, theme);
}
if (island.tables.length) {
  byId("tables").hidden = false;
  byId("tables").append(...island.tables.flatMap(tableOf));
}
document.body.dataset.ready = "yes";

function showViews() {
  byId("schedule").hidden = false;
  const range = new Range(1);
  const schedule = new Schedule(byId("bars"), island, range, theme);
  const overview = new Overview(byId("overview"), schedule, range, theme);
  const memory = new MemoryChart(byId("curves"), island, range, theme);
  const names = island.views.map((view) => view.name);
  const choices = names.length > 1 ? [...names.map((name) => [name, [name]]), ["both", names]] : [[names[0], names]];
  const buttons = choices.map(([label, shown]) => element("button", { type: "button", title: island.views.filter((view) => shown.includes(view.name)).map((view) => view.title).join("; "), onclick: () => show(shown) }, label));

  function show(shown) {
    schedule.show(shown);
    byId("memory").hidden = !memory.show(shown);
    range.changeWhole(Math.max(...island.views.filter((view) => shown.includes(view.name)).map((view) => view.step_ns)));
    overview.anew();
    buttons.forEach((button, place) => button.setAttribute("aria-pressed", choices[place][1].join() === shown.join()));
  }

  range.onChange(() => { byId("range").textContent = `${formatSeconds(range.length / 1e9)} of ${formatSeconds(range.whole / 1e9)}, from ${formatSeconds(range.start / 1e9)} on`; });
  byId("views").append(...buttons);
  byId("legend").append(...legendOf(island.kinds, theme));
  const held = new Set(island.views.flatMap((view) => view.rows.flatMap((row) => (row.memory ? Object.keys(row.memory.kinds) : []))));
  byId("memory-legend").append(...legendOf(island.memory_kinds.filter((kind) => held.has(kind.name)), theme));
  byId("whole").addEventListener("click", () => range.all());
  byId("in").addEventListener("click", () => range.zoom(2));
  byId("out").addEventListener("click", () => range.zoom(0.5));
  addGestures(schedule, range, new Details(byId("tooltip"), byId("details")));
  show(choices[choices.length - 1][1]);
  range.all();
}
