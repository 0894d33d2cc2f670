"use strict";

/* The chat page. No library, no build, and nothing is asked of any other server than this one. */

const $ = (id) => document.getElementById(id);
const percent = (share) => (share < 0.0005 && share > 0 ? "< 0.1" : (100 * share).toFixed(share < 0.0995 ? 1 : 0)) + " %";

let props = null;      // answer of /props
let messages = [];     // the conversation, as it is sent
let running = null;    // AbortController of the answer that is being written

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: "Bearer " + key }) };
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return "the server answered " + response.status;
  }
}

// ---- what is served -------------------------------------------------------------------------------------------------

async function connect() {
  for (;;) {
    try {
      const response = await fetch("/props", { headers: headers() });
      if (response.ok) return show(await response.json());
      $("model").textContent = await failure(response);
      if (response.status === 401) return openSettings(true);
    } catch {
      $("model").textContent = "the server cannot be reached";
    }
    await new Promise((resolve) => setTimeout(resolve, 1500));
  }
}

function show(found) {
  props = found;
  const fusion = props.fusion;
  const usual = props.default_generation_settings.params;
  $("model").textContent = props.model_alias + ": " + fusion.experts.length + (fusion.experts.length === 1 ? " expert, " : " experts, ") + fusion.strategy;
  $("temperature").placeholder = usual.temperature;
  $("max-tokens").placeholder = usual.max_tokens;
  $("strategy").placeholder = fusion.strategy;
  const pools = fusion.strategies.filter((row) => row.kind === "pool");
  const rules = fusion.strategies.filter((row) => row.kind === "weight rule");
  const expressions = pools.flatMap((pool) => rules.map((rule) => `${pool.name}(w=${rule.name})`));
  const presets = fusion.strategies.filter((row) => row.kind === "preset").map((row) => row.name);
  $("strategies").replaceChildren(...[...presets, ...expressions].map((value) => make("option", { value })));
  $("legend").replaceChildren(...fusion.experts.map((name, i) => make("li", {}, swatch(i), name)));
  $("weights").replaceChildren(...fusion.experts.map(slider));
}

function swatch(i) {
  return make("span", { class: `piece swatch e${i % 8}`, "aria-hidden": "true" }, "ab");
}

function slider(name, i) {
  const usual = props.fusion.weights[name].toFixed(2);
  const input = make("input", { id: "weight-" + i, type: "range", min: 0, max: 1, step: 0.01, value: usual });
  const output = make("output", { for: "weight-" + i }, usual);
  input.addEventListener("input", () => { output.textContent = Number(input.value).toFixed(2); });
  return make("div", { class: "weight" }, make("label", { for: "weight-" + i }, "Weight of " + name), input, output);
}

function weights() {
  const chosen = {};
  props.fusion.experts.forEach((name, i) => {
    const input = $("weight-" + i);
    // A slider that was not moved stands for the exact weight of the ensemble.
    chosen[name] = input.value === input.defaultValue ? props.fusion.weights[name] : Number(input.value);
  });
  return chosen;
}

function openSettings(open) {
  $("settings").hidden = !open;
  $("open-settings").setAttribute("aria-expanded", String(open));
}

// ---- asking ---------------------------------------------------------------------------------------------------------

function request() {
  const system = $("system").value.trim();
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
    fusion: { trace: true, weights: weights(), strategy: $("strategy").value.trim() || undefined },
  };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

async function ask(text) {
  messages.push({ role: "user", content: text });
  said("you", "You", text);
  const answer = new Answer();
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  $("status").textContent = "The experts are writing.";
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(request()), signal: running.signal,
    });
    if (!response.ok) throw new Error(await failure(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      answer.add(event);
    }
    answer.end(answer.reason === "length" ? "The answer was cut at the longest length." : "The answer is complete.");
  } catch (error) {
    if (error.name === "AbortError") answer.end("The answer was stopped.");
    else answer.fail(error.message);
  }
  if (answer.text) messages.push({ role: "assistant", content: answer.text });
  else messages.pop();
  running = null;
  $("send").disabled = false;
  $("stop").disabled = true;
}

// ---- showing --------------------------------------------------------------------------------------------------------

function said(kind, who, text) {
  const words = make("p", { class: "words", dir: "auto" }, text);
  const item = make("li", { class: "said " + kind }, make("h2", {}, who), words);
  $("log").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

/* An answer in the making: text comes first, the pieces that colour it follow as soon as their ends are certain. */
class Answer {
  constructor() {
    this.text = "";
    this.reason = null;
    this.experts = props.fusion.experts;
    this.parts = this.experts.map(() => 0);
    this.coloured = 0;
    this.pieces = [];
    this.item = said("experts", props.model_alias, "");
    this.words = this.item.querySelector(".words");
    this.words.setAttribute("aria-busy", "true");
    this.rest = make("span", { class: "rest" });
    this.words.append(this.rest);
  }

  add(event) {
    if (event.fusion?.seed !== undefined) this.seed = event.fusion.seed;
    for (const choice of event.choices) {
      this.text += choice.delta.content ?? "";
      this.reason = choice.finish_reason ?? this.reason;
    }
    for (const piece of event.fusion?.pieces ?? []) this.colour(piece);
    this.timings = event.timings ?? this.timings;
    this.rest.textContent = this.text.slice(this.coloured);
    if (document.activeElement === $("message")) this.item.scrollIntoView({ block: "end" });
  }

  colour(piece) {
    const votes = this.experts.map((name) => piece.experts[name]);
    const n = piece.bytes.length / 2;
    votes.forEach((vote, i) => { this.parts[i] += vote.responsibility * n; });
    if (!piece.text) return; // the beginning of a character: it is shown with its end
    const shares = votes.map((vote) => vote.responsibility);
    const first = shares.indexOf(Math.max(...shares));
    const node = make("span", { class: `piece e${first % 8}`, tabindex: this.pieces.length ? -1 : 0 }, piece.text);
    node.style.setProperty("--part", shares[first].toFixed(3));
    node.piece = piece;
    node.at = this.pieces.length;
    this.pieces.push(node);
    this.rest.before(node);
    this.coloured += piece.text.length;
  }

  end(message) {
    this.words.setAttribute("aria-busy", "false");
    this.words.setAttribute("role", "group");
    this.words.setAttribute("aria-label", "Answer; the arrow keys go through its pieces");
    const total = this.parts.reduce((sum, part) => sum + part, 0);
    const facts = [];
    if (total) {
      const order = this.experts.map((name, i) => [this.parts[i] / total, name]).sort((a, b) => b[0] - a[0]);
      facts.push("carried by " + order.map(([share, name]) => `${name} ${percent(share)}`).join(", "));
    }
    if (this.timings) facts.push(`${this.timings.predicted_n} pieces, ${this.timings.predicted_per_second.toFixed(1)} per second`);
    if (this.seed !== undefined) facts.push("seed " + this.seed);
    this.item.append(make("p", { class: "facts" }, facts.join(" · ")));
    $("status").textContent = message;
    if (document.activeElement === $("message")) this.item.scrollIntoView({ block: "end" });
  }

  fail(message) {
    this.words.setAttribute("aria-busy", "false");
    this.item.append(make("p", { class: "error", role: "alert" }, message));
    $("status").textContent = "";
    this.item.scrollIntoView({ block: "end" });
  }
}

// ---- the piece under the pointer, or under the keys -----------------------------------------------------------------

let shown = null;

function showTip(node) {
  hideTip();
  const piece = node.piece;
  const rows = Object.entries(piece.experts).map(([name, vote]) => make("tr", {},
    make("th", { scope: "row" }, swatch(props.fusion.experts.indexOf(name)), name),
    make("td", {}, percent(vote.responsibility)),
    make("td", {}, percent(vote.weight)),
    make("td", {}, vote.logprob === null ? "0 %" : percent(Math.exp(vote.logprob)))));
  const others = piece.alternatives.map((other) => make("li", {},
    make("span", { class: "raw" }, visible(other.text)), " " + percent(other.probability)));
  $("tip").replaceChildren(
    make("p", {}, make("strong", { class: "raw" }, visible(piece.text)), " " + percent(Math.exp(piece.logprob ?? -Infinity))),
    make("table", {}, make("caption", {}, "Experts"),
      make("thead", {}, make("tr", {}, ...["", "carried", "weight", "probability"].map((text) => make("th", { scope: "col" }, text)))),
      make("tbody", {}, ...rows)),
    make("p", {}, make("strong", {}, "What could have come")),
    make("ul", {}, ...others),
    make("p", {}, `Divergence of the experts: ${(piece.divergence / Math.LN2).toFixed(3)} bits per byte`));
  $("tip").hidden = false;
  node.classList.add("shown");
  node.setAttribute("aria-describedby", "tip");
  shown = node;
  const box = node.getBoundingClientRect();
  const tip = $("tip").getBoundingClientRect();
  // Where it fits on neither side, it may leave the screen, but never covers its piece.
  const above = box.top - tip.height - 8;
  const isAbove = above >= 8 || box.top > innerHeight - box.bottom;
  $("tip").style.left = Math.max(8, Math.min(box.left, innerWidth - tip.width - 8)) + "px";
  $("tip").style.top = (isAbove ? above : box.bottom + 8) + "px";
}

function hideTip() {
  if (!shown) return;
  shown.classList.remove("shown");
  shown.removeAttribute("aria-describedby");
  $("tip").hidden = true;
  shown = null;
}

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll(" ", "␣") || "…";

function pieceOf(event) {
  const node = event.target instanceof Element ? event.target.closest("#log .piece") : null;
  return node?.piece ? node : null;
}

function walk(event) {
  const node = pieceOf(event);
  if (!node) return;
  const all = [...node.parentElement.querySelectorAll(".piece")];
  const step = { ArrowRight: 1, ArrowLeft: -1, Home: -all.length, End: all.length }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  const next = all[Math.max(0, Math.min(all.length - 1, node.at + step))];
  node.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

// ---- beginning ------------------------------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!text || running || !props) return;
  $("message").value = "";
  ask(text);
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => {
  running?.abort();
  messages = [];
  hideTip();
  $("log").replaceChildren();
  $("status").textContent = "A new chat has begun.";
  $("message").focus();
});
$("open-settings").addEventListener("click", () => openSettings($("settings").hidden));
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("key").addEventListener("change", async () => {
  if (props) return;
  await connect();
  if (!props) return;
  openSettings(false);
  $("message").focus();
});
$("reset").addEventListener("click", () => {
  $("strategy").value = "";
  $("weights").replaceChildren(...props.fusion.experts.map(slider));
});
$("log").addEventListener("mouseover", (event) => { const node = pieceOf(event); if (node) showTip(node); });
$("log").addEventListener("mouseout", hideTip);
$("log").addEventListener("focusin", (event) => { const node = pieceOf(event); if (node) showTip(node); });
$("log").addEventListener("focusout", hideTip);
$("log").addEventListener("keydown", walk);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (shown) hideTip();
  else running?.abort();
});
addEventListener("scroll", hideTip, { passive: true });

connect();
$("message").focus();
