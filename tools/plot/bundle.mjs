// Writes src/acutance/report/html_page/assets/plot.js, the charts' library as the report carries it, and plot.txt, its licences.
//
//     cd tools/plot && npm ci --ignore-scripts && node bundle.mjs
//
// package-lock.json pins every package by version and integrity, so the same bytes come out again.
// Only what the entry below names is kept: 0.26 MB rather than the 0.42 of the whole library.
import { build } from "esbuild";
import { readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "../../src/acutance/report/html_page/assets");
const entry =
  'export { plot, dot, lineY, areaY, rectY, ruleX, ruleY, link, text, tickX, tip, pointer, pointerX } from "@observablehq/plot";';

// The page's policy admits no style but its own, and Plot puts a style element into every figure. It is left out here; the
// page's style sheet has its rules.
const withoutStyle = {
  name: "without-style",
  setup(bundle) {
    bundle.onLoad({ filter: /@observablehq[\\/]plot[\\/]src[\\/]plot\.js$/ }, ({ path }) => {
      const source = readFileSync(path, "utf8");
      const style = /\.call\(\(svg\) =>\s*\/\/[^\n]*\s*svg\.append\("style"\)\.text\(\s*`[^`]*`\s*\)\s*\)/;
      const parts = source.split(style);
      if (parts.length !== 2) throw new Error(`${path}: expected one style element, found ${parts.length - 1}`);
      return { contents: parts.join(""), loader: "js" };
    });
  },
};

const result = await build({
  stdin: { contents: entry, resolveDir: here },
  bundle: true,
  minify: true,
  charset: "ascii",
  format: "iife",
  globalName: "Plot",
  target: "es2020",
  legalComments: "none",
  metafile: true,
  write: false,
  plugins: [withoutStyle],
});
const code = result.outputFiles[0].text;
if (/<\/script|<!--/i.test(code)) throw new Error("the bundle would end the script element that holds it");

const packages = new Set();
for (const [path, { bytesInOutput }] of Object.entries(Object.values(result.metafile.outputs)[0].inputs)) {
  const name = path.match(/node_modules\/((?:@[^/]+\/)?[^/]+)\//)?.[1];
  if (name && bytesInOutput) packages.add(name);
}

// The licences ask that their text goes wherever the code goes, and the code goes into every report: it is in a comment too.
const texts = new Map();
for (const name of [...packages].sort()) {
  const folder = join(here, "node_modules", name);
  const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const text = readFileSync(join(folder, "LICENSE"), "utf8").trim();
  const [, holder, rest] = /^((?:Copyright [^\n]*\n)+)\s*([^]*)$/.exec(text) ?? [, "", text];
  if (!texts.has(rest)) texts.set(rest, []);
  texts.get(rest).push(`${name} ${version} (${license})${holder && `: ${holder.trim().replaceAll("\n", "; ")}`}`);
}
const licences = [...texts].map(([text, names]) => `${names.join("\n")}\n\n${text}\n`).join("\n\n");
if (/\*\/|<\/script|<!--/i.test(licences)) throw new Error("a licence would end the comment that holds it");
const about = "plot.js is a minified bundle of parts of these packages, made by tools/plot/bundle.mjs.";
writeFileSync(join(target, "plot.js"), `/*!\n${about}\n\n${licences}*/\n${code}`);
writeFileSync(join(target, "plot.txt"), `${about}\n\n${licences}`);
console.log(`${code.length} bytes of ${packages.size} packages`);
