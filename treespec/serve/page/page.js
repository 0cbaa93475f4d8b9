// The page: asks the server for a continuation with its rounds, plays them, and counts.
import { draw, element, mark } from "./tree.js";

const FIRST_NODES = 16; // size of the trees that the page begins with, so that there is something to see
const REASONS = { // of a round without drafted tokens
  off: "Speculation is off.",
  room: "Only one more token fits into the output.",
  reading: "The draft models still read the prompt.",
  drafting_paused: "Drafting is paused for some rounds, because it does not pay off at present.",
  drafting_cost: "The planner expects that drafting would take longer than it saves.",
  model_free_paused: "Sources without a model, such as lookup, are paused for some rounds, because they did not pay off.",
  nothing_proposed: "No source that was asked proposed a token.",
  cut: "The planner expects that none of the proposed tokens would save the time to check it.",
};
const FADE = 28; // pixels
const $ = (id) => document.getElementById(id);
const model = { id: null, chat: false };
const sources = []; // names, in the order of their colours
let run = null; // { rounds, spans, tokens, at, done, abort }
let busy = false, playing = false, timer = 0;

// --- the server

const headers = () => ({ "Content-Type": "application/json", ...($("key").value && { Authorization: `Bearer ${$("key").value}` }) });

async function answer(response) {
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({ error: { message: `${response.status} ${response.statusText}` } }));
  if (response.status === 401) {
    $("key-field").hidden = false;
    $("key").focus();
  }
  throw new Error(error.message);
}

async function describe() {
  const [first] = (await (await answer(await fetch("v1/models", { headers: headers() }))).json()).data;
  Object.assign(model, first);
  $("model").textContent = model.id;
  model.sources.forEach(index);
  const sizes = ["auto", 4, 8, 16, 32, 64].filter((nodes) => nodes === "auto" || nodes <= model.max_nodes);
  const chosen = sizes.findLast((nodes) => nodes <= FIRST_NODES) ?? "auto";
  $("nodes").replaceChildren(...sizes.map((nodes) => new Option(nodes, nodes, false, nodes === chosen)));
}

/** Yield the chunks of a stream of server-sent events. */
async function* chunks(path, body, signal) {
  const response = await answer(await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
    const events = (unread + value).split("\n\n");
    unread = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: {")) continue; // a ping, or the end
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

/** Decode the prompt; `add` is called with the text, token ids and rounds of every chunk. */
async function decode(request, speculation, signal, add) {
  const prompt = model.chat ? { messages: [{ role: "user", content: request.prompt }] } : { prompt: request.prompt };
  const { temperature, seed, max_tokens } = request;
  const body = { model: model.id, ...prompt, temperature, seed, max_tokens, stream: true, return_token_ids: true, rounds: true, speculation };
  for await (const { choices: [choice], rounds } of chunks(model.chat ? "v1/chat/completions" : "v1/completions", body, signal)) {
    const { content, reasoning_content } = choice.delta ?? { content: choice.text };
    add((reasoning_content ?? "") + (content ?? ""), choice.token_ids, rounds);
  }
}

// --- a run

async function generate() {
  const abort = new AbortController();
  const request = {
    prompt: $("prompt").value, max_tokens: $("max-tokens").valueAsNumber, temperature: $("temperature").valueAsNumber,
    seed: Math.floor(Math.random() * 2 ** 31),
  };
  const nodes = $("nodes").value;
  run = { rounds: [], spans: [], tokens: [], at: 0, done: false, abort, nodes };
  const plain = { rounds: [], tokens: [], text: "" }, compares = $("compare").checked;
  busy = true;
  $("error").hidden = true;
  $("go").textContent = "Stop";
  $("plain-card").hidden = $("gain-field").hidden = !compares;
  for (const id of ["text", "plain"]) $(id).replaceChildren();
  for (const id of ["text-note", "plain-note"]) $(id).textContent = "";
  count(plain);
  setPlaying(true);
  try {
    await decode(request, { nodes: nodes === "auto" ? nodes : Number(nodes) }, abort.signal, (text, tokens, rounds) => {
      run.tokens.push(...tokens);
      land(text, rounds);
      run.rounds.push(...rounds);
      refresh(plain);
    });
    run.done = true;
    $("text-note").textContent = `${counted(run.tokens, "token")} in ${counted(run.rounds, "pass", "passes")}`;
    if (compares) { // afterwards, so that neither slows the other
      $("plain-note").textContent = "decoding";
      await decode(request, "off", abort.signal, (text, tokens, rounds) => {
        plain.tokens.push(...tokens);
        plain.rounds.push(...rounds);
        plain.text += text;
        $("plain").textContent = plain.text;
        refresh(plain);
      });
    }
  } catch (error) {
    if (error.name !== "AbortError") fail(error);
  } finally {
    busy = false;
    run.done = true;
    $("go").textContent = "Generate";
    count(plain);
  }
}

function fail(error) {
  $("error").textContent = error.message;
  $("error").hidden = false;
}

/** Append the text of a chunk, a span per token where the tokens' texts are the chunk's. */
function land(text, rounds) {
  const first = run.rounds.length + 1;
  const pieces = rounds.flatMap((round, i) => [
    ...round.path.slice(1).map((node) => [round.texts[node], first + i, "drafted"]),
    ...(round.bonus === null ? [] : [[round.bonus_text, first + i, ""]]),
  ]);
  const isWhole = pieces.map(([piece]) => piece).join("").startsWith(text);
  let left = text.length;
  for (const [piece, round, kind] of isWhole ? pieces : [[text, first + rounds.length - 1, ""]]) {
    if (left <= 0) break;
    const span = document.createElement("span");
    span.textContent = piece.slice(0, left);
    span.className = kind;
    span.dataset.round = round;
    left -= piece.length;
    run.spans.push(span);
    $("text").append(span);
  }
}

// --- playing the rounds

function show(at, still = playing && Number($("pace").value) < 300) {
  run.at = Math.max(1, Math.min(at, run.rounds.length));
  const round = run.rounds[run.at - 1], accepted = round.path.length - 1, drafted = round.texts.length - 1;
  $("empty").hidden = true;
  $("tree").removeAttribute("hidden");
  $("why").textContent = round.plain_reasons.map((reason) => REASONS[reason]).join(" ");
  $("why").hidden = !round.plain_reasons.length;
  draw($("tree"), round, index, still);
  hint();
  $("caption").textContent = `Round ${run.at}: ${drafted ? `${accepted} of ${drafted} accepted` : "nothing drafted"}`;
  for (const span of run.spans) {
    span.classList.toggle("landed", span.dataset.round <= run.at);
    span.classList.toggle("now", span.dataset.round == run.at);
  }
  const now = run.spans.find((span) => span.dataset.round == run.at);
  if (now) $("text").scrollTop = now.offsetTop - $("text").offsetTop - $("text").clientHeight / 2;
  controls();
}

/** Show towards which sides the tree continues. */
function hint() {
  const pane = $("pane"), wide = pane.scrollWidth - pane.clientWidth, high = pane.scrollHeight - pane.clientHeight;
  const hidden = { left: pane.scrollLeft, right: wide - pane.scrollLeft, up: pane.scrollTop, down: high - pane.scrollTop };
  for (const [side, pixels] of Object.entries(hidden)) {
    document.querySelector(`[data-side=${side}]`).disabled = pixels < 4;
    pane.style.setProperty(`--${side}`, `${Math.min(pixels, FADE)}px`);
  }
}

function controls() {
  const count = run?.rounds.length ?? 0;
  for (const id of ["back", "play", "next", "at"]) $(id).disabled = !count;
  $("at").max = count;
  $("at").min = Math.min(1, count);
  $("at").value = run?.at ?? 0;
  $("at").ariaValueText = `round ${$("at").value} of ${count}`;
  $("play").textContent = playing ? "Pause" : "Play";
}

function setPlaying(value) {
  playing = value;
  clearTimeout(timer);
  if (playing) advance();
  controls();
}

function advance() {
  const pace = Number($("pace").value), more = run.at < run.rounds.length;
  if (more) show(pace ? run.at + 1 : run.rounds.length);
  if (!more && run.done) return setPlaying(false);
  timer = setTimeout(advance, more ? Math.max(pace, 40) : 40);
}

function step(by) {
  if (!run?.rounds.length) return;
  setPlaying(false);
  show(run.at + by);
}

// --- numbers

let isDue = false;
function refresh(plain) {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    count(plain);
  });
}

const seconds = (rounds) => rounds.reduce((sum, round) => sum + round.seconds, 0);
const rate = ({ rounds, tokens }) => (rounds.length ? tokens.length / seconds(rounds) : NaN);
const counted = ({ length }, one, many = `${one}s`) => `${length} ${length === 1 ? one : many}`;
const shown = (number, digits = 2) => (Number.isFinite(number) ? number.toFixed(digits) : "–");

function count(plain) {
  $("rate").textContent = shown(rate(run), 0);
  $("length").textContent = shown(run.tokens.length / run.rounds.length);
  const gain = shown(rate(run) / rate(plain));
  $("gain").textContent = gain;
  $("gain").classList.toggle("faster", gain > 1);
  $("slower").hidden = !(gain < 1);
  $("advice").hidden = !(run.done && gain < 1 && run.nodes !== "auto");
  const earned = new Map(sources.map((name) => [name, [0, 0]]));
  let own = 0;
  for (const round of run.rounds) {
    own += round.bonus !== null;
    for (const node of round.path.slice(1)) {
      const names = round.sources[node];
      for (const name of names) {
        index(name);
        if (!earned.has(name)) earned.set(name, [0, 0]);
        earned.get(name)[0] += 1;
        earned.get(name)[1] += names.length === 1;
      }
    }
  }
  const most = Math.max(own, ...[...earned.values()].map(([all]) => all), 1);
  const row = (name, [all, only], sign) => {
    const item = document.createElement("li");
    item.innerHTML = `<span class="name"></span><span class="bar"><i></i><i class="shared"></i></span><b></b>`;
    item.firstChild.append(sign, name);
    item.className = name === "the target" ? "target" : `s${index(name) % 6}`;
    const [solid, pale] = item.querySelectorAll("i");
    solid.style.width = `${(100 * only) / most}%`;
    pale.style.width = `${(100 * (all - only)) / most}%`;
    item.querySelector("b").textContent = all;
    if (name !== "the target") item.title = `${name}: ${all} accepted tokens, ${only} that no other source proposed`;
    return item;
  };
  $("earned").replaceChildren(...[...earned].map(([name, counts]) => row(name, counts, sign(name))), row("the target", [own, own], sign(null)));
  compare(plain);
  controls();
}

function compare(plain) {
  if (!plain.tokens.length) return;
  const differing = plain.tokens.findIndex((token, i) => token !== run.tokens[i]);
  const equal = differing < 0 ? plain.tokens.length : differing;
  const isWhole = equal === run.tokens.length && equal === plain.tokens.length;
  $("plain-note").textContent = `${equal} of ${run.tokens.length} tokens equal${isWhole ? " ✓" : ""}, ${shown(rate(plain), 0)} per second`;
  $("plain-note").classList.toggle("differs", differing >= 0);
}

// --- sources

/** The number of a source, which chooses its colour and shape. */
function index(name) {
  if (!sources.includes(name)) {
    sources.push(name);
    const item = document.createElement("li");
    item.append(sign(name), name);
    $("legend").append(item);
  }
  return sources.indexOf(name);
}

function sign(name) {
  const svg = element("svg", { viewBox: "-6 -6 12 12", width: 12, height: 12, "aria-hidden": true });
  svg.append(name === null ? element("rect", { class: "target", x: -5, y: -4, width: 10, height: 8, rx: 3 }) : mark(sources.indexOf(name), 0, 0));
  return svg;
}

// --- events

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (busy) run.abort.abort();
  else generate();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("form").requestSubmit();
});
$("back").addEventListener("click", () => step(-1));
$("next").addEventListener("click", () => step(1));
$("at").addEventListener("input", () => step(Number($("at").value) - run.at));
$("play").addEventListener("click", () => {
  if (!playing && run.at === run.rounds.length) run.at = 0;
  setPlaying(!playing);
});
$("pane").addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by) {
    event.preventDefault();
    step(by);
  }
});
$("pane").addEventListener("scroll", hint);
$("more").addEventListener("click", ({ target: { dataset: { side } } }) => {
  const [x, y] = { left: [-1, 0], right: [1, 0], up: [0, -1], down: [0, 1] }[side] ?? [0, 0];
  $("pane").scrollBy(x * 0.8 * $("pane").clientWidth, y * 0.8 * $("pane").clientHeight);
});
$("text").addEventListener("click", ({ target }) => target.dataset.round && step(target.dataset.round - run.at));
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  start();
});
new ResizeObserver(() => run?.at && show(run.at, true)).observe($("pane"));

const start = () => describe().then(() => { $("error").hidden = true; }, fail);
start();
$("prompt").focus();
