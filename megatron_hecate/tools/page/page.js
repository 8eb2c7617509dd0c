function loads() {
  const { groups, top } = data.loads,
    ranks = info.ranks,
    span = spanOf(top),
    num = groups.length;
  const text =
    "Load of each rank over the mean of its layer. " +
    (observed
      ? "All ranks wait for the fullest one."
      : "Left: every token at its expert's home. Right: with replicas. The more even, the " +
        "less waiting.");
  const node = section("loads", "Load of layers and ranks", text, "Loads");
  // ranks of a node side by side
  const order = Array.from({ length: ranks }, (_, r) => r).sort(
    (a, b) => info.node[a] - info.node[b] || a - b,
  );
  const nodes = new Set(info.node).size;
  const edges = order.flatMap((r, i) =>
    i && info.node[r] !== info.node[order[i - 1]] ? [i] : [],
  );
  const whole = data.loads.whole.map((t) => unpack(t, top)),
    parts = data.loads.parts.map((t) => unpack(t, top));
  const [label, select] = chooser("Show", ["all layers"]);
  const slider = make("input", { type: "range", min: 0, max: num, value: 0, id: "when" }),
    said = make("output", { for: "when" });
  const time = make("label", {}, "When ", slider, " ", said);
  node.append(make("div", { class: "controls" }, label, time));
  const view = (side) => () => {
    const layer = +select.value,
      at = +slider.value - 1;
    if (layer < 0) {
      const value = (r, c) =>
        at < 0
          ? whole[side][r * ranks + order[c]]
          : parts[side][(r * ranks + order[c]) * num + at];
      return {
        rows: names.length,
        columns: ranks,
        value,
        span,
        row: (r) => names[r],
        tick: (c) => String(order[c]),
        axis: nodes > 1 ? `rank, by node (${nodes} nodes)` : "rank",
        edges,
        say: (r, c) =>
          `${names[r]}, rank ${order[c]} on node ${info.node[order[c]]}: ${times(value(r, c))}`,
      };
    }
    const value = (r, c) => parts[side][(layer * ranks + order[r]) * num + c];
    return {
      rows: ranks,
      columns: num,
      value,
      span,
      row: (r) => `rank ${order[r]}`,
      rowEdges: edges,
      tick: (c) => String(groups[c][0]),
      axis: "iteration",
      say: (r, c) => `${names[layer]}, rank ${order[r]}, ${iterations(groups[c])}: ${times(value(r, c))}`,
    };
  };
  const box = pair(node),
    draws = sides.map((side, i) => picture(box, side[0].toUpperCase() + side.slice(1), view(i)));
  legend(node, top, lowest([...whole, ...parts]));
  const table = figures(node, "load of each rank over the mean, as shown above", () => {
    const views = sides.map((_, i) => view(i)()),
      first = views[0],
      rows = [];
    for (let r = 0; r < first.rows; r++)
      views.forEach((v, i) =>
        rows.push([
          `${first.row(r)}, ${sides[i]}`,
          ...Array.from({ length: v.columns }, (_, c) => v.value(r, c).toFixed(3)),
        ]),
      );
    return [
      [
        first.rows === ranks && +select.value >= 0 ? "rank" : "layer",
        ...Array.from({ length: first.columns }, (_, c) => `${first.axis} ${first.tick(c)}`),
      ],
      rows,
    ];
  });
  const update = () => {
    slider.disabled = +select.value >= 0;
    said.value = slider.disabled
      ? "all iterations"
      : +slider.value
        ? iterations(groups[slider.value - 1])
        : "whole run";
    slider.setAttribute("aria-valuetext", said.value);
    draws.forEach((draw) => draw());
    table();
  };
  select.onchange = slider.oninput = update;
  redraws.push(() => {
    said.value ||= "whole run";
  });
}
function spread() {
  const { groups, top } = data.spread,
    span = spanOf(top),
    num = groups.length,
    parts = data.spread.parts.map((t) => unpack(t, top));
  const node = section(
    "spread",
    "Imbalance of every layer over time",
    "Load of the fullest rank over the mean. 1 is even; all ranks wait for the excess.",
    "Layers over time",
  );
  const box = pair(node);
  sides.forEach((side, i) => {
    const value = (r, c) => parts[i][r * num + c];
    picture(box, side[0].toUpperCase() + side.slice(1), () => ({
      rows: names.length,
      columns: num,
      value,
      span,
      row: (r) => names[r],
      tick: (c) => String(groups[c][0]),
      axis: "iteration",
      say: (r, c) => `${names[r]}, ${iterations(groups[c])}: ${times(value(r, c))}`,
    }));
  });
  legend(node, top, lowest(parts));
  figures(node, "imbalance of every layer", () => [
    ["layer", ...groups.map(iterations)],
    names.flatMap((name, r) =>
      sides.map((side, i) => [
        `${name}, ${side}`,
        ...groups.map((_, c) => parts[i][r * num + c].toFixed(3)),
      ]),
    ),
  ]);
}
function experts() {
  const { groups, top } = data.hot,
    { number, home, replicas } = data.experts,
    span = spanOf(top),
    num = groups.length,
    most = number[0].length;
  const parts = unpack(data.hot.parts[0], top),
    whole = unpack(data.hot.whole[0], top);
  const node = section(
    "experts",
    "The hottest experts",
    `The ${most} experts of a layer with most tokens, as routed, over the mean expert.`,
    "Experts",
  );
  const [label, select] = chooser("Layer", []);
  node.append(make("div", { class: "controls" }, label));
  const value = (r, c) => parts[(+select.value * most + r) * num + c],
    of = (list, r) => list[+select.value][r];
  const draw = picture(node, "Load of each expert", () => ({
    rows: most,
    columns: num,
    value,
    span,
    row: (r) => `expert ${of(number, r)}`,
    tick: (c) => String(groups[c][0]),
    axis: "iteration",
    say: (r, c) =>
      `expert ${of(number, r)}, home on rank ${of(home, r)}, ${iterations(groups[c])}: ${times(value(r, c))}`,
  }));
  legend(node, top, lowest([parts]));
  const table = figures(node, "the hottest experts of this layer", () => [
    [
      "expert",
      "home rank",
      "load over the mean expert",
      ...(observed ? [] : ["replicas on average"]),
    ],
    number[+select.value].map((e, r) => [
      String(e),
      String(of(home, r)),
      +whole[+select.value * most + r].toFixed(3),
      ...(observed ? [] : [of(replicas, r)]),
    ]),
  ]);
  select.onchange = () => {
    draw();
    table();
  };
}
function layers() {
  const node = section(
    "layers",
    "Every layer, the costliest first",
    "Load of the fullest rank over the mean: mean and worst iteration. Replicas of all ranks " +
      "together. Milliseconds per step, by the step model. A click on a column's header sorts " +
      "by it.",
    "Layers",
  );
  node.append(
    make(
      "dl",
      { class: "reasons" },
      ...Object.entries(data.reasons).flatMap(([name, text]) => [
        make("dt", {}, name),
        make("dd", {}, text),
      ]),
    ),
  );
  const scroll = make("div", {
    class: "scroll",
    tabindex: 0,
    role: "region",
    "aria-label": "decisions",
  });
  node.classList.add("long");
  node.append(scroll);
  const heads = [
    "layer",
    "as routed",
    "worst, as routed",
    "as computed",
    "worst, as computed",
    "replicas",
    "% of iterations without",
    "late",
    "ms lost",
    "ms won back, net",
    "decision",
  ];
  const kept = observed ? [0, 1, 2, 8, 10] : heads.map((_, i) => i);
  const rows = data.layers
    .map((row, i) => [names[i], ...row])
    .map((row) => row.map((v, i) => (i === 6 ? +(100 * v).toFixed(1) : v)));
  rows.sort((a, b) => b[8] - a[8]);
  fill(
    scroll,
    kept.map((i) => heads[i]),
    rows.map((row) => kept.map((i) => row[i])),
    true,
  );
}
const TITLES = {
  lost: [
    observed ? "Milliseconds lost" : "Milliseconds lost and won back",
    "Time per step beyond forced balance, by the step model: expert compute and all-to-all." +
      (observed
        ? ""
        : " With FSSDP, the cost of replicas is part of the time lost, and deducted from the " +
          "time won back."),
    "Time",
  ],
  step: [
    "Time of a step: measured and modelled",
    "The modelled step is scaled once, so that its mean is that of the measured steps. Where " +
      "routing explains the step time, the two lines move together; where they do not, " +
      "something else costs time.",
    "Step time",
  ],
  imbalance: [
    "Imbalance over time",
    "Load of the fullest rank over the mean, over the layers: the line is the median, the " +
      "band holds the middle 80 %, dots are the worst layer.",
    "Imbalance",
  ],
  copies: [
    "Copies: hidden and not",
    "Time of fetches and returns on the busiest link. The part that hides behind compute " +
      "costs little; iterations without measurements use the cost model.",
    "Copies",
  ],
};
function line(name) {
  const spec = data.lines[name];
  if (spec) lines({ name, ...spec }, section(name, ...TITLES[name]));
}

summary();
compared();
layers();
line("step");
line("lost");
line("imbalance");
loads();
spread();
experts();
line("copies");
let drawn = 0;
function redraw() {
  palette = {};
  drawn = innerWidth;
  for (const one of redraws) one();
}
const theme = document.getElementById("theme");
theme.onchange = () => {
  root.dataset.theme = theme.value;
  redraw();
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", () => {
  if (innerWidth !== drawn) redraw();
});
addEventListener("beforeprint", () => {
  root.dataset.theme = "light";
  root.classList.add("print");
  redraw();
});
addEventListener("afterprint", () => {
  root.dataset.theme = theme.value;
  root.classList.remove("print");
  redraw();
});
redraw();
root.dataset.ready = Math.round(performance.now());
