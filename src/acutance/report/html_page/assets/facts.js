// The words of the page: what is shown, how to read it, what stands out, what was probed and how.
const drawFacts = (page) => {
  const { data, layers, metrics, places } = page;
  const facts = new Map(data.about), model = facts.get("model") || "Attention report";

  // -- the beginning ------------------------------------------------------------------------------------
  document.title = `${model} · attention report`;
  $("title").textContent = model;
  $("title").dir = "auto";
  $("read").hidden = !data.read;
  $("read").textContent = data.read;
  $("lead").textContent = "For every token that a model reads, each attention head distributes weights that sum to 100% over the tokens it can see. This page shows how sharply each head focuses: a sharp head puts nearly all weight on a few tokens, a diffuse head spreads it over many. The measure is entropy: 0 if one token has all the weight, log n nats if n tokens have equal weight. " + (data.plan ? "The map begins with what the cache plan keeps of each head; choose normalized entropy to see it from 0 (sharp) to 1 (diffuse)." : "The map shows it relative to that maximum, from 0 (sharp) to 1 (diffuse).") + " Neither is wrong, but heads that stand out are worth a look.";
  const tile = (name, value, more) => { const box = make("div"); box.append(make("dt", name), make("dd", value, "big"), make("dd", more, "small muted")); return box; };
  const sorted = (name) => (page.named(name) ? page.named(name).mean.filter((value) => value !== null).sort((a, b) => a - b) : []);
  const middle = (values) => (values.length ? values[Math.floor((values.length - 1) / 2)] : null);
  const keys = sorted("effective_keys"), seen = sorted("n_keys");
  const rows = layers.reduce((sum, layer) => sum + layer.rows, 0), checked = layers.filter((layer) => ["verified", "checked"].includes(layer.status));
  const worst = Math.max(0, ...layers.map((layer) => layer.error || 0)), wrong = layers.filter((layer) => layer.status === "mismatch").length;
  $("tiles").append(
    tile("Measured", some(places.length, "head"), `${some(layers.length, "layer")}, ${layers.length ? spread(layers.map((layer) => layer.rows)) : 0} rows (query tokens) each`),
    tile("A row can see", seen.length ? `${number(middle(seen), 3)} tokens` : "–", seen.length && seen[seen.length - 1] - seen[0] > 0.01 ? `on average; from ${number(seen[0], 3)} to ${number(seen[seen.length - 1], 3)} by head` : "on average, without padding"),
    tile("A typical head attends to", keys.length ? `${number(middle(keys), 2)} tokens` : "–", keys.length ? `effectively; the sharpest to ${number(keys[0], 2)}, the most diffuse to ${number(keys[keys.length - 1], 2)}` : "not recorded"),
    tile("Verified", layers.length ? `${checked.length} of ${some(layers.length, "layer")}` : "–", checked.length ? `outputs recomputed; largest relative difference ${number(worst, 1)}` : "no output was recomputed; use verify"),
    ...(data.plan ? [tile("Cache plan", `${percent(data.plan.share)} of the bytes`, `after ${count(data.plan.n)} tokens: ${data.plan.name.replace(/^cache plan \((.*)\)$/, "$1")} key heads`)] : []),
  );
  $("brief").hidden = !data.overview.length;
  $("overview").append(...data.overview.map((said) => {
    const line = quoted("li", ""), end = said.indexOf(": ");
    line.append(...(end > 0 ? [make("strong", capital(said.slice(0, end))), said.slice(end)] : [capital(said)]));
    return line;
  }));
  $("notices").append(...data.notices.map((said) => { const line = quoted("p", said, "alarm"); line.setAttribute("role", "note"); return line; }));
  $("alarm").hidden = !wrong;
  $("alarm").textContent = `${some(wrong, "layer")} did not verify: ${data.statuses.mismatch}.`;

  // -- metrics and classes --------------------------------------------------------------------------------
  data.groups.forEach((name) => {
    const group = make("optgroup");
    group.label = name;
    metrics.forEach((one, index) => { if (one.group === name) group.append(Object.assign(make("option", withUnit(one)), { value: index })); });
    if (group.children.length) $("metric").append(group);
  });
  $("metric").addEventListener("change", () => page.setMetric(Number($("metric").value)));
  if (data.heads.some((kinds) => kinds.length)) {
    const counts = data.classes.map((_, index) => data.heads.filter((kinds) => kinds.some(([kind]) => kind === index)).length);
    $("classes").hidden = false;
    $("classes").append(make("li", "Heads by class:", "muted"));
    data.classes.forEach((kind, index) => {
      if (!counts[index]) return;
      const item = make("li"), chip = button(`${kind.label} ${counts[index]}`, "chip", () => {
        const on = chip.getAttribute("aria-pressed") === "true";
        $("filter").value = on ? "" : kind.label.toLowerCase();
        $("filter").dispatchEvent(new Event("input"));
      });
      chip.dataset.name = kind.label.toLowerCase();
      chip.setAttribute("aria-pressed", "false");
      chip.title = kind.rule;
      item.append(chip);
      $("classes").append(item);
    });
  }

  $("modules").hidden = data.modules.length < 2;
  $("modules").append(...data.modules.map((said) => quoted("li", said)));

  // -- worth a look -----------------------------------------------------------------------------------------
  const card = (title, layer, head, sentence, more) => {
    const item = make("li"), top = make("div", undefined, "top");
    top.append(make("h3", title));
    const at = layer === null ? undefined : page.find(layer, head);
    if (at !== undefined) {
      const show = button(`open ${page.short(at)}`, "pick link", () => { page.choose(at); $("heads").scrollIntoView({ block: "start" }); });
      show.setAttribute("aria-label", `open layer ${layer} head ${head}`);
      top.append(show);
    }
    item.append(top, make("p", sentence), ...(more ? [make("p", more, "small muted")] : []));
    $("findings").append(item);
  };
  Object.entries(data.kinds).forEach(([kind, name]) => {
    const same = data.recommendations.filter((one) => one.kind === kind);
    if (!same.length) return;
    const item = make("li", undefined, "urgent"), list = make("ul", undefined, "places");
    const lines = same.map((one) => {
      const line = make("li"), at = page.find(one.layer, one.heads.length ? one.heads[0] : null);
      line.append(at === undefined ? one.place : button(one.place, "pick link", () => { page.choose(at); $("heads").scrollIntoView({ block: "start" }); }), `: ${one.reason}.`);
      return line;
    });
    list.append(...lines.slice(0, 3));
    const more = make("details"), rest = make("ul", undefined, "places");
    rest.append(...lines.slice(3));
    more.append(make("summary", some(lines.length - 3, "more layer")), rest);
    const heard = [...new Set(same.map((one) => one.advice))];
    item.append(make("h3", name), list, ...(lines.length > 3 ? [more] : []), make("p", `What to do: ${heard[0]}.`), make("p", `Certainty: ${[...new Set(same.map((one) => one.certainty))].join(", ")}.`, "small muted"));
    $("findings").append(item);
  });
  if (places.length && !data.recommendations.length) card("Recommendation", null, null, data.nothing);
  if (data.judged) {
    const item = make("li"), frame = make("div", undefined, "scroll"), table = make("table", undefined, "numbers"), head = make("thead"), body = make("tbody"), list = make("ul", undefined, "plain-list small");
    head.append(row(["change", make("th", "what it does", "text"), "Δ loss, nats a token", make("th", "verdict", "text")], "th"));
    data.judged.rows.forEach(([name, reason, delta, verdict]) => body.append(row([name, quoted("td", reason, "text"), delta, make("td", verdict, "text")])));
    table.append(head, body);
    frame.append(table);
    list.append(...data.judged.sentences.map((said) => quoted("li", said)));
    item.append(make("h3", "Judged by the loss"), ...(data.judged.rows.length ? [frame] : []), list);
    $("findings").append(item);
  }
  data.findings.forEach((found) => card(found.label, found.layer, found.head, found.sentence));
  if (!data.findings.length && !data.recommendations.length) $("findings").append(make("li", "No findings: no head has valid rows of the metrics that findings use."));

  // -- what was probed ----------------------------------------------------------------------------------------
  const fact = (name, value, bad) => $("about").append(quoted("dt", name), quoted("dd", value, bad ? "bad" : ""));
  data.about.forEach(([name, value]) => fact(name.replaceAll("_", " "), value));
  const total = (part) => layers.reduce((sum, layer) => sum + layer[part], 0);
  const told = [...new Set(layers.flatMap((layer) => (layer.padded_by || "").split(", ")))].filter(Boolean).join(", ");
  if (layers.length) fact("rows", `${count(rows)} over all layers; left out: ${count(total("padded"))} padding${told ? ` (by ${told})` : ""}, ${count(total("empty"))} that see no token${total("excluded") ? `, ${count(total("excluded"))} not selected` : ""}${total("skipped") ? `, ${count(total("skipped"))} not sampled` : ""}`);
  if (total("unseen")) fact("of tokens that no row sees", `${count(total("unseen"))} rows: if padding, pass attention_mask= to the probe`);
  new Set(layers.map((layer) => layer.status)).forEach((status) => fact("status", `${status}: ${data.statuses[status]}`, status === "mismatch"));
  const head = make("thead"), body = make("tbody"), text = (value, name = "text") => quoted("td", value, name);
  head.append(row(["layer", make("th", "module", "text"), "heads", "calls", "rows", "padded", "empty", make("th", "status", "text"), "difference", make("th", "read from", "text")], "th"));
  layers.forEach((layer, index) => body.append(row([String(index), text(`${layer.module}${layer.crossing}`), ...["heads", "calls", "rows", "padded", "empty"].map((part) => count(layer[part])), text(layer.status, layer.status === "mismatch" ? "text bad" : "text"), number(layer.error, 2), text(layer.source)])));
  $("layers").append(head, body);
  const reasons = (id, title, said, none) => {
    const list = make("ul", undefined, "plain-list");
    list.append(...said.map((reason) => quoted("li", reason)));
    $(id).append(make("h3", title), said.length ? list : make("p", none));
  };
  reasons("unread", "Attention that could not be read", data.unread, "None: every captured attention call could be read.");
  if (data.not_provided.length) reasons("not-provided", "Attention left to the model, which acutance could not provide", data.not_provided);

  // -- what the numbers mean ------------------------------------------------------------------------------------
  metrics.forEach((one) => {
    const meaning = make("dd", `${capital(one.meaning)}. Range ${one.range}${one.unit === "1" ? "" : `, in ${one.unit}`}. Low: ${one.ends[0]}. High: ${one.ends[1]}. `);
    meaning.append(make("span", one.source, "muted"));
    $("glossary").append(make("dt", label(one)), meaning);
  });
  data.classes.forEach((kind) => { const rule = make("dd", `${capital(kind.rule)}. `); rule.append(make("span", kind.source, "muted")); $("glossary").append(make("dt", `class ${kind.label}`), rule); });
  const coarse = { 4: "", 2: " Means have four digits here, standard deviations and extremes two or three.", 1: " Numbers have reduced precision." }[data.level.mean === 2 && data.level.rest === 2 ? 4 : data.level.mean];
  $("foot").textContent = `A row is one query token of one head; its n keys are the tokens that it can see, without padding and masked positions. Means, standard deviations and extremes are over rows. The outermost bars of a histogram include values beyond its range.${coarse} Findings point to heads that are worth a look; they prove nothing about the model. This file is self-contained and needs no network.`;
};
