// The layer × head map. It is a table and no chart of the library: a grid of focusable cells with labels is what
// screen readers and arrow keys know, cells hold their value as text, and 5,000 of them draw in one pass.
const drawMap = (page) => {
  const { layers, places, data } = page;
  const map = $("map"), cells = [], means = [];
  const columns = [...new Set(layers.flatMap((layer) => layer.numbers))].sort((a, b) => a - b), widest = columns.length;
  let focused = 0;

  const build = () => {
    const line = make("tr"), corner = make("th", "layer", "corner");
    corner.scope = "col";
    line.append(corner);
    const step = widest > 40 ? 8 : widest > 20 ? 4 : 1;
    columns.forEach((head, index) => {
      const name = make("th", index % step ? "" : String(head));
      name.scope = "col";
      name.setAttribute("aria-label", `head ${head}`);
      line.append(name);
    });
    line.append(make("td", "", "gap"), Object.assign(make("th", "mean", "mean"), { scope: "col" }));
    map.tHead.append(line);
    layers.forEach((layer, index) => {
      const name = make("th", index + ({ mismatch: " !", unverified: " ?" }[layer.status] || "") + (layer.crossing ? " ×" : ""));
      name.title = `${layer.module}${layer.crossing}: ${layer.status}`;
      const body = row([name]);
      columns.forEach((head) => {
        const there = page.find(index, head) !== undefined, cell = make("td", "", there ? "head" : "");
        if (there) {
          cell.tabIndex = -1;
          cell.dataset.at = cells.length;
          cells.push(cell);
        }
        body.append(cell);
      });
      means.push(make("td", "", "mean"));
      body.append(make("td", "", "gap"), means[index]);
      map.tBodies[0].append(body);
    });
    const dense = widest > 32 || layers.length > 40;
    map.style.setProperty("--cell", dense ? "14px" : widest > 16 || layers.length > 20 ? "24px" : "38px");
    map.classList.toggle("dense", dense);
  };

  const fit = () => {
    const room = widest > 40 ? 10.8 : widest > 20 ? 16 : 20;
    map.style.minWidth = `${widest * room + (innerWidth > 600 ? 110 : 90)}px`;
    map.style.maxWidth = `${widest * 84 + 130}px`;
    map.classList.toggle("bare", !cells.length || cells[0].clientWidth < 31 || cells[0].clientHeight < 16);
    means.forEach((cell) => { cell.style.fontSize = cell.clientHeight < 16 ? "10.5px" : ""; });
  };

  const scale = () => {
    const one = page.now();
    if (!$("stretch").checked) return one;
    const there = one.mean.filter((value) => value !== null);
    const low = Math.min(...there), high = Math.max(...there);
    if (!there.length || high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high))) return one;
    return { low, high, log: one.log };
  };

  const fill = (cell, value, { low, high, log }) => {
    cell.textContent = brief(value, page.now().kind);
    cell.classList.toggle("none", value === null);
    if (value === null) { cell.style.background = cell.style.color = ""; return; }
    const at = log ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : (value - low) / (high - low);
    [cell.style.background, cell.style.color] = page.paint(at);
  };

  const colour = () => {
    const one = page.now(), ends = scale();
    cells.forEach((cell, at) => {
      fill(cell, one.mean[at], ends);
      const kinds = page.classesOf(at).map((kind) => kind.label);
      const [layer, head] = places[at];
      const kept = page.planned(at);
      cell.setAttribute("aria-label", `layer ${layer}, head ${head}: ${[number(one.mean[at]), ...kinds, ...(kept ? [`keeps ${kept.keeps}`] : [])].join(", ")}`);
    });
    means.forEach((cell, layer) => fill(cell, one.layer[layer], ends));
    map.setAttribute("aria-label", `Mean ${label(one)}, layers down, heads across`);
    const measure = one.unit === "1" ? "a pure number" : `in ${one.unit === "nat" ? "nats (natural logarithms)" : one.unit}`;
    $("meaning").textContent = `${capital(one.meaning)}. ${one.group === "Cache plan" ? capital(measure) : `Mean over rows, ${measure}`}, range ${one.range}.`;
    $("low").textContent = one.ends[0];
    $("high").textContent = one.ends[1] + (ends.log ? " (log scale)" : "");
    const pen = $("bar").getContext("2d");
    for (let x = 0; x < 380; x += 1) { pen.fillStyle = page.paint(x / 379)[0]; pen.fillRect(x, 0, 1, 1); }
    const tick = (step) => (ends.log ? ends.low * (ends.high / ends.low) ** step : ends.low + (ends.high - ends.low) * step);
    $("ticks").replaceChildren(...[0, 0.25, 0.5, 0.75, 1].map((step) => make("span", $("stretch").checked ? number(tick(step), 3) : brief(tick(step), one.kind))));
  };

  const mark = () => {
    focused = page.chosen;
    cells.forEach((cell, at) => {
      cell.setAttribute("aria-selected", at === page.chosen);
      cell.tabIndex = at === focused ? 0 : -1;
    });
  };
  const dim = () => cells.forEach((cell, at) => cell.classList.toggle("out", page.shown !== null && !page.shown.has(at)));

  // -- the card beside a head ------------------------------------------------------------------------
  const showTip = (at) => {
    const one = page.now(), tip = $("tip"), table = make("table", undefined, "numbers");
    const chips = page.classesOf(at).map((kind) => make("span", kind.label, "chip"));
    const wanted = ["normalized_entropy", "effective_keys", "top_weight", "first_weight", "max_logit"];
    const lines = [one, ...wanted.map(page.named).filter((other) => other && other !== one)];
    lines.forEach((other, index) => {
      const line = row([withUnit(other), number(other.mean[at]), `± ${number(other.std[at], 2)}`]);
      line.className = index ? "" : "now";
      table.append(line);
    });
    const layer = page.layerOf(at), facts = `${some(page.rows(one, at), "row")} · ${layer.status}`;
    const kept = page.planned(at), plan = kept ? [make("p", `Cache plan: keeps ${kept.keeps}${kept.cost ? `, expected cost ${signed(kept.cost[0] + kept.cost[1])} nat` : ""}`, "small")] : [];
    tip.replaceChildren(make("strong", page.long(at)), ...chips, make("p", facts, "muted small"), ...plan, table);
    const box = cells[at].getBoundingClientRect(), size = tip.getBoundingClientRect();
    const right = box.right + 10 + size.width < innerWidth;
    tip.style.left = `${Math.max(8, right ? box.right + 10 : box.left - size.width - 10)}px`;
    tip.style.top = `${Math.max(8, Math.min(innerHeight - size.height - 8, box.top + box.height / 2 - size.height / 3))}px`;
    tip.style.visibility = "visible";
  };
  const hideTip = () => { $("tip").style.visibility = "hidden"; };

  const at = (event) => { const cell = event.target.closest(".head"); return cell ? Number(cell.dataset.at) : null; };
  const open = (which) => {
    page.choose(which);
    hideTip();
    $("say").textContent = `${page.long(which)} opened: ${label(page.now())} ${number(page.now().mean[which])}.`;
    const side = $("head").getBoundingClientRect();
    if (innerWidth < 1100 && (side.top > innerHeight - 160 || side.top < 0)) {
      const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
      $("head").scrollIntoView({ block: "start", behavior: calm ? "auto" : "smooth" });
    }
  };
  const keys = (event) => {
    const which = at(event);
    if (which === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const [layer, head] = places[which], heads = layers[layer].numbers, here = heads.indexOf(head);
    const nearest = (numbers) => numbers.reduce((best, one) => (Math.abs(one - head) < Math.abs(best - head) ? one : best));
    const beside = (to) => (layers[to] && layers[to].heads ? page.find(to, nearest(layers[to].numbers)) : which);
    const moves = {
      ArrowLeft: () => page.find(layer, heads[Math.max(0, here - 1)]),
      ArrowRight: () => page.find(layer, heads[Math.min(heads.length - 1, here + 1)]),
      ArrowUp: () => beside(layer - 1),
      ArrowDown: () => beside(layer + 1),
      Home: () => page.find(layer, heads[0]),
      End: () => page.find(layer, heads[heads.length - 1]),
      PageUp: () => beside(Math.max(0, layer - 10)),
      PageDown: () => beside(Math.min(layers.length - 1, layer + 10)),
    };
    if (event.key === "Escape") hideTip();
    else if (event.key === "Enter" || event.key === " ") open(which);
    else if (moves[event.key]) {
      cells[focused].tabIndex = -1;
      focused = moves[event.key]();
      cells[focused].tabIndex = 0;
      cells[focused].focus();
    } else return;
    event.preventDefault();
  };

  build();
  map.addEventListener("pointerover", (event) => {
    const which = at(event);
    if (which === null || event.pointerType === "touch") hideTip(); else showTip(which);
  });
  map.addEventListener("pointerleave", hideTip);
  map.addEventListener("click", (event) => { const which = at(event); if (which !== null) open(which); });
  map.addEventListener("focusin", (event) => { const which = at(event); if (which !== null && event.target.matches(":focus-visible")) showTip(which); });
  map.addEventListener("focusout", hideTip);
  map.addEventListener("keydown", keys);
  addEventListener("scroll", hideTip, { passive: true });
  addEventListener("resize", fit);
  $("stretch").addEventListener("change", colour);
  page.on((what) => {
    if (what.includes("metric")) { colour(); fit(); }
    if (what.includes("head")) mark();
    if (what.includes("filter")) dim();
  });
};
