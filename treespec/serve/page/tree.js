// The token tree of one round as SVG: from left to right, or downwards where the page is narrow.
import { hierarchy, tree } from "./d3-hierarchy.min.mjs";

const ROW = 31, LEVEL = 46, BOX = 24, CHAR = 7.9, PAD = 9, MARK = 13, GAP = 26, MARGIN = 12;
const NARROW = 600; // pixels
const LONGEST = 18; // characters of a token's label
const SMALLEST = 0.75; // scale; a larger tree scrolls
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

export const mark = (source, x, y) =>
  element("path", { class: `mark s${source % SHAPES.length}`, d: SHAPES[source % SHAPES.length], transform: `translate(${x} ${y})` });

export function label(token) {
  const text = [...token].map((c) => SIGNS[c] ?? (c < " " ? "␦" : c)).join("");
  return text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text || "∅";
}

const cells = (text) => [...text].reduce((sum, c) => sum + (c > "\u10ff" && !"␣⏎→␍␦…∅".includes(c) ? 2 : 1), 0);

/** Draw a round of the server's feed. `index` numbers the sources, `still` omits the animation. */
export function draw(svg, round, index, still) {
  const lit = new Set(round.path);
  const nodes = round.texts.map((text, i) => ({
    text, sources: round.sources[i].map(index), names: round.sources[i], prob: round.probs[i], children: [],
    kind: i === 0 ? "root" : lit.has(i) ? "on" : "off",
  }));
  round.parents.forEach((parent, i) => i && nodes[parent].children.push(nodes[i]));
  if (round.bonus !== null) {
    const last = nodes[round.path.at(-1)], bonus = { text: round.bonus_text, sources: [], names: ["the target"], children: [], kind: "bonus" };
    last.children.splice(Math.ceil(last.children.length / 2), 0, bonus);
  }
  const pane = svg.parentElement, across = pane.clientWidth >= NARROW;
  const root = hierarchy(nodes[0]), all = root.descendants(), deepest = root.height;
  const widths = Array(deepest + 1).fill(0);
  for (const node of all) {
    node.label = label(node.data.text);
    node.width = 2 * PAD + cells(node.label) * CHAR + (node.data.sources.length ? 4 + MARK * node.data.sources.length : 0);
    widths[node.depth] = Math.max(widths[node.depth], node.width);
  }
  tree().nodeSize([1, 1]).separation((a, b) => {
    const cousins = a.parent !== b.parent;
    return across ? ROW * (cousins ? 1.2 : 1) : (a.width + b.width) / 2 + (cousins ? 18 : 8);
  })(root);
  const lefts = [MARGIN];
  widths.forEach((width, depth) => lefts.push(lefts[depth] + width + GAP));
  for (const node of all) {
    node.left = across ? lefts[node.depth] : node.x - node.width / 2;
    node.top = across ? node.x - BOX / 2 : MARGIN + node.depth * LEVEL;
  }
  const length = across ? lefts[deepest + 1] - GAP + MARGIN : 2 * MARGIN + deepest * LEVEL + BOX;
  const half = Math.max(...all.map((node) => Math.abs(node.x) + (across ? BOX : node.width) / 2)) + MARGIN; // the root stays in the middle
  const [x, y, width, height] = across ? [0, -half, length, 2 * half] : [-half, 0, 2 * half, length];
  const scale = Math.max(SMALLEST, Math.min(1, pane.clientWidth / width, pane.clientHeight / height));
  svg.setAttribute("viewBox", `${x} ${y} ${width} ${height}`);
  svg.setAttribute("width", width * scale);
  svg.setAttribute("height", height * scale);
  svg.classList.toggle("still", still);
  svg.classList.toggle("down", !across);
  svg.style.setProperty("--deepest", deepest);

  const isLit = ({ data }) => data.kind !== "off";
  const edges = root.links().sort((a, b) => isLit(a.target) - isLit(b.target)).map(({ source, target }) => {
    const [from, to] = across ? [source.left + source.width, target.left] : [source.top + BOX, target.top];
    const points = [[from, source.x], [(from + to) / 2, source.x], [(from + to) / 2, target.x], [to, target.x]];
    const [start, ...rest] = points.map(([along, beside]) => (across ? `${along} ${beside}` : `${beside} ${along}`));
    return placed(element("path", { class: `edge ${target.data.kind}`, d: `M${start}C${rest.join(" ")}` }), target.depth);
  });
  const boxes = all.map((node) => {
    const { kind, sources, names, prob, text } = node.data, x = node.left, y = node.top + BOX / 2;
    const about = kind === "root" ? "the last token" : `${{ on: "accepted", off: "not accepted", bonus: "added" }[kind]}, by ${names.join(", ")}`;
    return placed(element("g", { class: `node ${kind}` },
      element("title", {}, `${label(text)} – ${about}${kind === "root" || prob == null ? "" : `, probability ${prob.toFixed(2)}`}`),
      element("rect", { x, y: node.top, width: node.width, height: BOX, rx: 7 }),
      element("text", { x: x + PAD, y: y + 4.5 }, node.label),
      ...sources.map((source, i) => mark(source, x + node.width - PAD - MARK * (sources.length - 1 - i) - 3, y))), node.depth);
  });
  svg.replaceChildren(...edges, ...boxes);
  const emitted = round.path.slice(1).map((node) => round.texts[node]).concat(round.bonus_text ?? []).join("");
  svg.setAttribute("aria-label", `Token tree of ${nodes.length} nodes. Accepted: ${round.path.length - 1}. Added to the text: ${emitted}`);
  const end = all.filter(isLit).reduce((deep, node) => (node.depth > deep.depth ? node : deep), root);
  if (!still && !matchMedia("(prefers-reduced-motion: reduce)").matches) pane.scrollTo({ left: 0, top: 0, behavior: "instant" });
  pane.scrollTo({
    behavior: still ? "instant" : "auto", // smooth, from the root along the path
    left: (end.left + end.width / 2 - x) * scale - pane.clientWidth * (across ? 0.8 : 0.5),
    top: (end.top + BOX / 2 - y) * scale - pane.clientHeight * (across ? 0.5 : 0.8),
  });
}

function placed(shape, depth) {
  shape.style.setProperty("--depth", depth);
  return shape;
}
