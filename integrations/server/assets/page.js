"use strict";

// Asks the server every two seconds, while somebody looks, and draws what it says. Everything that
// comes from outside is set as text, never as markup.
(() => {
  const EVERY_MS = 2000;
  const KINDS = ["full", "swa", "state", "running"];
  const NAMES = { full: "KV", swa: "windows", state: "checkpoints", running: "running states", free: "free" };
  let chosen = null;

  const at = (id) => document.getElementById(id);

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function size(bytes) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
    return `${unit ? bytes.toFixed(1) : bytes} ${units[unit]}`;
  }

  const count = (value) => value.toLocaleString("en");
  const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
  const percent = (part, whole) => (whole ? `${(100 * part / whole).toFixed(1)} %` : "–");

  function drawMemory(state) {
    const { stats } = state;
    const budget = stats.budget;
    const used = Object.entries(stats.bytes)
      .filter(([kind]) => !["free", "scratch", "total"].includes(kind))
      .map(([kind, sizes]) => [kind, sizes.used]);
    const taken = used.reduce((sum, [, bytes]) => sum + bytes, 0);
    const parts = [...used, ["free", Math.max(0, budget - taken)]];
    at("bytes").replaceChildren(...parts.filter(([, bytes]) => bytes > 0).map(([kind, bytes]) => {
      const part = make("span", `kind-${KINDS.includes(kind) || kind === "free" ? kind : "other"}`);
      part.style.width = `${100 * bytes / budget}%`;
      part.title = `${NAMES[kind] || kind}: ${size(bytes)}`;
      return part;
    }));
    at("legend").replaceChildren(...parts.map(([kind, bytes]) => {
      const item = make("li");
      item.append(make("span", `swatch kind-${KINDS.includes(kind) || kind === "free" ? kind : "other"}`),
        ` ${NAMES[kind] || kind} ${size(bytes)}`);
      return item;
    }));
    const figures = {
      "budget": size(budget),
      "prompt tokens reused": percent(stats.hits.cached_tokens, stats.hits.prompt_tokens),
      "prompt tokens": count(stats.hits.prompt_tokens),
      "calls under way": count(state.calls),
      "open sessions": count(stats.sessions.open),
      "tips": count(stats.sessions.tips),
      "checkpoints": count(stats.entries.state || 0),
      "evictions": count(Object.values(stats.evictions).reduce((sum, n) => sum + n, 0)),
    };
    at("figures").replaceChildren(...Object.entries(figures).map(([name, value]) => {
      const pair = make("div");
      pair.append(make("dt", "", name), make("dd", "", value));
      return pair;
    }));
  }

  // The first child goes on along its parent's line; every other one begins a line below.
  function linesOf(nodes) {
    const below = new Map();
    for (const node of nodes) {
      if (!below.has(node.parent)) below.set(node.parent, []);
      below.get(node.parent).push(node);
    }
    const lines = [];
    const waiting = (below.get(null) || []).map((root) => [root, null]).reverse();
    while (waiting.length) {
      const [node, line] = waiting.pop();
      const mine = line || [];
      if (!line) lines.push(mine);
      if (node.end > 0) mine.push(node);
      const children = below.get(node.id) || [];
      for (const child of children.slice(1).reverse()) waiting.push([child, null]);
      if (children.length) waiting.push([children[0], mine]);
    }
    return lines.filter((line) => line.length);
  }

  function drawTree({ nodes, total }) {
    const longest = Math.max(1, ...nodes.map((node) => node.end));
    const left = (position) => `${100 * position / longest}%`;
    at("tree").replaceChildren(...linesOf(nodes).map((line) => {
      const row = make("div", "row");
      for (const node of line) {
        const kind = !node.kinds.includes("full") ? "gone" : node.shared ? "shared" : "own";
        const bar = make("span", `node ${kind}${node.in_use ? " in-use" : ""}`);
        bar.style.left = left(node.start);
        bar.style.width = left(node.end - node.start);
        bar.title = `tokens ${count(node.start)} to ${count(node.end)}: ${node.kinds.join(", ") || "nothing kept"}`;
        row.append(bar);
      }
      for (const node of line) {
        if (node.kinds.includes("state")) {
          const dot = make("span", "dot");
          dot.style.left = left(node.end);
          dot.title = `checkpoint at token ${count(node.end)}`;
          row.append(dot);
        }
        if (node.sessions.length) {
          const more = node.sessions.length > 1 ? ` +${node.sessions.length - 1}` : "";
          const name = make("span", "name", node.sessions[0] + more);
          name.style.left = left(node.end);
          name.title = node.sessions.join("\n");
          row.append(name);
        }
      }
      return row;
    }));
    const shown = nodes.filter((node) => node.end > 0).length;
    const all = Math.max(shown, total);
    at("tree-note").textContent = shown
      ? `${count(shown)} of ${count(all)} runs of tokens, up to token ${count(longest)}.`
      : "Nothing is kept yet.";
  }

  const keyOf = (session, turn) => `${session.tenant}\n${session.id}\n${turn.number}`;

  function tell(session, turn) {
    const share = percent(turn.cached_tokens, turn.prompt_tokens);
    const head = `${session.id}, turn ${turn.index}: ${count(turn.cached_tokens)} of `
      + `${count(turn.prompt_tokens)} prompt tokens cached (${share}), ${count(turn.output_tokens)} sampled, `
      + `first token after ${(1000 * turn.ttft_s).toFixed(1)} ms.`;
    at("miss").textContent = `${head}\n${turn.miss || "All of the prompt but its last few tokens was reused."}`;
  }

  function drawSessions(sessions) {
    const most = Math.max(1, ...sessions.flatMap((s) => s.timeline.map((turn) => turn.prompt_tokens)));
    at("sessions").replaceChildren(...sessions.map((session) => {
      const row = make("div", "session");
      const about = make("div");
      const parent = session.parent ? `, from ${session.parent}` : "";
      const tenant = session.tenant === null ? "" : `, tenant ${session.tenant}`;
      about.append(make("h3", "", session.id),
        make("p", "", `${plural(session.turns, "turn")}, ${plural(session.tokens, "token")}, `
          + `${plural(session.tips.length, "tip")}${parent}${tenant}`));
      const timeline = make("div", "timeline");
      for (const turn of session.timeline) {
        const button = make("button", "turn");
        button.type = "button";
        const key = keyOf(session, turn);
        button.setAttribute("aria-pressed", String(key === chosen));
        button.setAttribute("aria-label", `turn ${turn.index} of ${session.id}: `
          + `${turn.cached_tokens} tokens cached, ${turn.computed_tokens} computed`);
        for (const [kind, tokens] of [["computed", turn.computed_tokens], ["cached", turn.cached_tokens]]) {
          const part = make("span", kind);
          part.style.height = tokens ? `max(1px, ${100 * tokens / most}%)` : "0";
          button.append(part);
        }
        button.addEventListener("click", () => {
          chosen = key;
          for (const other of document.querySelectorAll(".turn")) {
            other.setAttribute("aria-pressed", String(other === button));
          }
          tell(session, turn);
        });
        if (key === chosen) tell(session, turn);
        timeline.append(button);
      }
      row.append(about, timeline);
      return row;
    }));
    if (!sessions.length) at("sessions").append(make("p", "hint", "No session has a name yet."));
  }

  async function look() {
    const key = sessionStorage.getItem("key");
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const answer = await fetch("/state", { headers });
    const locked = answer.status === 401 || answer.status === 403;
    at("unlock").hidden = !locked;
    at("content").hidden = locked;
    if (locked) {
      at("status").textContent = key ? "that key does not open this page" : "locked";
      return;
    }
    if (!answer.ok) throw new Error(`the server says ${answer.status}`);
    const state = await answer.json();
    at("model").textContent = state.model;
    at("status").textContent = "live";
    const focused = document.activeElement;
    const place = focused && focused.classList.contains("turn") ? focused.getAttribute("aria-label") : null;
    drawMemory(state);
    drawTree(state.tree);
    drawSessions(state.sessions);
    if (place) {
      const again = [...document.querySelectorAll(".turn")].find((b) => b.getAttribute("aria-label") === place);
      if (again) again.focus();
    }
  }

  async function watch() {
    if (!document.hidden) {
      try { await look(); } catch (error) { at("status").textContent = `no answer: ${error.message}`; }
    }
    setTimeout(watch, EVERY_MS);
  }

  at("unlock").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("key", at("key").value);
    look().catch((error) => { at("status").textContent = `no answer: ${error.message}`; });
  });
  watch();
})();
