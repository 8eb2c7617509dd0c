"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const { observed, info, mean } = data, names = info.layers, sides = observed ? ["as routed"] : ["as routed", "as computed"];
const NONE = 65535, LEVELS = 65534;
const redraws = [], root = document.documentElement;

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
function section(id, title, text, nav) {
  const node = make("section", { id, "aria-labelledby": id + "-title" }, make("h2", { id: id + "-title" }, title));
  if (text) node.append(make("p", {}, text));
  document.getElementById("nav").append(make("li", {}, make("a", { href: "#" + id }, nav || title)));
  document.getElementById("main").append(node);
  return node;
}
function unpack(text, top) { // numbers of 16 bits, little endian; NaN where there were no tokens
  const bytes = atob(text), values = new Float32Array(bytes.length / 2);
  for (let i = 0; i < values.length; i++) {
    const level = bytes.charCodeAt(2 * i) | (bytes.charCodeAt(2 * i + 1) << 8);
    values[i] = level === NONE ? NaN : (level * top) / LEVELS;
  }
  return values;
}
const probe = document.body.appendChild(make("span", { hidden: "" }));
let palette = {};
function color(name) { // as the theme resolves it now
  if (!(name in palette)) {
    probe.style.color = `var(--${name})`;
    palette[name] = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  }
  return palette[name];
}
const css = (name, alpha = 1) => `rgba(${color(name).join(",")},${alpha})`;
const blend = (a, b, t) => a.map((v, i) => v + (b[i] - v) * t);
function heat(value, span) { // of load over mean: even is neutral, colder to the left, hotter to the right, by powers of 2
  if (Number.isNaN(value)) return color("none");
  const t = Math.max(-1, Math.min(1, Math.log2(Math.max(value, 1e-6)) / span));
  if (t < 0) return blend(color("even"), color("cold"), -t);
  return t < 0.5 ? blend(color("even"), color("warm"), 2 * t) : blend(color("warm"), color("hot"), 2 * t - 1);
}
const spanOf = (top) => Math.max(0.25, Math.min(3, Math.log2(Math.max(top, 1.01))));
const times = (value) => (Number.isNaN(value) ? "no tokens" : value.toFixed(value < 10 ? 3 : 1) + " × the mean");
const plain = (v) => (Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4)));
const iterations = ([a, b]) => (a === b ? `iteration ${a}` : `iterations ${a}–${b}`);

function fill(scroll, columns, rows, sortable) { // a table; the first column heads its row
  const head = make("tr"), body = make("tbody"), table = make("table", { class: "data" }, make("thead", {}, head), body);
  const draw = (list) => body.replaceChildren(...list.map((row) => make("tr", {}, ...row.map((cell, i) => {
    const text = typeof cell === "number" ? plain(cell) : cell;
    return i ? make("td", typeof cell === "string" && cell.length > 24 ? { class: "words" } : {}, text) : make("th", { scope: "row" }, text);
  }))));
  columns.forEach((name, at) => {
    const th = make("th", { scope: "col" }, sortable ? make("button", { type: "button" }, name) : name);
    if (sortable) th.firstChild.onclick = () => {
      const up = th.getAttribute("aria-sort") === "descending" || (at === 0 && th.getAttribute("aria-sort") !== "ascending");
      for (const other of head.children) other.removeAttribute("aria-sort");
      th.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => (at === 0 ? rows.indexOf(row) : row[at]);
      const order = (a, b) => (typeof key(a) === "string" ? key(a).localeCompare(key(b)) : key(a) - key(b));
      draw([...rows].sort((a, b) => (up ? 1 : -1) * order(a, b)));
    };
    head.append(th);
  });
  draw(rows);
  scroll.replaceChildren(table);
}
function figures(node, label, build) { // the table behind a chart, made when it is opened
  const scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label });
  const details = make("details", {}, make("summary", {}, "Table: " + label), scroll);
  const update = () => { if (details.open) fill(scroll, ...build()); };
  details.addEventListener("toggle", update);
  node.append(details);
  return update;
}

function lines(spec, node) {
  const box = make("div", { tabindex: 0, role: "group", "aria-label": node.querySelector("h2").textContent + ", chart; arrow keys move over iterations" });
  const tip = make("output", { class: "heard", "aria-live": "polite" }); // seen in the legend
  const x = data.iterations;
  const thin = (name) => /layers below$/.test(name);
  node.append(box, tip);
  let plot, at = -1;
  const draw = (width) => {
    plot?.destroy();
    const axis = { stroke: () => css("soft"), grid: { stroke: () => css("grid"), width: 1 }, ticks: { stroke: () => css("line"), width: 1 } };
    const series = spec.series.map(([label, name]) => ({
      label, stroke: css(name, thin(label) ? 0.35 : 1), width: thin(label) ? 1 : /worst/.test(label) ? 1.2 : 2.2,
      dash: /worst|activations/.test(label) ? [2, 3] : undefined, points: { show: x.length < 3, size: 8 }, value: (u, v) => (v == null ? "–" : plain(v)),
    }));
    plot = new uPlot({
      width, height: root.classList.contains("print") ? 200 : 300, scales: { x: { time: false }, y: { range: (u, low, high) => [spec.name === "imbalance" ? 1 : Math.min(0, low), high > low ? high * 1.04 : low + 1] } },
      axes: [{ ...axis, label: "iteration", size: 34, labelSize: 20, values: (u, v) => v.map((i) => (Number.isInteger(i) ? i : "")) }, { ...axis, size: 62, label: spec.unit, labelSize: 22 }],
      legend: { markers: { dash: (u, i) => (u.series[i].dash ? "dotted" : "solid") } }, series: [{ label: "iteration" }, ...series], cursor: { points: { size: 7 } },
      bands: (spec.name === "imbalance" ? [2, 6].slice(0, spec.series.length / 4) : []).map((at) => ({ series: [at, at + 2], fill: css(spec.series[at - 1][1], 0.16) })),
    }, [x, ...spec.series.map((s) => s[2])], box);
    box.querySelectorAll(".u-series").forEach((row, i) => { row.hidden = i > 0 && thin(spec.series[i - 1][0]); });
  };
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -x.length, End: x.length }[event.key];
    if (event.key === "Escape") plot.setData(plot.data);
    if (!step) return;
    event.preventDefault();
    at = Math.max(0, Math.min(x.length - 1, (at >= 0 ? at : step > 0 ? -1 : x.length) + step));
    plot.setCursor({ left: plot.valToPos(x[at], "x"), top: 10 });
    tip.value = `iteration ${x[at]}: ` + spec.series.map(([label, , values]) => `${label} ${plain(values[at])}`).join(", ");
  });
  redraws.push(() => draw(Math.max(260, Math.floor(box.clientWidth))));
  figures(node, `${spec.unit} by iteration`, () => [["iteration", ...spec.series.map((s) => s[0])], x.map((i, at) => [i, ...spec.series.map((s) => s[2][at])])]);
}

function picture(node, caption, view) { // view() gives rows, columns, value(r, c), names of both, span, and what a cell is
  const canvas = make("canvas", { class: "heat", tabindex: 0, role: "img", "aria-label": caption + ": picture; arrow keys move over its cells" });
  const tip = make("output", { class: "tip", "aria-live": "polite" });
  node.append(make("figure", {}, make("figcaption", {}, caption), canvas, tip));
  const left = 84, bottom = 34;
  let cell = null, now, high, wide;
  const draw = () => {
    now = view();
    const width = canvas.clientWidth, scale = devicePixelRatio || 1;
    high = Math.max(3, Math.min(22, Math.floor((root.classList.contains("print") ? 300 : 460) / now.rows)));
    wide = (width - left) / now.columns;
    const height = high * now.rows;
    canvas.width = width * scale; canvas.height = (height + bottom) * scale; canvas.style.height = height + bottom + "px";
    const image = new ImageData(now.columns, now.rows);
    for (let r = 0; r < now.rows; r++) for (let c = 0; c < now.columns; c++) {
      image.data.set([...heat(now.value(r, c), now.span), 255], 4 * (r * now.columns + c));
    }
    const small = make("canvas"); small.width = now.columns; small.height = now.rows;
    small.getContext("2d").putImageData(image, 0, 0);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small, left, 0, width - left, height);
    pen.fillStyle = css("soft"); pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle"; pen.textAlign = "right";
    const step = (size, room) => [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((every) => every * size >= room) || 2000;
    for (let r = 0; r < now.rows; r += step(high, 15)) pen.fillText(now.row(r), left - 6, Math.max(7, (r + 0.5) * high), left - 8);
    pen.textAlign = "center";
    const widest = pen.measureText(now.tick(now.columns - 1)).width;
    for (let c = 0; c < now.columns; c += step(wide, widest + 12)) {
      pen.fillText(now.tick(c), Math.min(width - widest / 2, left + (c + 0.5) * wide), height + 10);
    }
    pen.fillText(now.axis, left + (width - left) / 2, height + 26);
    if (cell) { pen.strokeStyle = css("focus"); pen.lineWidth = 2; pen.strokeRect(left + cell[1] * wide, cell[0] * high, Math.max(3, wide), high); }
  };
  const show = (r, c) => {
    cell = [Math.max(0, Math.min(now.rows - 1, r)), Math.max(0, Math.min(now.columns - 1, c))];
    tip.value = now.say(...cell);
    draw();
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), c = Math.floor((event.clientX - box.left - left) / wide), r = Math.floor((event.clientY - box.top) / high);
    if (c >= 0 && r < now.rows && !(cell && cell[0] === r && cell[1] === c)) show(r, c);
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -1e6], End: [0, 1e6] }[event.key];
    if (!step) return;
    event.preventDefault();
    cell ? show(cell[0] + step[0], cell[1] + step[1]) : show(0, 0);
  });
  redraws.push(draw);
  return () => { cell = null; tip.value = ""; draw(); };
}
function legend(node, top) {
  const bar = make("canvas", { width: 220, height: 1, role: "img", "aria-label": "colours, from cold to hot" }), span = spanOf(top);
  node.append(make("div", { class: "legend" }, `${(2 ** -span).toFixed(2)} ×`, bar, `${(2 ** span).toFixed(2)} × the mean, or more; the middle is the mean`));
  redraws.push(() => {
    const pen = bar.getContext("2d");
    for (let i = 0; i < 220; i++) { pen.fillStyle = `rgb(${heat(2 ** ((i / 110 - 1) * span), span)})`; pen.fillRect(i, 0, 1, 1); }
  });
}
function chooser(label, first) {
  const select = make("select", {}, ...first.map((text) => make("option", { value: -1 }, text)), ...names.map((name, i) => make("option", { value: i }, name)));
  return [make("label", {}, label + " ", select), select];
}
function pair(node) {
  const box = make("div", { class: "pair" + (observed ? " single" : "") });
  node.append(box);
  return box;
}

function summary() {
  document.getElementById("title").textContent = document.title = observed ? "What imbalance costs" : "What FSSDP did";
  const facts = { run: info.folder, started: info.started, "top k": info.top_k, ...(observed ? {} : { slots: info.slots, lifetime: info.lifetime, transport: info.transport }), "median step": /nan/.test(info.step) ? "" : info.step, ...info.versions };
  document.getElementById("facts").textContent = Object.entries(facts).filter(([, value]) => value !== "").map((fact) => fact.join(" ")).join(" · ");
  const ms = (value) => (Math.abs(value) >= 999.5 ? (value / 1e3).toFixed(2) + " s" : +(+value.toPrecision(3)).toFixed(3) + " ms"), won = mean.lost - mean.left;
  const shown = [["fullest rank, of the mean", observed ? mean.before.toFixed(2) : `${mean.before.toFixed(2)} → ${mean.after.toFixed(3)}`, observed ? "as routed" : "as routed → as computed"]];
  if (data.lines.lost) shown.push(["lost to imbalance, modelled", ms(mean.lost), "per step, as routed"]);
  if (data.lines.lost && !observed) shown.push(["won back, net of replicas' cost", ms(won), mean.lost ? `${((100 * won) / mean.lost).toFixed(1)} % of it` : "there was nothing to win"]);
  if (!observed) shown.push(["replicas", mean.replicas.toFixed(1), "per layer, on all ranks together"]);
  const node = section("summary", "In short");
  const cards = shown.map(([what, value, remark]) => make("div", {}, make("dt", {}, what), make("dd", { class: "value" }, value), make("dd", {}, remark)));
  node.append(make("dl", { class: "cards" }, ...cards), ...data.words.map((text) => make("p", {}, text)));
}
function loads() {
  const { groups, top } = data.loads, ranks = info.ranks, span = spanOf(top), num = groups.length;
  const text = "Load of each rank over the mean of its layer. " + (observed ? "Others wait for hot ranks." : "Left: every token at its expert's home. Right: with replicas. The more even, the less waiting.");
  const node = section("loads", "Load of layers and ranks", text, "Loads");
  const whole = data.loads.whole.map((t) => unpack(t, top)), parts = data.loads.parts.map((t) => unpack(t, top));
  const [label, select] = chooser("Show", ["all layers"]);
  const slider = make("input", { type: "range", min: 0, max: num, value: 0, id: "when" }), said = make("output", { for: "when" });
  const time = make("label", {}, "When ", slider, " ", said);
  node.append(make("div", { class: "controls" }, label, time));
  const view = (side) => () => {
    const layer = +select.value, at = +slider.value - 1;
    if (layer < 0) {
      const value = (r, c) => (at < 0 ? whole[side][r * ranks + c] : parts[side][(r * ranks + c) * num + at]);
      return { rows: names.length, columns: ranks, value, span, row: (r) => names[r], tick: String, axis: "rank", say: (r, c) => `${names[r]}, rank ${c}: ${times(value(r, c))}` };
    }
    const value = (r, c) => parts[side][(layer * ranks + r) * num + c];
    return { rows: ranks, columns: num, value, span, row: (r) => `rank ${r}`, tick: (c) => String(groups[c][0]), axis: "iteration", say: (r, c) => `${names[layer]}, rank ${r}, ${iterations(groups[c])}: ${times(value(r, c))}` };
  };
  const box = pair(node), draws = sides.map((side, i) => picture(box, side[0].toUpperCase() + side.slice(1), view(i)));
  legend(node, top);
  const table = figures(node, "load of each rank over the mean, as shown above", () => {
    const views = sides.map((_, i) => view(i)()), first = views[0], rows = [];
    for (let r = 0; r < first.rows; r++) views.forEach((v, i) => rows.push([`${first.row(r)}, ${sides[i]}`, ...Array.from({ length: v.columns }, (_, c) => v.value(r, c).toFixed(3))]));
    return [[first.rows === ranks && +select.value >= 0 ? "rank" : "layer", ...Array.from({ length: first.columns }, (_, c) => `${first.axis} ${first.tick(c)}`)], rows];
  });
  const update = () => {
    slider.disabled = +select.value >= 0;
    said.value = slider.disabled ? "all iterations" : +slider.value ? iterations(groups[slider.value - 1]) : "whole run";
    slider.setAttribute("aria-valuetext", said.value);
    draws.forEach((draw) => draw()); table();
  };
  select.onchange = slider.oninput = update;
  redraws.push(() => { said.value ||= "whole run"; });
}
function spread() {
  const { groups, top } = data.spread, span = spanOf(top), num = groups.length, parts = data.spread.parts.map((t) => unpack(t, top));
  const node = section("spread", "Imbalance of every layer over time", "Load of the fullest rank over the mean. 1 is even; others wait for what is beyond.", "Layers over time");
  const box = pair(node);
  sides.forEach((side, i) => {
    const value = (r, c) => parts[i][r * num + c];
    picture(box, side[0].toUpperCase() + side.slice(1), () => ({ rows: names.length, columns: num, value, span, row: (r) => names[r], tick: (c) => String(groups[c][0]), axis: "iteration", say: (r, c) => `${names[r]}, ${iterations(groups[c])}: ${times(value(r, c))}` }));
  });
  legend(node, top);
  figures(node, "imbalance of every layer", () => [["layer", ...groups.map(iterations)], names.flatMap((name, r) => sides.map((side, i) => [`${name}, ${side}`, ...groups.map((_, c) => parts[i][r * num + c].toFixed(3))]))]);
}
function experts() {
  const { groups, top } = data.hot, { number, home, replicas } = data.experts, span = spanOf(top), num = groups.length, most = number[0].length;
  const parts = unpack(data.hot.parts[0], top), whole = unpack(data.hot.whole[0], top);
  const node = section("experts", "The hottest experts", `The ${most} experts of a layer with most tokens, as routed, over the mean expert.`, "Experts");
  const [label, select] = chooser("Layer", []);
  node.append(make("div", { class: "controls" }, label));
  const value = (r, c) => parts[(+select.value * most + r) * num + c], of = (list, r) => list[+select.value][r];
  const draw = picture(node, "Load of each expert", () => ({ rows: most, columns: num, value, span, row: (r) => `expert ${of(number, r)}`, tick: (c) => String(groups[c][0]), axis: "iteration",
    say: (r, c) => `expert ${of(number, r)}, home on rank ${of(home, r)}, ${iterations(groups[c])}: ${times(value(r, c))}` }));
  legend(node, top);
  const table = figures(node, "the hottest experts of this layer", () => [["expert", "home rank", "load over the mean expert", ...(observed ? [] : ["replicas on average"])], number[+select.value].map((e, r) => [String(e), String(of(home, r)), +whole[+select.value * most + r].toFixed(3), ...(observed ? [] : [of(replicas, r)])])]);
  select.onchange = () => { draw(); table(); };
}
function layers() {
  const node = section("layers", "Every layer: what was decided, and why", "Load of the fullest rank over the mean, as routed and as computed: mean and worst iteration. Replicas of all ranks together. Milliseconds per step, by the cost model. A column's head sorts by it.", "Decisions");
  const scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "decisions" });
  node.classList.add("long"); node.append(scroll);
  const heads = ["layer", "as routed", "worst, as routed", "as computed", "worst, as computed", "replicas", "% of iterations without", "late", "ms lost", "ms won back, net", "why"];
  const kept = observed ? [0, 1, 2, 8, 10] : heads.map((_, i) => i);
  const rows = data.layers.map((row, i) => [names[i], ...row]).map((row) => row.map((v, i) => (i === 6 ? +(100 * v).toFixed(1) : v)));
  fill(scroll, kept.map((i) => heads[i]), rows.map((row) => kept.map((i) => row[i])), true);
}
const TITLES = {
  lost: [observed ? "Milliseconds lost" : "Milliseconds lost and won back", "What each step waits for the fullest rank, by the cost model." + (observed ? "" : " With FSSDP, what replicas cost is part of what is lost, and taken off what is won back."), "Time"],
  imbalance: ["Imbalance over time", "Load of the fullest rank over the mean, over the layers: the line is the median, the band holds the middle 80 %, dots are the worst layer.", "Imbalance"],
  copies: ["Copies: hidden and not", "Time of replicas on their way out and back, on the busiest link. What hides behind compute costs little; in iterations in which they were not measured, both are the cost model's.", "Copies"],
  memory: ["Memory of the fullest rank", data.lines.memory.unit === "MiB"
    ? "Estimated, for experts alone: their weights, gradients and Adam state (not sharded), " + (observed ? "" : "buffers for replicas, ") + "and activations that wait for the backward, of all microbatches in flight. Activations grow with the tokens of the fullest rank."
    : "Tokens that the fullest rank keeps of a microbatch, all layers together. The record says nothing of bytes.", "Memory"],
};
function line(name) {
  const spec = data.lines[name];
  if (spec) lines({ name, ...spec }, section(name, ...TITLES[name]));
}

summary(); line("lost"); line("imbalance"); layers(); loads(); spread(); experts(); line("copies"); line("memory");
let drawn = 0;
function redraw() { palette = {}; drawn = innerWidth; for (const one of redraws) one(); }
const theme = document.getElementById("theme");
theme.onchange = () => { root.dataset.theme = theme.value; redraw(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", () => { if (innerWidth !== drawn) redraw(); });
addEventListener("beforeprint", () => { root.dataset.theme = "light"; root.classList.add("print"); redraw(); });
addEventListener("afterprint", () => { root.dataset.theme = theme.value; root.classList.remove("print"); redraw(); });
redraw();
root.dataset.ready = Math.round(performance.now());
