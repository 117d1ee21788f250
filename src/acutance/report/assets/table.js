// The table of all heads, which sorts, and the filter that map, charts and table share.
const PAGE = innerWidth > 600 ? 40 : 15;

/** A test of heads from what was typed: words, L3, L3H5, and bounds such as entropy<1; with a hint on what was not understood. */
const parseFilter = (page, typed) => {
  const tests = [], unknown = [];
  for (const part of typed.trim().toLowerCase().split(/\s+/).filter(Boolean)) {
    const bound = /^([a-z_]+)(<|>)(-?[\d.]+(?:e-?\d+)?)$/.exec(part);
    const place = /^l(\d+)(?:h(\d+))?$/.exec(part);
    if (bound) {
      const one = page.metrics.find((metric) => metric.name === bound[1]) || page.metrics.find((metric) => metric.name.startsWith(bound[1]));
      if (one) tests.push((at) => one.mean[at] !== null && (bound[2] === "<" ? one.mean[at] < +bound[3] : one.mean[at] > +bound[3]));
      else unknown.push(bound[1]);
    } else if (place) {
      tests.push((at) => page.places[at][0] === +place[1] && (place[2] === undefined || page.places[at][1] === +place[2]));
    } else {
      tests.push((at) => [page.layerOf(at).module.toLowerCase(), page.layerOf(at).status, ...page.classesOf(at).map((kind) => kind.label.toLowerCase())].some((text) => text.includes(part)));
    }
  }
  return { test: (at) => tests.every((one) => one(at)), some: tests.length > 0, unknown };
};

const drawTable = (page) => {
  const { places } = page, all = places.map((_, at) => at);
  const fixed = ["normalized_entropy", "entropy", "gaussian_entropy", "effective_keys", "top_weight", "first_weight", "max_logit"];
  let sorted = "place", falling = false, length = PAGE;

  const columns = () => {
    const names = [page.now(), ...fixed.map(page.named).filter((one) => one && one !== page.now())];
    return [
      { key: "place", title: "head", value: (at) => at, cell: (at) => { const cell = make("th"); cell.append(button(page.short(at), "pick link", () => { page.choose(at); $("head").scrollIntoView({ block: "start" }); $("head").focus({ preventScroll: true }); })); return cell; } },
      ...names.map((one) => ({ key: one.name, title: one.name === "gaussian_entropy" ? "predicted entropy" : label(one), value: (at) => one.mean[at], cell: (at) => number(one.mean[at]) })),
      ...(page.data.heads.some((kinds) => kinds.length) ? [{ key: "class", title: "class", text: true, value: (at) => page.classesOf(at).map((kind) => kind.label).join(", "), cell: (at) => make("td", page.classesOf(at).map((kind) => kind.label).join(", "), "text") }] : []),
      { key: "status", title: "status", text: true, value: (at) => page.layerOf(at).status, cell: (at) => make("td", page.layerOf(at).status, "text") },
    ];
  };

  const draw = () => {
    const shape = columns(), by = shape.find((one) => one.key === sorted) || shape[0];
    const kept = all.filter((at) => page.shown === null || page.shown.has(at));
    const missing = (value) => value === null || value === "";
    const order = (a, b) => {
      const x = by.value(a), y = by.value(b);
      if (missing(x) || missing(y)) return missing(x) - missing(y) || a - b;
      return (x < y ? -1 : x > y ? 1 : 0) * (falling ? -1 : 1) || a - b;
    };
    kept.sort(order);
    const head = make("thead"), line = make("tr"), body = make("tbody");
    shape.forEach((one) => {
      const cell = make("th", undefined, one.text ? "text" : ""), mark = one.key === by.key ? (falling ? " ↓" : " ↑") : "";
      cell.scope = "col";
      cell.setAttribute("aria-sort", one.key === by.key ? (falling ? "descending" : "ascending") : "none");
      cell.append(button(one.title + mark, "pick", () => {
        falling = sorted === one.key ? !falling : false;
        sorted = one.key;
        draw();
        $("table").querySelectorAll("thead button")[shape.indexOf(one)].focus();
      }));
      line.append(cell);
    });
    head.append(line);
    kept.slice(0, length).forEach((at) => {
      const item = row(shape.map((one) => one.cell(at)));
      item.className = at === page.chosen ? "now" : "";
      body.append(item);
    });
    $("table").replaceChildren(head, body);
    $("list-note").textContent = `${kept.length === all.length ? some(all.length, "head") : `${count(kept.length)} of ${some(all.length, "head")}`}, means over rows. Click a heading to sort, a head to open it.`;
    $("more").hidden = kept.length <= length;
    $("more").textContent = `Show all ${count(kept.length)}`;
  };

  const filter = () => {
    const { test, some: any, unknown } = parseFilter(page, $("filter").value);
    page.shown = any ? new Set(all.filter(test)) : null;
    const hint = unknown.length ? `No metric is called ${unknown.join(", ")}.` : any ? `${some(page.shown.size, "head")} found.` : "";
    $("filter-hint").textContent = hint;
    $("filter-hint").hidden = !hint;
    document.querySelectorAll("#classes button").forEach((chip) => chip.setAttribute("aria-pressed", $("filter").value.trim().toLowerCase() === chip.dataset.name));
    page.changed("filter");
  };

  $("filter").addEventListener("input", filter);
  $("more").addEventListener("click", () => { length = Infinity; draw(); });
  addEventListener("beforeprint", () => {
    $("numbers-part").open = true;
    if (all.length <= 400) { length = Infinity; draw(); }
  });
  page.on((what) => { if (what.some((one) => ["head", "metric", "filter"].includes(one))) draw(); });
  return { filter };
};
