"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const { observed, info, mean } = data,
  names = info.layers,
  sides = observed ? ["as routed"] : ["as routed", "as computed"];
const NONE = 65535,
  LEVELS = 65534;
// of lines, by the name of their colour
const DASHES = { after: [9, 4], won: [2, 5], dots: [2, 3] };
const redraws = [],
  root = document.documentElement;

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
function section(id, title, text, nav) {
  const node = make(
    "section",
    { id, "aria-labelledby": id + "-title" },
    make("h2", { id: id + "-title" }, title),
  );
  if (text) node.append(make("p", {}, text));
  document
    .getElementById("nav")
    .append(make("li", {}, make("a", { href: "#" + id }, nav || title)));
  document.getElementById("main").append(node);
  return node;
}
function unpack(text, top) {
  // numbers of 16 bits, little endian; NaN where there were no tokens
  const bytes = atob(text),
    values = new Float32Array(bytes.length / 2);
  for (let i = 0; i < values.length; i++) {
    const level = bytes.charCodeAt(2 * i) | (bytes.charCodeAt(2 * i + 1) << 8);
    values[i] = level === NONE ? NaN : (level * top) / LEVELS;
  }
  return values;
}
const probe = document.body.appendChild(make("span", { hidden: "" }));
let palette = {};
function color(name) {
  // [r, g, b] in the current theme
  if (!(name in palette)) {
    probe.style.color = `var(--${name})`;
    palette[name] = getComputedStyle(probe)
      .color.match(/[\d.]+/g)
      .slice(0, 3)
      .map(Number);
  }
  return palette[name];
}
const css = (name, alpha = 1) => `rgba(${color(name).join(",")},${alpha})`;
const blend = (a, b, t) => a.map((v, i) => v + (b[i] - v) * t);
function heat(value, span) {
  // colour of load over mean, by powers of 2: neutral at 1, cold below, hot above
  if (Number.isNaN(value)) return color("none");
  const t = Math.max(-1, Math.min(1, Math.log2(Math.max(value, 1e-6)) / span));
  if (t < 0) return blend(color("even"), color("cold"), -t);
  return t < 0.5
    ? blend(color("even"), color("warm"), 2 * t)
    : blend(color("warm"), color("hot"), 2 * t - 1);
}
const spanOf = (top) => Math.max(0.25, Math.min(3, Math.log2(Math.max(top, 1.01))));
const times = (value) =>
  Number.isNaN(value) ? "no tokens" : value.toFixed(value < 10 ? 3 : 1) + " × the mean";
const plain = (v) =>
  Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4));
const iterations = ([a, b]) => (a === b ? `iteration ${a}` : `iterations ${a}–${b}`);

function fill(scroll, columns, rows, sortable) {
  // fills a table; the first column is the header of its row
  const head = make("tr"),
    body = make("tbody"),
    table = make("table", { class: "data" }, make("thead", {}, head), body);
  const draw = (list) =>
    body.replaceChildren(
      ...list.map((row) =>
        make(
          "tr",
          {},
          ...row.map((cell, i) => {
            const text = typeof cell === "number" ? plain(cell) : cell;
            return i
              ? make(
                  "td",
                  typeof cell === "string" && cell.length > 24 ? { class: "words" } : {},
                  text,
                )
              : make("th", { scope: "row" }, text);
          }),
        ),
      ),
    );
  columns.forEach((name, at) => {
    const th = make(
      "th",
      { scope: "col" },
      sortable ? make("button", { type: "button" }, name) : name,
    );
    if (sortable)
      th.firstChild.onclick = () => {
        const up =
          th.getAttribute("aria-sort") === "descending" ||
          (at === 0 && th.getAttribute("aria-sort") !== "ascending");
        for (const other of head.children) other.removeAttribute("aria-sort");
        th.setAttribute("aria-sort", up ? "ascending" : "descending");
        const key = (row) => (at === 0 ? rows.indexOf(row) : row[at]);
        const order = (a, b) =>
          typeof key(a) === "string" ? key(a).localeCompare(key(b)) : key(a) - key(b);
        draw([...rows].sort((a, b) => (up ? 1 : -1) * order(a, b)));
      };
    head.append(th);
  });
  draw(rows);
  scroll.replaceChildren(table);
}
function figures(node, label, build) {
  // adds the table of a chart, filled when it is opened
  const scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label });
  const details = make("details", {}, make("summary", {}, "Table: " + label), scroll);
  const update = () => {
    if (details.open) fill(scroll, ...build());
  };
  details.addEventListener("toggle", update);
  node.append(details);
  return update;
}

function lines(spec, node) {
  const box = make("div", {
    tabindex: 0,
    role: "group",
    "aria-label": node.querySelector("h2").textContent + ", chart; arrow keys move over iterations",
  });
  // for screen readers; the legend shows the same
  const tip = make("output", { class: "heard", "aria-live": "polite" });
  const x = data.iterations;
  const thin = (name) => /layers below$/.test(name);
  node.append(box, tip);
  let plot,
    at = -1;
  const draw = (width) => {
    plot?.destroy();
    const axis = {
      stroke: () => css("soft"),
      grid: { stroke: () => css("grid"), width: 1 },
      ticks: { stroke: () => css("line"), width: 1 },
    };
    const series = spec.series.map(([label, name]) => ({
      label,
      stroke: css(name, thin(label) ? 0.35 : 1),
      width: thin(label) ? 1 : /worst/.test(label) ? 1.2 : 2.2,
      // lines differ without colour, too
      dash: DASHES[/worst|activations/.test(label) ? "dots" : name],
      points: { show: x.length < 3, size: 8 },
      value: (u, v) => (v == null ? "–" : plain(v)),
    }));
    plot = new uPlot(
      {
        width,
        height: root.classList.contains("print") ? 200 : 300,
        scales: {
          x: { time: false },
          y: {
            range: (u, low, high) => [
              spec.name === "imbalance"
                ? 1
                : spec.name === "step"
                  ? low - 0.1 * (high - low)
                  : Math.min(0, low),
              high > low ? high * 1.04 : low + 1,
            ],
          },
        },
        axes: [
          {
            ...axis,
            label: "iteration",
            size: 34,
            labelSize: 20,
            values: (u, v) => v.map((i) => (Number.isInteger(i) ? i : "")),
          },
          { ...axis, size: 62, label: spec.unit, labelSize: 22 },
        ],
        legend: { markers: {
            dash: (u, i) => ({ 2: "dotted", 9: "dashed" })[(u.series[i].dash || [0])[0]] || "solid",
          } },
        series: [{ label: "iteration" }, ...series],
        cursor: { points: { size: 7 } },
        bands: (spec.name === "imbalance" ? [2, 6].slice(0, spec.series.length / 4) : []).map(
          (at) => ({ series: [at, at + 2], fill: css(spec.series[at - 1][1], 0.16) }),
        ),
      },
      [x, ...spec.series.map((s) => s[2])],
      box,
    );
    box.querySelectorAll(".u-series").forEach((row, i) => {
      row.hidden = i > 0 && thin(spec.series[i - 1][0]);
    });
  };
  box.addEventListener("keydown", (event) => {
    const step = {
      ArrowLeft: -1,
      ArrowRight: 1,
      PageUp: -10,
      PageDown: 10,
      Home: -x.length,
      End: x.length,
    }[event.key];
    if (event.key === "Escape") plot.setData(plot.data);
    if (!step) return;
    event.preventDefault();
    at = Math.max(0, Math.min(x.length - 1, (at >= 0 ? at : step > 0 ? -1 : x.length) + step));
    plot.setCursor({ left: plot.valToPos(x[at], "x"), top: 10 });
    tip.value =
      `iteration ${x[at]}: ` +
      spec.series
        .map(([label, , values]) => `${label} ${values[at] == null ? "–" : plain(values[at])}`).join(", ");
  });
  redraws.push(() => draw(Math.max(260, Math.floor(box.clientWidth))));
  figures(node, `${spec.unit} by iteration`, () => [
    ["iteration", ...spec.series.map((s) => s[0])],
    x.map((i, at) => [i, ...spec.series.map((s) => s[2][at] ?? "–")]),
  ]);
}

function picture(node, caption, view) {
  // view() returns rows, columns, value(r, c), labels, the span of colours, and the text of a cell
  const canvas = make("canvas", {
    class: "heat",
    tabindex: 0,
    role: "img",
    "aria-label": caption + ": picture; arrow keys move over its cells",
  });
  const tip = make("output", { class: "tip", "aria-live": "polite" });
  node.append(make("figure", {}, make("figcaption", {}, caption), canvas, tip));
  const left = 84,
    bottom = 34;
  let cell = null,
    now,
    high,
    wide;
  const draw = () => {
    now = view();
    const width = canvas.clientWidth,
      scale = devicePixelRatio || 1;
    high = Math.max(
      3,
      Math.min(22, Math.floor((root.classList.contains("print") ? 300 : 460) / now.rows)),
    );
    wide = (width - left) / now.columns;
    const height = high * now.rows;
    canvas.width = width * scale;
    canvas.height = (height + bottom) * scale;
    canvas.style.height = height + bottom + "px";
    const image = new ImageData(now.columns, now.rows);
    for (let r = 0; r < now.rows; r++)
      for (let c = 0; c < now.columns; c++) {
        image.data.set([...heat(now.value(r, c), now.span), 255], 4 * (r * now.columns + c));
      }
    const small = make("canvas");
    small.width = now.columns;
    small.height = now.rows;
    small.getContext("2d").putImageData(image, 0, 0);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small, left, 0, width - left, height);
    // nodes
    pen.strokeStyle = css("text");
    pen.lineWidth = 1;
    for (const at of now.edges || []) pen.strokeRect(left + at * wide, 0, 0, height);
    for (const at of now.rowEdges || []) pen.strokeRect(left, at * high, width - left, 0);
    pen.fillStyle = css("soft");
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const step = (size, room) =>
      [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((every) => every * size >= room) || 2000;
    for (let r = 0; r < now.rows; r += step(high, 15))
      pen.fillText(now.row(r), left - 6, Math.max(7, (r + 0.5) * high), left - 8);
    pen.textAlign = "center";
    const widest = pen.measureText(now.tick(now.columns - 1)).width;
    for (let c = 0; c < now.columns; c += step(wide, widest + 12)) {
      pen.fillText(now.tick(c), Math.min(width - widest / 2, left + (c + 0.5) * wide), height + 10);
    }
    pen.fillText(now.axis, left + (width - left) / 2, height + 26);
    if (cell) {
      pen.strokeStyle = css("focus");
      pen.lineWidth = 2;
      pen.strokeRect(left + cell[1] * wide, cell[0] * high, Math.max(3, wide), high);
    }
  };
  const show = (r, c) => {
    cell = [Math.max(0, Math.min(now.rows - 1, r)), Math.max(0, Math.min(now.columns - 1, c))];
    tip.value = now.say(...cell);
    draw();
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(),
      c = Math.floor((event.clientX - box.left - left) / wide),
      r = Math.floor((event.clientY - box.top) / high);
    if (c >= 0 && r < now.rows && !(cell && cell[0] === r && cell[1] === c)) show(r, c);
  });
  canvas.addEventListener("keydown", (event) => {
    const step = {
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      Home: [0, -1e6],
      End: [0, 1e6],
    }[event.key];
    if (!step) return;
    event.preventDefault();
    cell ? show(cell[0] + step[0], cell[1] + step[1]) : show(0, 0);
  });
  redraws.push(draw);
  return () => {
    cell = null;
    tip.value = "";
    draw();
  };
}
function lowest(arrays) {
  let low = Infinity;
  for (const array of arrays) for (const value of array) if (value < low) low = value;
  return low;
}
function legend(node, top, low) {
  // the scale begins at 1 where nothing is below
  const from = low < 0.9995 ? -1 : 0;
  const bar = make("canvas", {
      width: 220,
      height: 1,
      role: "img",
      "aria-label": from ? "colours, from cold to hot" : "colours, from even to hot",
    }),
    span = spanOf(top);
  node.append(
    make(
      "div",
      { class: "legend" },
      make("span", { class: "low" }, `${(2 ** (from * span)).toFixed(2)} ×`),
      bar,
      `${(2 ** span).toFixed(2)} × the mean, or more` +
        (from ? "; the middle is the mean" : "; nothing is below the mean"),
    ),
  );
  redraws.push(() => {
    const pen = bar.getContext("2d");
    for (let i = 0; i < 220; i++) {
      pen.fillStyle = `rgb(${heat(2 ** ((from + ((1 - from) * i) / 219) * span), span)})`;
      pen.fillRect(i, 0, 1, 1);
    }
  });
}
function chooser(label, first) {
  const select = make(
    "select",
    {},
    ...first.map((text) => make("option", { value: -1 }, text)),
    ...names.map((name, i) => make("option", { value: i }, name)),
  );
  return [make("label", {}, label + " ", select), select];
}
function pair(node) {
  const box = make("div", { class: "pair" + (observed ? " single" : "") });
  node.append(box);
  return box;
}
