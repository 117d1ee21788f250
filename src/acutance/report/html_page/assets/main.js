// Starts the page: reads the data, lets each part draw, follows the address and the window's width.
const main = async () => {
  if (!("DecompressionStream" in window)) throw new Error("this browser is older than 2023 and cannot unpack it");
  const page = start(await unpack($("data").textContent));
  if (!page.go(location.hash) && page.data.findings.length) {
    page.chosen = page.find(page.data.findings[0].layer, page.data.findings[0].head);
  }
  drawMap(page);
  drawHead(page);
  drawTable(page);
  drawFacts(page);
  page.on((what) => {
    if (what.includes("metric")) $("metric").value = page.metric;
    if (what.some((one) => ["head", "metric", "filter", "size"].includes(one)) && page.metrics.length) { drawLayers(page); drawTheory(page); }
  });
  if (page.metrics.length) page.changed("metric", "head");
  addEventListener("hashchange", () => { if (page.go(location.hash)) page.changed("metric", "head"); });
  let width = innerWidth, waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => page.changed("size"), 120);
  });
  document.documentElement.dataset.ready = "yes";
};
main().catch((problem) => {
  $("failed").hidden = false;
  $("failed").textContent = `The report cannot be shown: ${problem.message}.`;
  throw problem;
});
