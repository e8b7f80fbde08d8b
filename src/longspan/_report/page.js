"use strict";
(async () => {
const $ = (id) => document.getElementById(id);
const meta = JSON.parse($("meta").textContent);
const raw = Uint8Array.from(atob($("block").textContent.trim()), (c) => c.charCodeAt(0));
const buffer = await new Response(new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
const A = {};
for (const [name, a] of Object.entries(meta.arrays)) {
  const n = a.shape.reduce((x, y) => x * y, 1);
  A[name] = a.type === "f4" ? new Float32Array(buffer, a.at, n) : new Int32Array(buffer, a.at, n);
}
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const dark = () => css("color-scheme") === "dark" || getComputedStyle(document.documentElement).colorScheme === "dark";
const hue = (rank) => (rank * 137.508 + 210) % 360;
const colour = (rank, full) => `hsl(${hue(rank)} 65% ${dark() ? (full ? 58 : 38) : (full ? 46 : 72)}%)`;
const fmt = (n, digits = 3) => n.toLocaleString("en", {maximumFractionDigits: digits});
const bytes = (n) => n >= 2 ** 30 ? fmt(n / 2 ** 30, 2) + " GiB" : n >= 2 ** 20 ? fmt(n / 2 ** 20, 2) + " MiB" : fmt(n / 1024, 1) + " KiB";
const after = (array, value, lo, hi) => { while (lo < hi) { const m = (lo + hi) >> 1; if (array[m] <= value) lo = m + 1; else hi = m; } return lo; };
function fit(canvas, height) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth || 600;
  if (height) canvas.style.height = height + "px";
  const tall = canvas.clientHeight || height || 300;
  canvas.width = Math.round(width * scale); canvas.height = Math.round(tall * scale);
  const g = canvas.getContext("2d"); g.setTransform(scale, 0, 0, scale, 0, 0); g.clearRect(0, 0, width, tall);
  g.font = "12px system-ui, sans-serif";
  return [g, width, tall];
}

// ---------------------------------------------------------------------------------------------------------------- the mask's tiles
const q = {edges: A.q_edges, n: A.q_owner.length, owner: A.q_owner}, k = {edges: A.k_edges, n: A.k_owner.length, owner: A.k_owner};
const tileAt = (side, token) => Math.min(side.n - 1, Math.max(0, after(side.edges, token, 0, side.n + 1) - 1));
const view = {x: 0, y: 0, w: meta.kv_len, h: meta.q_len};
const grid = $("grid");
let pending = false;
const redraw = () => { if (!pending) { pending = true; requestAnimationFrame(() => { pending = false; drawGrid(); }); } };
function drawGrid() {
  const [g, W, H] = fit(grid);
  const step = view.h / H > 1 ? view.h / H : 0;
  const line = (row, y, tall) => {
    const owner = q.owner[row], begin = A.ptr[row], end = A.ptr[row + 1];
    let i = begin, lo = begin, hi = end;
    const left = tileAt(k, Math.floor(view.x));
    while (lo < hi) { const m = (lo + hi) >> 1; if (A.last[m] < left) lo = m + 1; else hi = m; }
    for (i = lo; i < end; i++) {
      const a = k.edges[A.first[i]], b = k.edges[A.last[i] + 1];
      if (a > view.x + view.w) break;
      g.fillStyle = colour(owner, A.kind[i] === 2);
      const x0 = (a - view.x) / view.w * W, x1 = (b - view.x) / view.w * W;
      g.fillRect(x0, y, Math.max(x1 - x0, 0.75), tall);
    }
  };
  if (step) for (let y = 0; y < H; y++) { const token = view.y + (y + 0.5) * step; if (token < meta.q_len) line(tileAt(q, token), y, 1); }
  else for (let row = tileAt(q, view.y); row < q.n && q.edges[row] < view.y + view.h; row++) {
    const y0 = (q.edges[row] - view.y) / view.h * H, y1 = (q.edges[row + 1] - view.y) / view.h * H;
    line(row, y0, Math.max(0.75, y1 - y0 - (y1 - y0 > 6 ? 0.5 : 0)));
  }
  g.fillStyle = css("--soft");
  g.fillText(`queries ${fmt(Math.round(view.y))} – ${fmt(Math.round(Math.min(meta.q_len, view.y + view.h)))}, keys ${fmt(Math.round(view.x))} – ${fmt(Math.round(Math.min(meta.kv_len, view.x + view.w)))}`, 8, H - 8);
  grid.dataset.view = [view.x, view.y, view.w, view.h].map((v) => Math.round(v)).join(" ");
}
// Tiles are owned by ranks of the KV axis: single ranks, or Ulysses groups in which each rank computes some of the heads.
const members = []; meta.group.forEach((g, r) => (members[g] ||= []).push(r));
const listed = (ranks) => ranks.length > 8 ? ranks.slice(0, 4).join(", ") + ", … " + ranks[ranks.length - 1] : ranks.join(", ");
const who = (owner) => meta.degree > 1 ? `ranks ${listed(members[owner])} (each some heads)` : `rank ${owner}`;
function stepOf(rank, tile) {
  if (k.owner[tile] === rank) return 0;
  const begin = A.step_ptr[rank], end = A.step_ptr[rank + 1];
  const i = after(A.step_first, tile, begin, end) - 1;
  return i >= begin && A.step_end[i] > tile ? A.step_value[i] : -1;
}
function describeTile(x, y) {
  const r = grid.getBoundingClientRect();
  const qt = view.y + y / r.height * view.h, kt = view.x + x / r.width * view.w;
  if (qt < 0 || kt < 0 || qt >= meta.q_len || kt >= meta.kv_len) { $("tile").textContent = "Outside the sequence."; return; }
  const row = tileAt(q, qt), column = tileAt(k, kt);
  let kind = 0;
  for (let i = A.ptr[row]; i < A.ptr[row + 1]; i++) if (A.first[i] <= column && column <= A.last[i]) kind = A.kind[i];
  const owner = q.owner[row], rank = who(owner), from = who(k.owner[column]), s = stepOf(owner, column);
  const where = `queries ${fmt(q.edges[row])} – ${fmt(q.edges[row + 1] - 1)}, keys ${fmt(k.edges[column])} – ${fmt(k.edges[column + 1] - 1)}`;
  const when = s === 0 ? `local KV, step ${meta.joined ? 1 : 0}` : s > 0 ? `KV from ${from}, step ${s} of ${meta.steps - 1 - meta.split_local}` : `KV of ${from}`;
  $("tile").textContent = kind ? `Tile ${row} × ${column} (${where}): ${kind === 2 ? "full" : "partial"}, computed by ${rank}, ${when}.`
    : `Tile ${row} × ${column} (${where}): empty; queries of ${rank}, KV of ${from}.`;
}
function zoom(factor, cx = 0.5, cy = 0.5) {
  const w = Math.min(meta.kv_len, Math.max(64, view.w * factor)), h = Math.min(meta.q_len, Math.max(64, view.h * factor));
  view.x += (view.w - w) * cx; view.y += (view.h - h) * cy; view.w = w; view.h = h; clampView(); redraw();
}
function clampView() {
  view.x = Math.max(0, Math.min(view.x, meta.kv_len - view.w)); view.y = Math.max(0, Math.min(view.y, meta.q_len - view.h));
}
function pan(dx, dy) { view.x += dx * view.w; view.y += dy * view.h; clampView(); redraw(); }
const reset = () => { Object.assign(view, {x: 0, y: 0, w: meta.kv_len, h: meta.q_len}); redraw(); };
let drag = null;
grid.addEventListener("wheel", (e) => { e.preventDefault(); const r = grid.getBoundingClientRect(); zoom(e.deltaY > 0 ? 1.25 : 0.8, (e.clientX - r.left) / r.width, (e.clientY - r.top) / r.height); describeTile(e.clientX - r.left, e.clientY - r.top); }, {passive: false});
grid.addEventListener("pointerdown", (e) => { drag = [e.clientX, e.clientY]; grid.setPointerCapture(e.pointerId); });
grid.addEventListener("pointerup", () => { drag = null; });
grid.addEventListener("pointermove", (e) => {
  const r = grid.getBoundingClientRect();
  if (drag) { pan((drag[0] - e.clientX) / r.width, (drag[1] - e.clientY) / r.height); drag = [e.clientX, e.clientY]; }
  describeTile(e.clientX - r.left, e.clientY - r.top);
});
grid.addEventListener("keydown", (e) => {
  const moves = {ArrowLeft: [-0.1, 0], ArrowRight: [0.1, 0], ArrowUp: [0, -0.1], ArrowDown: [0, 0.1]};
  if (moves[e.key]) pan(...moves[e.key]);
  else if (e.key === "+" || e.key === "=") zoom(0.8);
  else if (e.key === "-") zoom(1.25);
  else if (e.key === "0") reset();
  else return;
  e.preventDefault();
  const r = grid.getBoundingClientRect(); describeTile(r.width / 2, r.height / 2);
});
$("in").onclick = () => zoom(0.8); $("out").onclick = () => zoom(1.25); $("all").onclick = reset;

// ------------------------------------------------------------------------------------------------------------------ work and bytes
const total = A.pairs.reduce((a, b) => a + b, 0), mean = total / A.pairs.length || 1;
function drawWork() {
  const [g, W, H] = fit($("work"), 180), max = Math.max(...A.pairs, 1), n = A.pairs.length, w = W / n;
  for (let r = 0; r < n; r++) { const h = A.pairs[r] / max * (H - 18); g.fillStyle = colour(meta.group[r], true); g.fillRect(r * w, H - h, Math.max(w - (w > 3 ? 1 : 0), 0.75), h); }
  const y = H - mean / max * (H - 18); g.strokeStyle = css("--soft"); g.beginPath(); g.moveTo(0, y); g.lineTo(W, y); g.stroke();
  g.fillStyle = css("--soft"); g.fillText(`mean; busiest ${fmt(meta.balance)} × it`, 6, y - 5);
}
$("work").addEventListener("pointermove", (e) => {
  const r = $("work").getBoundingClientRect(), i = Math.min(A.pairs.length - 1, Math.max(0, Math.floor((e.clientX - r.left) / r.width * A.pairs.length)));
  $("work-tip").textContent = `Rank ${i}: ${fmt(A.pairs[i], 0)} pairs, ${fmt(A.pairs[i] / mean)} × the mean, in ${fmt(A.tiles[i])} tiles.`;
});
const shown = meta.shown, side = shown.length;
function drawMatrix() {
  const [g, W, H] = fit($("matrix")), max = Math.max(...A.matrix, 1), c = Math.min(W, H) / side;
  for (let a = 0; a < side; a++) for (let b = 0; b < side; b++) {
    const share = A.matrix[a * side + b] / max;
    if (share > 0) { g.globalAlpha = 0.12 + 0.88 * Math.sqrt(share); g.fillStyle = css("--compute"); g.fillRect(b * c, a * c, Math.max(c - (c > 6 ? 1 : 0), 0.75), Math.max(c - (c > 6 ? 1 : 0), 0.75)); }
  }
  g.globalAlpha = 1;
  if (!A.matrix.some((v) => v > 0)) { g.fillStyle = css("--soft"); g.fillText("nothing moves between ranks", 8, 20); }
}
$("matrix").addEventListener("pointermove", (e) => {
  const r = $("matrix").getBoundingClientRect(), c = Math.min(r.width, r.height) / side;
  const a = Math.floor((e.clientY - r.top) / c), b = Math.floor((e.clientX - r.left) / c);
  if (a >= 0 && b >= 0 && a < side && b < side) $("matrix-tip").textContent = `From rank ${shown[a]} to rank ${shown[b]}: ${bytes(A.matrix[a * side + b])}.`;
});

// -------------------------------------------------------------------------------------------------------------------- the timeline
const rowHeight = Math.max(8, Math.min(26, 900 / side));
const whole = meta.forward + meta.backward || 1;
function drawTime() {
  const [g, W, H] = fit($("time"), side * rowHeight + 26), left = 44, scale = (W - left - 8) / whole;
  const box = (start, a, b, y, h, name) => { if (b > a) { g.fillStyle = css(name); g.fillRect(left + (start + a) * scale, y, Math.max((b - a) * scale, 0.6), h); } };
  let start = 0;
  for (const pass of ["forward", "backward"]) {
    const n = meta.steps, transposes = A[pass + "_transposes"];
    for (let i = 0; i < side; i++) {
      const y = i * rowHeight, h = rowHeight * 0.44;
      const at = (name, end, s) => A[pass + "_" + name][(end * side + i) * n + s];
      let last = transposes[i];
      box(start, 0, transposes[i], y, h, "--transpose");
      for (let s = 0; s < n; s++) {
        const a = at("compute", 0, s), b = at("compute", 1, s);
        if (b > a) { box(start, last, a, y, h, "--wait"); box(start, a, b, y, h, "--compute"); last = b; }
        box(start, at("transfer", 0, s), at("transfer", 1, s), y + h + 1, h * 0.8, "--transfer");
        box(start, at("return", 0, s), at("return", 1, s), y + h + 1, h * 0.8, "--return");
      }
      box(start, last, transposes[2 * side + i], y, h, meta.degree > 1 ? "--transpose" : "--wait");
      g.fillStyle = css("--soft");
      if (pass === "forward" && (rowHeight > 11 || i % 2 === 0)) g.fillText(String(shown[i]), 6, y + Math.min(rowHeight, 14) * 0.8);
    }
    start += meta[pass];
    g.strokeStyle = css("--line"); g.beginPath(); g.moveTo(left + start * scale, 0); g.lineTo(left + start * scale, H - 22); g.stroke();
  }
  g.fillStyle = css("--soft");
  g.fillText(`forward ${fmt(1e3 * meta.forward)} ms`, left, H - 8);
  g.fillText(`backward ${fmt(1e3 * meta.backward)} ms`, Math.min(left + meta.forward * scale + 8, W - 140), H - 8);
}
$("time").addEventListener("pointermove", (e) => {
  const r = $("time").getBoundingClientRect(), i = Math.floor((e.clientY - r.top) / rowHeight), scale = (r.width - 52) / whole;
  const t = (e.clientX - r.left - 44) / scale;
  if (i < 0 || i >= side || t < 0 || t > whole) return;
  const pass = t < meta.forward ? "forward" : "backward", u = pass === "forward" ? t : t - meta.forward, n = meta.steps;
  let what = "waiting or done";
  for (let s = 0; s < n; s++) if (A[pass + "_compute"][i * n + s] <= u && u < A[pass + "_compute"][(side + i) * n + s]) what = meta.joined && !s ? "packing local KV" : meta.split_local && s === n - 1 ? "computing the second part of local KV" : `computing step ${s}`;
  $("time-tip").textContent = `Rank ${shown[i]}, ${pass}, ${fmt(1e3 * u)} ms: ${what}.`;
});

const drawAll = () => { drawGrid(); drawWork(); drawMatrix(); drawTime(); };
$("theme").onclick = () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; drawAll(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
addEventListener("resize", drawAll); addEventListener("beforeprint", drawAll);
drawAll();
document.documentElement.dataset.ready = "yes";
})();
