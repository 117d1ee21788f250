// The table of all heads, which sorts, and the filter that map, charts and table share.
const PAGE = innerWidth > 600 ? 40 : 15;

/** Metrics by what a reader may call them: their names, their labels with and without unit, without spaces and underscores. */
const callsOf = (page) => page.metrics.flatMap((one) => [...new Set([one.name, withUnit(one), ...(one.name === "gaussian_entropy" ? ["entropy of normal scores"] : [])])].map((name) => [name.toLowerCase().replace(/[\s_,]+/g, ""), one]));

/**
 * A test of heads from what was typed: words, L3, L3H5 or "layer 3 head 5", and bounds such as entropy<1, effective keys > 300
 * or 0.2 <= entropy < 1 of a metric's name or label; with what was not understood.
 */
const parseFilter = (page, typed) => {
  const tests = [], unknown = [], calls = callsOf(page);
  const sides = { "<": (x, y) => x < y, ">": (x, y) => x > y, "<=": (x, y) => x <= y, ">=": (x, y) => x >= y, "=": (x, y) => brief(x, "") === brief(y, "") };
  /** The metric that the end of a text names, and the text before it; the longest name wins, else a name that begins so. */
  const named = (text) => {
    const words = text.split(/[\s,]+/).filter(Boolean);
    for (let start = 0; start < words.length; start++) {
      const called = words.slice(start).join("").replaceAll("_", "");
      const found = calls.find(([name]) => name === called);
      if (found) return [found[1], words.slice(0, start).join(" ")];
    }
    const last = (words.at(-1) || "").replaceAll("_", "");
    const found = last && calls.find(([name]) => name.startsWith(last));
    return found ? [found[1], words.slice(0, -1).join(" ")] : [undefined, words.slice(0, -1).join(" "), words.at(-1)];
  };
  const bound = (one, side, limit) => tests.push((at) => one.mean[at] !== null && sides[side](one.mean[at], limit));
  let rest = typed.trim().toLowerCase().replaceAll("≤", "<=").replaceAll("≥", ">=").replaceAll("−", "-");
  const number = "-?(?:\\d+\\.?\\d*|\\.\\d+)(?:e[+-]?\\d+)?";
  const side = "<=|>=|<|>|=";
  const between = new RegExp(`(${number})\\s*(<=|<)\\s*([a-z][a-z_, ]*?)\\s*(<=|<)\\s*(${number})(?=\\s|$)`);
  for (let found = between.exec(rest); found; found = between.exec(rest)) {
    const [one, before, missing] = named(found[3]);
    if (one && !before) {
      bound(one, { "<": ">", "<=": ">=" }[found[2]], +found[1]);
      bound(one, found[4], +found[5]);
    } else unknown.push(`There is no metric named ${missing || before}.`);
    rest = rest.replace(found[0], " ");
  }
  const pattern = new RegExp(`^(.*?)\\s*(${side})\\s*(${number})(?=\\s|$)`);
  let words = "";
  for (let found = pattern.exec(rest); found; found = pattern.exec(rest)) {
    const [one, before, missing] = named(found[1]);
    words += ` ${before}`;
    if (one) bound(one, found[2], +found[3]);
    else unknown.push(missing ? `There is no metric named ${missing}.` : `“${found[2]}${found[3]}” needs a metric before it.`);
    rest = rest.slice(found[0].length);
  }
  rest = `${words} ${rest}`.replace(/\blayer\s+(\d+)(?:[\s,·]+head\s+(\d+))?/g, (_, layer, head) => `l${layer}${head === undefined ? "" : `h${head}`}`).replace(/\bl(\d+)\s+h(\d+)\b/g, "l$1h$2");
  for (const part of rest.split(/\s+/).filter(Boolean)) {
    const place = /^l(\d+)(?:h(\d+))?$/.exec(part);
    if (place) {
      tests.push((at) => page.places[at][0] === +place[1] && (place[2] === undefined || page.places[at][1] === +place[2]));
      continue;
    }
    const texts = (at) => [page.layerOf(at).module.toLowerCase(), page.layerOf(at).status, ...page.classesOf(at).map((kind) => kind.label.toLowerCase())];
    if (/[<>=]/.test(part)) unknown.push(`“${part}” is not a valid bound: write a metric, < or >, and a number.`);
    else if (page.places.some((_, at) => texts(at).some((text) => text.includes(part)))) tests.push((at) => texts(at).some((text) => text.includes(part)));
    else unknown.push(calls.some(([name]) => name === part.replaceAll("_", "")) ? `Give ${part} a bound, such as ${part} > 1.` : `No module, status or class contains “${part}”.`);
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
      ...names.map((one) => ({ key: one.name, title: one.name === "gaussian_entropy" ? "entropy of normal scores" : label(one), value: (at) => one.mean[at], cell: (at) => number(one.mean[at]) })),
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
    const hint = [...unknown, ...(any ? [`${some(page.shown.size, "head")} found.`] : [])].join(" ");
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
