// One plan of the front at a time: chosen with the slider or in the picture; stage by stage what it keeps, recomputes and offloads.

class Plans {
  constructor(island, theme) {
    Object.assign(this, { island, theme });
    const placed = island.points.filter((point) => point.memory_bytes && point.step_s);
    this.plans = placed.filter((point) => point.by === "plan").sort((a, b) => a.memory_bytes - b.memory_bytes || b.step_s - a.step_s);
    if (placed.length > 1) {
      byId("front").hidden = false;
      this.scatter = scatterOf(placed, island.capacity_bytes, (point) => this.choose(point));
      byId("scatter").append(this.scatter.svg);
      byId("budget").max = this.plans.length - 1;
      byId("budget").addEventListener("input", (event) => this.choose(this.plans[Number(event.target.value)]));
    }
    theme.onChange(() => this.choose(this.point));
    this.choose(island.points.find((point) => point.shown) ?? island.points[0]);
  }

  choose(point) {
    this.point = point;
    this.scatter?.choose(point);
    const place = this.plans.indexOf(point);
    if (place >= 0) byId("budget").value = place;
    byId("budget").setAttribute("aria-valuetext", point.label);
    byId("chosen").replaceChildren(summaryOf(point));
    const most = Math.max(1, this.island.capacity_bytes ?? 0, ...point.stages.flatMap((stage) => [sum(Object.values(stage.memory_bytes)), stage.measured_bytes ?? 0]));
    const open = [...byId("treatments").querySelectorAll("details")].map((each) => each.open);
    byId("treatments").replaceChildren(...this.legend(point), ...point.stages.map((stage, place) => this.stageOf(stage, most, open[place] ?? place === 0)));
  }

  legend(point) {
    const used = new Set(point.stages.flatMap((stage) => Object.keys(stage.memory_bytes)));
    const kinds = this.island.memory_kinds.filter((kind) => used.has(kind.name));
    return kinds.length ? [element("h3", {}, `${point.label}: each device at its fullest`), element("div", { class: "legend" }, ...legendOf(kinds, { colour: (kind) => this.theme.colour(kind), onChange() {} }))] : [];
  }

  stageOf(stage, most, open) {
    const chunk = stage.chunk || this.point.stages.some((other) => other.chunk) ? `, chunk ${stage.chunk}` : "";
    const facts = [];
    if (stage.hidden_recompute_s !== null) facts.push(`recompute: ${formatSeconds(stage.hidden_recompute_s)} hidden, ${formatSeconds(stage.exposed_recompute_s)} exposed`);
    if (stage.deferred_bytes) facts.push(`weight gradients put off hold at most ${formatBytes(stage.deferred_bytes)}`);
    if (stage.offloaded_bytes) facts.push(`${formatBytes(stage.offloaded_bytes)} of each micro-batch to the host`);
    const line = [element("span", {}, element("b", {}, `stage ${stage.stage}${chunk}`), ` layers ${stage.layers}`), element("span", { class: "soft" }, facts.join("; ")), this.stackOf(stage, most)];
    if (!stage.treatments.length) return element("div", { class: "stage" }, element("summary", {}, ...line));
    return element("details", { class: "stage", ...(open ? { open: "" } : {}) }, element("summary", {}, ...line), treatmentsOf(stage));
  }

  stackOf(stage, most) {
    const kinds = Object.entries(stage.memory_bytes);
    if (!kinds.length) return element("span");
    const total = sum(kinds.map(([, bytes]) => bytes));
    const said = kinds.map(([name, bytes]) => `${this.island.memory_kinds.find((kind) => kind.name === name).label} ${formatBytes(bytes)}`).join(", ");
    const stack = element("div", { class: "stack", title: said, role: "img", "aria-label": said });
    for (const [name, bytes] of kinds) {
      const part = element("i");
      part.style.width = `${(100 * bytes) / most}%`;
      part.style.background = this.theme.colour(this.island.memory_kinds.find((kind) => kind.name === name));
      stack.append(part);
    }
    const facts = [`${formatBytes(total)}${stage.moment ? `, ${stage.moment}` : ""}`];
    if (stage.measured_bytes !== null) {
      const mark = element("b", { class: "measured", title: `measured: ${formatBytes(stage.measured_bytes)}` });
      mark.style.left = `${(100 * stage.measured_bytes) / most}%`;
      stack.append(mark);
      facts.push(`measured ${formatBytes(stage.measured_bytes)}`);
    }
    return element("span", {}, stack, element("span", { class: "soft" }, facts.join("; ")));
  }
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

function summaryOf(point) {
  const facts = [["plan", point.label]];
  if (point.budget_bytes) facts.push(["budget", formatBytes(point.budget_bytes)]);
  if (point.step_s) facts.push(["step", formatSeconds(point.step_s)]);
  if (point.memory_bytes) facts.push(["fullest device", formatBytes(point.memory_bytes)]);
  const recomputations = (key) => Math.max(...point.stages.map((stage) => stage[key] ?? 0));
  if (point.by === "plan") {
    facts.push(["recompute", `${formatSeconds(recomputations("hidden_recompute_s"))} hidden, ${formatSeconds(recomputations("exposed_recompute_s"))} exposed on the stage with most`]);
    const items = point.stages.flatMap((stage) => stage.treatments.flatMap((treatment) => treatment.items.filter(([, what]) => what === "recompute").map(([item]) => item)));
    facts.push(["recomputed", [...new Set(items)].join(", ") || "nothing"]);
    const offloaded = Math.max(...point.stages.map((stage) => stage.offloaded_bytes));
    facts.push(["to the host", offloaded ? `up to ${formatBytes(offloaded)} of each micro-batch` : "nothing"]);
  }
  return element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

function treatmentsOf(stage) {
  const gathers = stage.treatments.some((treatment) => treatment.gather);
  const deferred = stage.treatments.some((treatment) => treatment.deferred.length);
  const names = ["layers", "half", "kept (outlined) and recomputed (filled)", "recomputed in", ...(gathers ? ["input gathered"] : []), ...(deferred ? ["weight gradients put off to"] : [])];
  const rows = stage.treatments.map((treatment) => element("tr", {},
    element("td", {}, treatment.layers),
    element("td", {}, treatment.half),
    element("td", {}, ...treatment.items.map(([item, what]) => element("span", { class: `chip ${what}`, title: what === "keep" ? "kept" : "recomputed" }, item))),
    element("td", { class: "place" }, treatment.window || "–"),
    ...(gathers ? [element("td", { class: "place" }, treatment.gather || "–")] : []),
    ...(deferred ? [element("td", { class: "place" }, ...treatment.deferred.map((each) => element("div", {}, each)))] : [])));
  return element("table", { class: "treatments" }, element("thead", {}, element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name)))), element("tbody", {}, ...rows));
}
