function ms(value) {
  const size = Math.abs(value);
  if (size >= 999.5) return (value / 1e3).toFixed(2) + " s";
  return +(+value.toPrecision(3)).toFixed(3) + " ms";
}
// signs of lost and won time, which do not depend on colours
const LOST = "\u25bc",
  WON = "\u25b2";
function facts() {
  document.getElementById("title").textContent = document.title = observed
    ? "What imbalance costs"
    : "What FSSDP did";
  const known = {
    run: info.folder,
    started: info.started,
    "top k": info.top_k,
    ...(observed ? {} : { slots: info.slots, lifetime: info.lifetime, transport: info.transport }),
    "median step": info.step === null ? "" : ms(info.step),
    ...info.versions,
  };
  document.getElementById("facts").textContent = Object.entries(known)
    .filter(([, value]) => value !== "")
    .map((fact) => fact.join(" "))
    .join(" \u00b7 ");
}
function nextCommand({ command, purpose }) {
  const code = make("code", {}, command),
    button = make("button", { type: "button", class: "copy" }, "Copy"),
    done = make("output", { class: "heard", "aria-live": "polite" });
  button.onclick = async () => {
    try {
      await navigator.clipboard.writeText(command);
    } catch {
      // files opened from a disk may not use the clipboard: select the text instead
      getSelection().selectAllChildren(code);
      if (!document.execCommand("copy")) return;
    }
    button.textContent = done.value = "Copied";
  };
  return make(
    "div",
    { class: "next" },
    make("span", {}, purpose),
    make("pre", { tabindex: 0, "aria-label": "command" }, code),
    button,
    done,
  );
}
function worstLayers() {
  const rows = data.worst.map((at) => {
    const row = data.layers[at];
    return make(
      "li",
      {},
      make("b", {}, names[at]),
      data.lines.lost ? ` ${LOST} ${ms(row[7])} lost per step, ` : " ",
      `fullest rank ${row[0].toFixed(2)} times the mean`,
    );
  });
  return make("ol", { class: "worst" }, ...rows);
}
function partsTable() {
  const { rows, step, of } = data.parts;
  if (!rows.length) return "";
  const share = (value) => `${((100 * value) / step).toFixed(1)} %`;
  const signed = (value) =>
    Math.abs(value) < 5e-4 * step ? "\u2013" : `${value < 0 ? LOST : WON} ${share(Math.abs(value))}`;
  const costs = (value) =>
    Math.abs(value) < 5e-4 * step ? "\u2013" : `${value < 0 ? WON : LOST} ${share(Math.abs(value))}`;
  const sum = (at) => rows.reduce((total, row) => total + row[at], 0);
  const line = (name, lost, won) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, name),
      make("td", {}, costs(lost)),
      make("td", {}, signed(won)),
    );
  return make(
    "div",
    { class: "parts" },
    make(
      "table",
      { class: "data" },
      make("caption", {}, `Share of a stock step of ${ms(step)}, modelled, ${of}`),
      make(
        "thead",
        {},
        make(
          "tr",
          {},
          make("th", { scope: "col" }, "part"),
          make("th", { scope: "col" }, `imbalance costs`),
          make("th", { scope: "col" }, observed ? "FSSDP would win" : "FSSDP won"),
        ),
      ),
      make(
        "tbody",
        {},
        ...rows.map((row) => line(...row)),
        line("together", sum(1), sum(2)),
      ),
    ),
  );
}
function save(name, type, text) {
  const link = make("a", {
    download: name,
    href: URL.createObjectURL(new Blob([text], { type })),
  });
  link.click();
  URL.revokeObjectURL(link.href);
}
function csvOfLayers() {
  const cell = (value) => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  return [["layer", ...data.columns], ...data.layers.map((row, i) => [names[i], ...row])]
    .map((row) => row.map((value) => cell(String(value))).join(",") + "\n")
    .join("");
}
function jsonOfRun() {
  const kept = { ...data };
  for (const name of ["loads", "spread", "hot"]) delete kept[name];
  return JSON.stringify(kept, null, 1) + "\n";
}
function exportButtons() {
  const button = (id, text, act) => {
    const node = make("button", { type: "button", id }, text);
    node.onclick = act;
    return node;
  };
  return make(
    "div",
    { class: "controls" },
    button("csv", "Save layers as CSV", () => save("layers.csv", "text/csv", csvOfLayers())),
    button("json", "Save figures as JSON", () =>
      save("report.json", "application/json", jsonOfRun()),
    ),
  );
}
function summary() {
  facts();
  const { verdict } = data;
  const node = section("summary", "In short"),
    sign = { won: WON + " ", lost: LOST + " ", neutral: "" }[verdict.kind];
  node.append(
    make("p", { class: `verdict ${verdict.kind}` }, sign + verdict.text),
    make("h3", {}, "Layers that lose most"),
    worstLayers(),
    nextCommand(verdict),
    partsTable(),
    make("p", {}, verdict.reason),
    ...data.words.map((text) => make("p", {}, text)),
    exportButtons(),
  );
}
function compared() {
  if (!data.compared) return;
  const { heads, rows, layers } = data.compared;
  const node = section(
    "compared",
    "Compared with another run",
    "Step times are measured; lost time is modelled.",
    "Comparison",
  );
  const table = (head, body) => {
    const scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": head[0] });
    fill(scroll, head, body, true);
    node.append(scroll);
  };
  const [runs, ...others] = heads;
  table(
    ["figure", ...rows.map((row) => row[0])],
    others.map((name, i) => [name, ...rows.map((row) => row[i + 1] ?? "\u2013")]),
  );
  const [first, second] = ["first run", "second run"];
  table(
    [
      "layer",
      `imbalance, ${first}`,
      `imbalance, ${second}`,
      `ms lost, ${first}`,
      `ms lost, ${second}`,
    ],
    [...layers].sort((a, b) => b[3] - a[3]),
  );
}
