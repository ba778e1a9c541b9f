// Elements of the page. Text is always set as text: names come from files.

function element(tag, attributes = {}, ...children) {
  const made = tag.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const byId = (id) => document.getElementById(id);

function legendOf(kinds, theme) {
  return kinds.map((kind) => {
    const patch = element("i");
    const paint = () => { patch.style.background = theme.colour(kind); };
    theme.onChange(paint);
    paint();
    return element("span", {}, patch, kind.label);
  });
}

// A canvas as large as it is on the screen, in the device's own pixels; the context draws in CSS pixels.
function fitted(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (height !== undefined) canvas.style.height = `${height}px`;
  const wanted = [Math.round(width * ratio), Math.round((height ?? canvas.clientHeight) * ratio)];
  if (canvas.width !== wanted[0] || canvas.height !== wanted[1]) [canvas.width, canvas.height] = wanted;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, wanted[1] / ratio);
  return { context, width, height: wanted[1] / ratio, ratio };
}
