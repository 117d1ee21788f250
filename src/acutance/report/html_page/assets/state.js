// The page's state: the data, which metric and head are shown, and who draws again when that changes.
const start = (data) => {
  const { layers, metrics } = data;
  metrics.forEach((one) => {
    for (const part of Object.keys(one.codes)) {
      one[part] = decode(data.arrays[`${one.name}.${part}`], one.codes[part], one.soft);
    }
  });
  const places = layers.flatMap((layer, index) => layer.numbers.map((head) => [index, head]));
  const lookup = new Map(places.map(([layer, head], at) => [`${layer}.${head}`, at]));
  const index = (name) => metrics.findIndex((one) => one.name === name);
  const page = {
    data, layers, metrics, places,
    paint: painter(data.colours),
    metric: Math.max(0, index(data.plan ? "kept_share" : "normalized_entropy")),
    chosen: 0,
    shown: null, // heads that the filter lets through; null is all
    listeners: [],
    /** Place of a head among all, undefined where there is none; a null head is the layer's first. */
    find: (layer, head) => lookup.get(`${layer}.${head ?? (layers[layer] && layers[layer].numbers[0])}`),
    named: (name) => metrics[index(name)],
    now: () => metrics[page.metric],
    short: (at) => `L${places[at][0]}H${places[at][1]}`,
    plain: (at) => `Layer ${places[at][0]} · head ${places[at][1]}`,
    long: (at) => `Layer ${places[at][0]}${layers[places[at][0]].crossing} · head ${places[at][1]}`,
    layerOf: (at) => layers[places[at][0]],
    rows: (one, at) => (one.rows ? one.rows[at] : page.layerOf(at).rows),
    mean: (name, at) => { const one = page.named(name); return one ? one.mean[at] : null; },
    /** Classes of a head, each with its name and the sentence that says why; [] where none holds or none was asked for. */
    classesOf: (at) => (data.heads ? data.heads[at].map(([index, sentence]) => ({ ...data.classes[index], index, own: Boolean(sentence), sentence: sentence || `Class ${data.classes[index].label}: ${data.classes[index].rule}.` })) : []),
    /** What a head's key head keeps under the cache plan; null without a plan for it. */
    planned: (at) => (data.plan && data.plan.heads[at] !== null ? data.plan.key_heads[data.plan.heads[at]] : null),
    on: (draw) => page.listeners.push(draw),
    changed: (...what) => {
      page.listeners.forEach((draw) => draw(what));
      if (places.length) {
        const name = page.now().name;
        const where = `#${page.short(page.chosen)}${name === (data.plan ? "kept_share" : "normalized_entropy") ? "" : `:${name}`}`;
        try { history.replaceState(null, "", where); } catch { /* a page without an address of its own */ }
      }
    },
    choose: (at) => { page.chosen = at; page.changed("head"); },
    setMetric: (at) => { page.metric = at; page.changed("metric"); },
    /** Head and metric of an address such as #L3H5:entropy; false for any other. */
    go: (hash) => {
      const found = /^#L(\d+)H(\d+)(?::(.+))?$/.exec(decodeURIComponent(hash));
      const at = found ? page.find(+found[1], +found[2]) : undefined;
      if (at === undefined) return false;
      page.chosen = at;
      if (found[3] && index(found[3]) >= 0) page.metric = index(found[3]);
      return true;
    },
  };
  return page;
};
