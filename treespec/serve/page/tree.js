// The token tree of one round as SVG, from left to right.
import { hierarchy, tree } from "./d3-hierarchy.min.mjs";

const ROW = 34, BOX = 24, CHAR = 7.9, PAD = 9, MARK = 13, GAP = 26, MARGIN = 12, HALO = 4;
const LONGEST = 18; // characters of a token's label
const SMALLEST = 0.78; // scale; a larger tree scrolls
const STRAND = 2, LIT_STRAND = 2.6; // widths of an edge per source
const SIGNS = { " ": "␣", "\n": "⏎", "\t": "→", "\r": "␍" };
// A shape for every source besides its colour.
const SHAPES = [
  "M0-4.4A4.4 4.4 0 1 1 0 4.4A4.4 4.4 0 1 1 0-4.4",
  "M-3.9-3.9H3.9V3.9H-3.9z",
  "M0-5.3L5.3 0L0 5.3L-5.3 0z",
  "M0-4.9L5 3.9H-5z",
  "M-1.6-4.8H1.6V-1.6H4.8V1.6H1.6V4.8H-1.6V1.6H-4.8V-1.6H-1.6z",
  "M0-4.8A4.8 4.8 0 1 1 0 4.8A4.8 4.8 0 1 1 0-4.8M0-2A2 2 0 1 0 0 2A2 2 0 1 0 0-2",
];

export function element(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const colour = (source) => `s${source % SHAPES.length}`;

/** The sign of a source: 36 sources differ in colour or shape. */
export const mark = (source, x, y) =>
  element("path", { class: `mark ${colour(source)}`, d: SHAPES[(source + Math.floor(source / SHAPES.length)) % SHAPES.length], transform: `translate(${x} ${y})` });

export function label(token) {
  const text = [...token].map((c) => SIGNS[c] ?? (c < " " ? "␦" : c)).join("");
  return text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text || "∅";
}

const cells = (text) => [...text].reduce((sum, c) => sum + (c > "\u10ff" && !"␣⏎→␍␦…∅".includes(c) ? 2 : 1), 0);

/** Draw a round of the server's feed. `index` numbers the sources, `still` omits the animation. */
export function draw(svg, round, index, still) {
  const lit = new Set(round.path);
  const nodes = round.texts.map((text, i) => ({
    text, sources: round.sources[i].map(index).sort((a, b) => a - b), names: round.sources[i], prob: round.probs[i], children: [],
    kind: i === 0 ? "root" : lit.has(i) ? "on" : "off",
  }));
  round.parents.forEach((parent, i) => i && nodes[parent].children.push(nodes[i]));
  if (round.bonus !== null) {
    const last = nodes[round.path.at(-1)], bonus = { text: round.bonus_text, sources: [], names: ["the target"], children: [], kind: "bonus" };
    last.children.splice(Math.ceil(last.children.length / 2), 0, bonus);
  }
  const pane = svg.parentElement;
  const root = hierarchy(nodes[0]), all = root.descendants(), deepest = root.height;
  const widths = Array(deepest + 1).fill(0);
  for (const node of all) {
    node.label = label(node.data.text);
    node.width = 2 * PAD + cells(node.label) * CHAR + (node.data.sources.length ? 4 + MARK * node.data.sources.length : 0);
    widths[node.depth] = Math.max(widths[node.depth], node.width);
  }
  tree().nodeSize([ROW, 1]).separation((a, b) => (a.parent === b.parent ? 1 : 1.2))(root); // x is downwards
  const lefts = [MARGIN];
  widths.forEach((width, depth) => lefts.push(lefts[depth] + width + GAP));
  for (const node of all) node.left = lefts[node.depth];
  const width = lefts[deepest + 1] - GAP + MARGIN;
  let top = Math.min(...all.map(({ x }) => x)) - BOX / 2 - MARGIN, bottom = Math.max(...all.map(({ x }) => x)) + BOX / 2 + MARGIN;
  const half = Math.max(-top, bottom);
  if (2 * half * SMALLEST <= pane.clientHeight) [top, bottom] = [-half, half]; // the root stays in the middle
  const height = bottom - top, scale = Math.max(SMALLEST, Math.min(1, pane.clientWidth / width, pane.clientHeight / height));
  svg.setAttribute("viewBox", `0 ${top} ${width} ${height}`);
  svg.setAttribute("width", width * scale);
  svg.setAttribute("height", height * scale);
  svg.classList.toggle("still", still);
  svg.style.setProperty("--deepest", deepest);

  const isLit = ({ data }) => data.kind !== "off";
  const links = root.links().sort((a, b) => isLit(a.target) - isLit(b.target));
  const halos = [
    ...links.filter(({ target }) => target.data.kind === "on").map(({ source, target }) =>
      placed(element("path", { class: "halo", d: curve(source, target, 0), "stroke-width": LIT_STRAND * target.data.sources.length + 2 * HALO }), target.depth)),
    ...all.filter(({ data }) => data.kind === "on").map((node) =>
      placed(element("rect", { class: "halo", x: node.left, y: node.x - BOX / 2, width: node.width, height: BOX, rx: 7, "stroke-width": 2 * HALO }), node.depth)),
  ];
  const edges = links.flatMap(({ source, target }) => {
    const { kind, sources } = target.data, strand = kind === "on" ? LIT_STRAND : STRAND;
    return (sources.length ? sources : [null]).map((number, i) =>
      placed(element("path", {
        class: `edge ${kind} ${number === null ? "" : colour(number)}`, "stroke-width": strand,
        d: curve(source, target, (i - (Math.max(sources.length, 1) - 1) / 2) * strand),
      }), target.depth));
  });
  const boxes = all.map((node) => {
    const { kind, sources, names, prob, text } = node.data, x = node.left, y = node.x;
    const about = kind === "root" ? "the last token" : `${{ on: "accepted", off: "not accepted", bonus: "added" }[kind]}, by ${names.join(", ")}`;
    return placed(element("g", { class: `node ${kind}` },
      element("title", {}, `${label(text)} – ${about}${kind === "root" || prob == null ? "" : `, probability ${prob.toFixed(2)}`}`),
      element("rect", { x, y: y - BOX / 2, width: node.width, height: BOX, rx: 7, ...(sources.length && { stroke: `url(#${striped(sources)})` }) }),
      element("text", { x: x + PAD, y: y + 4.5 }, node.label),
      ...sources.map((source, i) => mark(source, x + node.width - PAD - MARK * (sources.length - 1 - i) - 3, y))), node.depth);
  });
  const stripes = new Map(all.filter(({ data }) => data.sources.length).map(({ data }) => [striped(data.sources), data.sources]));
  svg.replaceChildren(element("defs", {}, ...[...stripes].map(([id, sources]) => gradient(id, sources))), ...halos, ...edges, ...boxes);
  const emitted = round.path.slice(1).map((node) => round.texts[node]).concat(round.bonus_text ?? []).join("");
  svg.setAttribute("aria-label", `Token tree of ${nodes.length} nodes. Accepted: ${round.path.length - 1}. Added to the text: ${emitted}`);
  const end = all.filter(isLit).reduce((deep, node) => (node.depth > deep.depth ? node : deep), root);
  if (!still && !matchMedia("(prefers-reduced-motion: reduce)").matches) {
    pane.scrollTo({ left: 0, top: -top * scale - pane.clientHeight / 2, behavior: "instant" });
  }
  pane.scrollTo({
    behavior: still ? "instant" : "auto", // smooth, from the root along the path
    left: (end.left + end.width / 2) * scale - pane.clientWidth * 0.8,
    top: (end.x - top) * scale - pane.clientHeight / 2,
  });
}

/** The path of an edge, `aside` pixels from its middle, so that the strands of several sources lie side by side. */
function curve(source, target, aside) {
  const from = source.left + source.width, to = target.left, slope = Math.max(-1, Math.min(1, (target.x - source.x) / ROW));
  const middle = (from + to) / 2 - aside * slope;
  return `M${from} ${source.x + aside}C${middle} ${source.x + aside} ${middle} ${target.x + aside} ${to} ${target.x + aside}`;
}

const striped = (sources) => `by-${sources.join("-")}`;

/** Stripes in the colours of the sources, with sharp borders. */
function gradient(id, sources) {
  const stops = sources.flatMap((source, i) => [i, i + 1].map((at) =>
    element("stop", { class: colour(source), offset: at / sources.length })));
  return element("linearGradient", { id }, ...stops);
}

function placed(shape, depth) {
  shape.style.setProperty("--depth", depth);
  return shape;
}
