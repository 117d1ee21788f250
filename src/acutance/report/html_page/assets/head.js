// The panel of one head: what it does in words, entropy beside its prediction, its rows, the text, all numbers.
const drawHead = (page) => {
  const { data, layers, metrics, places } = page;

  const inWords = (at) => {
    const keys = page.mean("effective_keys", at), n = page.mean("n_keys", at);
    const top = page.mean("top_weight", at), first = page.mean("first_weight", at), parts = [];
    const told = new Set(page.classesOf(at).filter((kind) => kind.own).map((kind) => kind.label)); // what a class says is not said again
    if (keys !== null) parts.push(`On average it spreads a row over ${number(keys, 2)} effective tokens${n === null ? "" : ` of ${number(n, 3)} visible`}.`);
    if (top !== null && !told.has("sharp")) parts.push(`The largest weight is ${percent(top)} on average.`);
    if (first !== null && !told.has("sink")) parts.push(`The first token gets ${percent(first)}.`);
    return parts.join(" ");
  };

  const words = (at) => {
    const [layer, head] = places[at], box = $("head-words");
    const classes = page.classesOf(at), dead = classes.some((kind) => kind.label === "dead");
    const chip = (kind) => Object.assign(make("span", kind.label, "chip"), { title: kind.rule });
    const kinds = classes.filter((kind) => kind.own && !(dead && kind.label === "diffuse")).map((kind) => {
      const line = make("p", undefined, "small");
      line.append(chip(kind), ` ${capital(kind.sentence)}.`.replace("..", "."));
      return line;
    });
    const bare = classes.filter((kind) => !kind.own).flatMap((kind) => [chip(kind), " "]);
    if (bare.length) { const line = make("p", undefined, "small"); line.append(...bare); kinds.push(line); }
    const most = data.findings.filter((one) => one.layer === layer && one.head === head && ["sharpest", "most_diffuse", "largest_logit"].includes(one.kind));
    const told = new Set(["sink", "dead", ...(page.mean("effective_keys", at) === null ? [] : ["entropy_collapse"])]);
    const reason = (one) => (one.heads.length ? (told.has(one.kind) ? undefined : data.reasons[at]?.[one.kind]) : one.reason);
    const advice = data.recommendations.filter((one) => one.layer === layer && (!one.heads.length || one.heads.includes(head)));
    box.replaceChildren(
      make("p", inWords(at)), ...kinds, ...(most.length ? [make("p", `Of all heads: ${most.map((one) => one.label.toLowerCase()).join(", ")}.`, "small")] : []),
      ...advice.map((one) => { const item = make("p", undefined, "advice small"); item.append(make("strong", `${data.kinds[one.kind]}. `), `${capital([reason(one), one.advice.replaceAll("LAYER.HEAD", `${layer}.${head}`)].filter(Boolean).join("; "))}. `, make("span", `Certainty: ${one.certainty}.`, "muted")); return item; }),
    );
    const alarm = { mismatch: "bad", unverified: "bad" }[layers[layer].status];
    if (alarm) box.append(make("p", `${capital(layers[layer].status)}: ${data.statuses[layers[layer].status]}.`, `small ${alarm}`));
  };

  // -- the cache plan ----------------------------------------------------------------------------------------
  const plan = (at) => {
    const kept = page.planned(at);
    $("plan-part").hidden = !kept;
    if (!kept) return;
    const [from, to] = kept.queries, group = to > from ? ` (query heads ${from} to ${to})` : "";
    const cost = kept.cost ? ` Expected cost: ${signed(kept.cost[0] + kept.cost[1])} nat a token.` : "";
    $("plan-words").textContent = `Key head ${kept.head}${group} keeps ${kept.keeps}: ${percent(kept.share)} of its bytes after ${count(data.plan.n)} tokens.${cost}`;
    $("plan-costs").hidden = !kept.options.length;
    if (!kept.options.length) return;
    const head = make("thead"), body = make("tbody");
    head.append(row(["if it keeps", "of its bytes", "first order, nat", "second order, nat"], "th"));
    const none = ["all keys", 1, 0, 0, !kept.options.some((one) => one[4])];
    [none, ...kept.options].forEach(([keeps, share, first, second, chosen]) => {
      const line = row([chosen ? `${keeps} ✓` : keeps, percent(share), signed(first), signed(second)]);
      if (chosen) { line.className = "now"; line.setAttribute("aria-label", `${keeps}, the plan's choice`); }
      body.append(line);
    });
    $("plan-options").replaceChildren(head, body);
    $("plan-note").textContent = `Expected rise of the loss, in nats a token, from derivatives at ${count(data.plan.costs_at)} tokens: theory, to be checked with acutance judge. ✓: the plan's choice.`;
  };

  // -- against n and position ----------------------------------------------------------------------------
  const curve = (part, name, at) => {
    const stored = data[part], codes = stored && stored.metrics[name];
    if (!codes) return null;
    const wide = stored.octaves, from = at * wide, raw = data.arrays[`${part}.${name}`];
    return decode(raw.subarray(from, from + wide), codes.codes, codes.soft);
  };
  const profile = (at) => {
    const one = page.now(), filled = (part) => (data[part] ? (curve(part, one.name, at) || []).filter((value) => value !== null).length : 0);
    const part = filled("profile") > 2 || filled("profile") >= filled("positions") ? "profile" : "positions";
    $("profile-part").hidden = filled(part) < 2;
    if (filled(part) < 2) return;
    const { log_n: middles, rows } = data[part], wide = data[part].octaves, errors = curve(part, `${one.name}.error`, at);
    const predicted = one.name === "entropy" && part === "profile" && data.theory ? data.theory.curves.map((octave) => octave[at] ?? null) : null;
    const told = one.name === "entropy" ? curve(part, "information", at) : null;
    const layer = places[at][0];
    const points = curve(part, one.name, at).map((mean, octave) => ({
      mean, n: Math.exp(middles[layer][octave] ?? Math.LN2 * (octave + 0.5)), rows: rows[layer][octave],
      error: errors ? errors[octave] : null, predicted: predicted?.[octave] ?? null,
      most: told && told[octave] !== null ? mean + told[octave] : null,
      range: `${part === "profile" ? "visible tokens" : "tokens of the window"} ${count(2 ** octave)}${octave ? ` to ${count(2 ** (octave + 1) - 1)}` : ""}`,
    })).filter((point) => point.mean !== null);
    $("profile-title").textContent = part === "profile" ? `${capital(label(one))} against visible tokens` : `${capital(label(one))} against position in the window`;
    drawProfile(page, $("profile"), points, one, part === "profile" ? "tokens the row can see, n" : "position in the window; 1 is the first token");
    const bars = points.some((point) => point.error) ? " Vertical bars: standard error between sequences." : "";
    const lines = predicted?.length ? ` Line without points: predicted.${told ? " Dotted: the maximum." : ""}` : "";
    $("profile-note").textContent = `Each point is the mean over the rows in one octave of n: 4 to 7, 8 to 15, and so on.${lines}${bars}`;
  };

  const distances = (at) => {
    const stored = data.distances, part = $("distance-part");
    part.hidden = !stored || !stored.rows[places[at][0]];
    if (part.hidden) return;
    const wide = stored.octaves, take = (name) => data.arrays[`distances.${name}`].subarray(at * wide * 2, (at + 1) * wide * 2);
    drawDistances(page, $("distances"), { mass: take("mass"), even: take("even"), wide });
  };

  const spans = (at) => {
    const stored = data.spans, part = $("spans-part"), wide = stored && stored.keys.length, size = stored && wide * stored.rows.length;
    const [mean, even] = stored ? ["mean", "even"].map((name) => data.arrays[`spans.${name}`].subarray(at * size, (at + 1) * size)) : [];
    part.hidden = !stored || mean.every((code) => code === 65535);
    if (part.hidden) return;
    const head = make("thead"), body = make("tbody"), share = (codes, cell) => (codes[cell] / 65534).toFixed(2);
    head.append(row(["rows of", ...stored.keys.map((name) => `on ${name}`)], "th"));
    stored.rows.forEach((name, index) => {
      if (mean[index * wide] === 65535) return;
      const cells = stored.keys.map((_, column) => {
        const cell = make("td", share(mean, index * wide + column));
        cell.append(make("span", `(${share(even, index * wide + column)})`, "unit"));
        return cell;
      });
      body.append(row([name, ...cells]));
    });
    $("spans").replaceChildren(head, body);
  };

  /** Whether tokens bring the spaces between words with them, as bytes and most pieces do, and word pieces do not. */
  const spaced = (data.examples || []).flat().some((one) => [...one.context, ...one.attended].some(([word]) => word.startsWith(" ")));
  const token = (word) => quoted("code", word.trim() || word.replaceAll(" ", "␣"));

  // -- text -----------------------------------------------------------------------------------------------
  const samples = (at) => {
    const rows = (data.examples && data.examples[at]) || [];
    $("samples-part").hidden = !rows.length;
    $("samples").replaceChildren(...rows.map((one) => {
      const item = make("div", undefined, "sample"), text = quoted("p", undefined, "context"), list = make("ol", undefined, "attended");
      const heaviest = Math.max(...one.context.map(([, weight]) => weight || 0), 1e-9);
      one.context.forEach(([word, weight], index) => {
        const mark = make("span", word, index === one.here ? "query" : "word");
        if (weight) mark.style.setProperty("--weight", `${Math.round(70 * weight / heaviest)}%`);
        if (weight) mark.title = percent(weight);
        text.append(index && !spaced && !word.startsWith("##") ? " " : "", mark);
      });
      one.attended.slice(0, 5).forEach(([word, position, weight]) => {
        const line = make("li"), bar = make("span", undefined, "weight");
        bar.style.setProperty("--share", `${Math.min(100, 100 * weight)}%`);
        line.append(bar, word ? token(word) : make("span", "token"), make("span", `${percent(weight)} · position ${count(position)}`, "muted"));
        list.append(line);
      });
      const from = make("p", one.query ? "From " : "A query", "small"), place = one.position < 0 ? "" : ` at position ${count(one.position)}`;
      from.append(...(one.query ? [token(one.query)] : []), `${place}: entropy ${number(one.entropy, 2)} nats over ${count(one.n_keys)} tokens`);
      item.append(from, ...(one.context.length ? [text] : []), list);
      return item;
    }));
  };

  const maps = (at) => {
    const rows = (data.maps && data.maps[at]) || [];
    $("maps-part").hidden = !rows.length;
    $("maps").replaceChildren(...rows.map((one) => {
      const item = make("div", undefined, "sample"), text = quoted("p", undefined, "context strip"), heaviest = Math.max(...one.weights, 1);
      const glued = one.tokens.some((word) => word.startsWith(" "));
      one.weights.forEach((weight, index) => {
        const mark = make("span", one.tokens[index] || "·", index === one.position ? "query" : "word");
        if (weight) mark.style.setProperty("--weight", `${Math.round(70 * weight / heaviest)}%`);
        mark.title = `${percent(weight / 1000)} · position ${count(index)}`;
        text.append(index && one.tokens.length && !glued && !(one.tokens[index] || "").startsWith("##") ? " " : "", mark);
      });
      const cut = one.keys > one.weights.length ? `, of which the first ${count(one.weights.length)} are shown` : "";
      item.append(make("p", `Row ${count(one.position)} of sequence ${count(one.sequence)}: ${some(one.keys, "key")} with weight${cut}`, "small"), text);
      return item;
    }));
  };

  const numbers = (at) => {
    const head = make("thead"), body = make("tbody");
    const drawn = metrics.some((one) => one.off);
    head.append(row(["metric", "mean", ...(drawn ? ["± sampling"] : []), "std", "min", "max"], "th"));
    metrics.forEach((one, index) => {
      const name = make("th"), pick = button(label(one), "pick", () => page.setMetric(index));
      name.append(pick, make("span", label(one).includes(one.unit) ? "" : unit(one), "unit"));
      const line = row([name, number(one.mean[at]), ...(drawn ? [number(one.off[at], 2)] : []), ...["std", "min", "max"].map((part) => number(one[part] ? one[part][at] : null, 3))]);
      line.className = index === page.metric ? "now" : "";
      body.append(line);
    });
    $("head-numbers").replaceChildren(head, body);
  };

  const draw = () => {
    if (!places.length) return;
    const at = page.chosen, layer = page.layerOf(at);
    $("head-name").textContent = page.plain(at);
    $("head-where").textContent = `${layer.module}${layer.crossing} · ${some(layer.rows, "row")} · ${layer.status}`;
    words(at);
    plan(at);
    drawRange(page, $("range"), at);
    $("histogram-title").textContent = `${capital(label(page.now()))} over rows`;
    drawHistogram(page, $("histogram"), at);
    profile(at);
    distances(at);
    spans(at);
    maps(at);
    samples(at);
    numbers(at);
  };
  const step = (by) => page.choose((page.chosen + by + places.length) % places.length);
  $("previous").addEventListener("click", () => step(-1));
  $("next").addEventListener("click", () => step(1));
  page.on((what) => { if (what.some((one) => ["head", "metric", "size"].includes(one))) draw(); });
};
