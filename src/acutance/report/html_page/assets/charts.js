// The charts, drawn with Observable Plot. Colours are the style sheet's variables, so that a chart follows the reader's
// colour scheme, on paper too.
const FONT = { fontSize: "11.5px", fontFamily: "inherit", color: "var(--muted)", overflow: "visible" };

const put = (box, options) => {
  const figure = Plot.plot({ width: Math.max(280, box.clientWidth), style: FONT, marginBottom: 38, ...options });
  figure.setAttribute("role", "img");
  box.replaceChildren(figure);
  return figure;
};

// -- distribution over rows -------------------------------------------------------------------------
/** A head's histogram: bins with edges and share of rows; null where none is kept. */
const histogramOf = (page, one, at) => {
  const { data, places } = page, heights = one.first === null ? null : data.arrays[`${one.name}.bars`];
  if (!heights || !heights.length) return null;
  const wide = heights.length / places.length, step = data.level.join, edges = data.edges[one.kind];
  const peak = data.arrays[`${one.name}.peak`][at] / 65535 / data.level.heights, bins = [];
  for (let index = 0; index < wide; index += 1) {
    const share = heights[at * wide + index] * peak, bin = one.first + index;
    bins.push({ bin, share, low: edges[bin * step], high: edges[(bin + 1) * step] });
  }
  return bins.some((bin) => bin.share) ? bins : null;
};

/** Round values within an axis whose bins are all drawn as wide, whatever they span. */
const roundValues = (kind, low, high) => {
  let values = [];
  if (kind === "unit" || kind === "nats") {
    const rough = (high - low) / 5, ten = 10 ** Math.floor(Math.log10(rough));
    const step = ten * [1, 2, 5, 10].find((by) => by * ten >= rough);
    for (let index = Math.ceil(low / step - 1e-9); index * step <= high + 1e-9; index += 1) values.push(index * step);
  } else {
    const inside = (sizes) => sizes.filter((size) => size >= low && size <= high);
    const sizes = (digits) => Array.from({ length: 13 }, (_, power) => digits.map((digit) => digit * 10 ** (power - 6))).flat();
    const signs = (all) => (kind === "signed" ? [...all.filter((size) => size >= 1).reverse().map((size) => -size), 0, ...all.filter((size) => size >= 1)] : all);
    values = kind === "keys" ? Array.from({ length: 33 }, (_, power) => 2 ** power) : signs(sizes([1]));
    if (kind !== "keys" && inside(values).length < 4) values = signs(sizes([1, 2, 5]));
  }
  return values.filter((value) => value >= low * (1 - 1e-6 * Math.sign(low)) && value <= high * (1 + 1e-6 * Math.sign(high)));
};

const drawHistogram = (page, box, at) => {
  const one = page.now(), bins = histogramOf(page, one, at), note = $("histogram-note");
  const range = one.min ? `, from ${number(one.min[at], 3)} to ${number(one.max[at], 3)}` : "";
  if (!bins) {
    box.replaceChildren();
    if (one.group === "Cache plan") note.textContent = `${capital(number(one.mean[at]))} for this head: a plan has no distribution over rows.`;
    else if (one.span) note.textContent = `Mean ${number(one.mean[at])}. The distribution over rows is not recorded.`;
    else note.textContent = one.first === null
      ? `A report with this many heads has no distribution of ${label(one)}. Mean ${number(one.mean[at])} ± ${number(one.std[at], 2)}${range}.`
      : "This head has no valid rows for this metric.";
    return;
  }
  const used = bins.filter((bin) => bin.share).map((bin) => bin.bin);
  const step = page.data.level.join, edges = page.data.edges[one.kind], most = (edges.length - 1) / step;
  let from = Math.min(...used), to = Math.max(...used) + 1;
  while (to - from < 8 && to - from < most) { from = Math.max(0, from - 1); to = Math.min(most, to + 1); }
  const place = (value) => {
    const inside = Math.max(from * step, Math.min(to * step - 1, edges.findLastIndex((edge) => edge <= value)));
    return (inside + Math.min(1, Math.max(0, (value - edges[inside]) / (edges[inside + 1] - edges[inside])))) / step;
  };
  let free = -Infinity;
  const apart = ((to - from) * 42) / Math.max(240, box.clientWidth - 60);
  const ticks = roundValues(one.kind, edges[from * step], edges[to * step]).filter((value) => {
    const fits = place(value) >= free;
    if (fits) free = place(value) + apart;
    return fits;
  });
  const middle = place(one.mean[at]);
  put(box, {
    height: 184, marginLeft: 44, marginRight: 12, marginTop: 24,
    ariaLabel: `${page.long(at)}: distribution of ${label(one)} over rows`,
    x: { domain: [from, to], ticks: ticks.map(place), tickFormat: (_, index) => plain(ticks[index]), label: withUnit(one), labelAnchor: "center", labelArrow: "none", labelOffset: 34 },
    y: { ticks: 3, grid: true, tickFormat: (share) => `${plain(100 * share)}%`, label: null },
    marks: [
      Plot.rectY(bins.filter((bin) => bin.share), { x1: "bin", x2: (bin) => bin.bin + 1, y: "share", fill: "var(--bar)", insetLeft: 0.5, insetRight: 0.5 }),
      Plot.ruleY([0], { stroke: "var(--muted)" }),
      Plot.ruleX([middle], { stroke: "var(--ink)", strokeDasharray: "3 3" }),
      Plot.text([`mean ${number(one.mean[at], 3)}`], { x: [middle], frameAnchor: "top", dy: -14, fill: "var(--ink)", textAnchor: middle > to - (to - from) / 6 ? "end" : middle < from + (to - from) / 6 ? "start" : "middle" }),
      Plot.tip(bins.filter((bin) => bin.share), Plot.pointerX({ x: (bin) => bin.bin + 0.5, y: "share", title: (bin) => `${number(bin.low, 3)} to ${number(bin.high, 3)}\n${percent(bin.share)} of rows` })),
    ],
  });
  const axis = { keys: " The axis is logarithmic.", positive: " The axis is logarithmic.", signed: " The axis compresses large values." }[one.kind] || "";
  note.textContent = `Height: share of its ${some(page.rows(one, at), "row")}. Mean ${number(one.mean[at], 3)} ± ${number(one.std[at], 2)}${range}.${axis}`;
};

// -- measured and predicted entropy of one head ------------------------------------------------------
const drawRange = (page, box, at) => {
  const theory = page.data.theory, [measured, predicted, keys] = ["measured", "predicted", "keys"].map((part) => theory?.[part][at] ?? null);
  const note = $("range-note");
  if (measured === null || predicted === null) {
    box.replaceChildren();
    note.textContent = theory?.impossible.includes(at)
      ? "No prediction for this head: a few tokens beyond the first dominate, more than a skewness of 1.62 allows."
      : "No prediction for this head. A prediction needs softmax weights over at least 8 tokens without an extra sink, and the metrics first_gap, rest_logit_std and rest_jensen_gap.";
    return;
  }
  const most = Math.log(keys), off = measured - predicted;
  put(box, {
    height: 98, marginLeft: 10, marginRight: 10, marginTop: 24, marginBottom: 42,
    ariaLabel: `Measured entropy ${number(measured)}, predicted ${number(predicted)}, maximum ${number(most)} nats`,
    x: { domain: [0, most], ticks: 5, label: "entropy, nats", labelAnchor: "center", labelArrow: "none", labelOffset: 34 },
    y: { axis: null, domain: [0, 1] },
    marks: [
      Plot.rectY([0], { x1: 0, x2: most, y1: 0.3, y2: 0.7, fill: "var(--line)", rx: 2 }),
      Plot.tickX([predicted], { x: [predicted], y: null, stroke: "var(--mark)", strokeWidth: 2.5, insetTop: 2, insetBottom: 2 }),
      Plot.dot([measured], { x: [measured], y: [0.5], r: 6.5, fill: "var(--bar)", stroke: "var(--panel)", strokeWidth: 1.5 }),
      Plot.text([measured], { x: [measured], text: [`measured ${number(measured, 3)}`], frameAnchor: "top", dy: -12, fill: "var(--ink)", fontWeight: 600, textAnchor: measured > most * 0.75 ? "end" : measured < most * 0.25 ? "start" : "middle" }),
    ],
  });
  const meaning = Math.abs(off) < 0.25
    ? "These numbers describe the head well."
    : `They do not describe the head well: it is ${off < 0 ? "sharper" : "more diffuse"} than predicted.`;
  note.textContent = `Rows with about ${number(keys, 3)} visible tokens; the right end, ${number(most, 3)}, is uniform weight. Line: ${number(predicted, 3)}, predicted from four numbers: how far the first token's score is above the others, how much this varies, and the standard deviation and upper tail of the other scores. ${meaning}`;
};

// -- a metric against the number of visible tokens ----------------------------------------------------
const drawProfile = (page, box, points, one, axis) => {
  put(box, {
    height: 190, marginLeft: 48, marginTop: 18,
    ariaLabel: `${page.long(page.chosen)}: ${label(one)} against ${axis}`,
    x: { type: "log", base: 2, label: axis, labelAnchor: "center", labelArrow: "none", labelOffset: 34, tickFormat: (value) => plain(value), ticks: 6 },
    y: { grid: true, ticks: 4, tickFormat: plain, label: withUnit(one), labelArrow: "none", zero: one.kind === "nats" },
    marks: [
      ...(points.some((point) => point.most) ? [Plot.lineY(points, { x: "n", y: "most", stroke: "var(--muted)", strokeDasharray: "2 3" })] : []),
      ...(points.some((point) => point.predicted) ? [Plot.lineY(points, { x: "n", y: "predicted", stroke: "var(--mark)", strokeWidth: 1.8 })] : []),
      Plot.lineY(points, { x: "n", y: "mean", stroke: "var(--bar)", strokeWidth: 1.5 }),
      Plot.ruleX(points.filter((point) => point.error), { x: "n", y1: (point) => point.mean - point.error, y2: (point) => point.mean + point.error, stroke: "var(--bar)", strokeWidth: 1.5 }),
      Plot.dot(points, { x: "n", y: "mean", fill: "var(--bar)", r: 4 }),
      Plot.tip(points, Plot.pointerX({ x: "n", y: "mean", title: (point) => `${point.range}\n${withUnit(one)}: ${number(point.mean, 3)}${point.predicted ? `\npredicted: ${number(point.predicted, 3)}` : ""}\n${some(point.rows, "row")}` })),
    ],
  });
};

/** Weight by distance: bars for the head, a line for a head that weighs all tokens alike. */
const drawDistances = (page, box, { mass, even, wide }) => {
  const name = (octave) => (octave === 0 ? "itself" : octave === 1 ? "1" : octave === 2 ? "2–3" : `${count(2 ** (octave - 1))}–${count(2 ** octave - 1)}`);
  const least = (octave) => (octave === 0 ? "0" : octave < 11 ? String(2 ** (octave - 1)) : `${2 ** (octave - 11)}k`);
  const steps = page.data.level.distances;
  const both = mass.subarray(wide).some((part) => part > 0) || even.subarray(wide).some((part) => part > 0);
  const side = (ahead) => Array.from({ length: wide }, (_, octave) => ({ octave, ahead, at: ahead ? octave : -octave, mass: mass[octave + (ahead ? wide : 0)] / steps, even: even[octave + (ahead ? wide : 0)] / steps }));
  const points = [...side(false), ...(both ? side(true).filter((point) => point.octave) : [])].sort((a, b) => a.at - b.at);
  const used = points.filter((point) => point.mass || point.even);
  if (!used.length) { box.replaceChildren(); return; }
  const from = used[0].at, to = used[used.length - 1].at, kept = points.filter((point) => point.at >= from && point.at <= to);
  const every = Math.ceil(kept.length / 9);
  put(box, {
    height: 180, marginLeft: 44, marginTop: 20, ariaLabel: `${page.long(page.chosen)}: weight by distance`,
    x: { domain: [from - 0.5, to + 0.5], ticks: kept.filter((point) => point.at % every === 0).map((point) => point.at), tickFormat: (value) => least(Math.abs(value)), label: both ? "tokens back  ·  tokens ahead" : "tokens back", labelAnchor: "center", labelArrow: "none", labelOffset: 34 },
    y: { grid: true, ticks: 3, tickFormat: (value) => `${plain(100 * value)}%`, label: null },
    marks: [
      Plot.rectY(kept, { x1: (point) => point.at - 0.5, x2: (point) => point.at + 0.5, y: "mass", fill: "var(--bar)", insetLeft: 1, insetRight: 1 }),
      Plot.lineY(kept, { x: "at", y: "even", stroke: "var(--mark)", strokeWidth: 1.8 }),
      Plot.ruleY([0], { stroke: "var(--muted)" }),
      Plot.tip(kept, Plot.pointerX({ x: "at", y: "mass", title: (point) => `${point.octave ? `${name(point.octave)} ${point.ahead ? "ahead" : "back"}` : "the token itself"}\n${percent(point.mass)} of the weight\n${percent(point.even)} with uniform weights` })),
    ],
  });
};

// -- all heads -----------------------------------------------------------------------------------------
const clickable = (page, figure) => {
  figure.style.cursor = "pointer";
  figure.addEventListener("click", () => { if (figure.value) page.choose(figure.value.at); });
};
const seen = (page, points) => points.filter((point) => page.shown === null || page.shown.has(point.at));

const drawLayers = (page) => {
  const one = page.now(), lines = (point) => `${page.long(point.at)}\n${withUnit(one)}: ${number(point.y)}`;
  const points = seen(page, page.places.map(([x], at) => ({ at, x, y: one.mean[at] })).filter((point) => point.y !== null && (!one.log || point.y > 0)));
  const means = one.layer.map((y, x) => ({ x, y })).filter((point) => point.y !== null);
  const last = Math.max(0, page.layers.length - 1);
  $("layers-title").textContent = `${capital(label(one))}, layer by layer`;
  clickable(page, put($("layer-plot"), {
    height: 300, marginLeft: 48, marginTop: 22, ariaLabel: `Mean ${label(one)} of every head against its layer`,
    x: { domain: [-0.5, last + 0.5], ticks: Array.from({ length: last + 1 }, (_, x) => x).filter((x) => x % Math.ceil((last + 1) / 12) === 0), tickFormat: String, label: "layer", labelAnchor: "center", labelArrow: "none", labelOffset: 34 },
    y: { type: one.log ? "log" : "linear", domain: one.kind === "unit" ? [0, 1] : undefined, grid: true, nice: true, ticks: 5, tickFormat: plain, label: withUnit(one), labelArrow: "none" },
    marks: [
      Plot.dot(points, { x: "x", y: "y", r: points.length > 600 ? 2 : 3.5, fill: "var(--bar)", fillOpacity: points.length > 600 ? 0.4 : 0.65 }),
      Plot.lineY(means, { x: "x", y: "y", stroke: "var(--ink)", strokeWidth: 1.8, marker: means.length > 30 ? undefined : "dot" }),
      Plot.dot(points.filter((point) => point.at === page.chosen), { x: "x", y: "y", r: 7, stroke: "var(--mark)", strokeWidth: 2.5 }),
      Plot.tip(points, Plot.pointer({ x: "x", y: "y", title: lines })),
    ],
  }));
  $("layer-note").textContent = "Each dot is a head, and the line is the layer's mean over all rows. The ring marks the open head. Click a dot to open its head.";
};

const drawTheory = (page) => {
  const box = $("theory-plot"), theory = page.data.theory, entropy = page.named("entropy"), gaussian = page.named("gaussian_entropy");
  const measured = theory ? theory.measured : entropy?.mean, predicted = theory ? theory.predicted : gaussian?.mean;
  if (!measured || !predicted) {
    box.replaceChildren();
    $("theory-note").textContent = "Entropy or its prediction was not recorded.";
    return;
  }
  const whole = page.places.map(([layer], at) => ({ at, layer, x: predicted[at], y: measured[at] })).filter((point) => point.x !== null && point.y !== null);
  const points = seen(page, whole), top = Math.max(0.1, ...whole.map((point) => Math.max(point.x, point.y))) * 1.04;
  const title = (point) => `${page.long(point.at)}\npredicted ${number(point.x, 3)}, measured ${number(point.y, 3)} nats`;
  clickable(page, put(box, {
    height: 300, marginLeft: 48, marginTop: 22, ariaLabel: "Measured entropy of every head against its predicted entropy",
    x: { domain: [0, top], ticks: 6, tickFormat: plain, label: "predicted entropy, nats", labelAnchor: "center", labelArrow: "none", labelOffset: 34 },
    y: { domain: [0, top], ticks: 5, tickFormat: plain, grid: true, label: "measured entropy, nats", labelArrow: "none" },
    marks: [
      Plot.link([0], { x1: 0, y1: 0, x2: top, y2: top, stroke: "var(--muted)", strokeDasharray: "4 4" }),
      Plot.text(["as predicted"], { x: [top * 0.16], y: [top * 0.16], dx: 10, dy: 6, textAnchor: "start", fill: "var(--muted)", fontStyle: "italic" }),
      Plot.text(["sharper than predicted"], { frameAnchor: "bottom-right", dy: -8, dx: -6, fill: "var(--muted)", fontStyle: "italic" }),
      Plot.text(["more diffuse"], { frameAnchor: "top-left", dy: 4, dx: 8, fill: "var(--muted)", fontStyle: "italic" }),
      Plot.dot(points, { x: "x", y: "y", r: points.length > 600 ? 2 : 4, fill: (point) => page.paint(0.08 + (0.8 * point.layer) / Math.max(1, page.layers.length - 1))[0], stroke: "var(--muted)", strokeWidth: points.length > 600 ? 0 : 0.6 }),
      Plot.dot(points.filter((point) => point.at === page.chosen), { x: "x", y: "y", r: 8, stroke: "var(--mark)", strokeWidth: 2.5 }),
      Plot.tip(points, Plot.pointer({ x: "x", y: "y", title })),
    ],
  }));
  const off = whole.map((point) => Math.abs(point.x - point.y)).sort((a, b) => a - b);
  const half = `Half of the heads are within ${number(off[Math.floor(off.length / 2)] ?? null, 2)} nats of the prediction. Dark dots are early layers, bright dots late layers.`;
  $("theory-note").textContent = theory
    ? `Rows with about ${number(theory.n, 3)} visible tokens. Predicted from four numbers of each head: how far the first token's score is above all others, how much this varies, and the standard deviation and upper tail of the other scores. The prediction explains ${number(100 * theory.r2, 3)} % of the variance between heads. ${half}${theory.impossible.length ? ` Not predicted: ${some(theory.impossible.length, "head")} in which a few tokens beyond the first dominate.` : ""}`
    : `Predicted for the same number of normally distributed scores with the same standard deviation. ${half}`;
};
