"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("canvas");
  const tip = document.getElementById("tip");
  const context = canvas.getContext("2d");
  const WHOLE = [0, Math.max(data.end, 1)];  // microseconds, as all times here
  const PAD = 8, AXIS = 24, MIN_SPAN = 5;
  let view = WHOLE.slice(), selection = null, pointer = null, scheduled = false;

  // ---- text
  const round = (value, digits) => value.toLocaleString("en", { maximumFractionDigits: digits });
  const time = us => us >= 1e6 ? `${round(us / 1e6, 3)} s` : us >= 1e3 ? `${round(us / 1e3, 2)} ms` : `${round(us, 0)} us`;
  const bytes = n => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = 0;
    while (n >= 1024 && power < units.length - 1) { n /= 1024; power++; }
    return `${round(n, power ? 1 : 0)} ${units[power]}`;
  };
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const chunk = id => `chunk ${id}${data.chunks[id] ? `: ${data.chunks[id]}` : ""}`;
  const words = index => data.words[index];

  // ---- tracks: `begin` ascending; `reach[i]`: the latest end up to i, so that nested spans are found too
  function spans(name, height, begin, end, paint, label, detail) {
    let latest = -Infinity;
    const reach = end.map(value => (latest = Math.max(latest, value)));
    return { kind: "spans", name, height, begin, end, reach, paint, label, detail };
  }

  function makeTracks() {
    const { phases, operators: ops, computing, waits, updates } = data;
    const tracks = [];
    tracks.push(spans("phase", 20, phases.begin, phases.end, i => words(phases.name[i]), i => words(phases.name[i]),
      i => `${words(phases.name[i])}\n${time(phases.end[i] - phases.begin[i])}`));
    const pale = spans("", 34, computing.begin, computing.end, i => words(computing.phase[i]), () => "", () => "");
    tracks.push(spans("computing", 34, ops.begin, ops.end, i => words(ops.phase[i]), i => words(ops.label[i]), i => [
      words(ops.label[i]), `${words(ops.phase[i])}${ops.late[i] ? ", deferred by the previous step" : ""}`,
      `${time(ops.end[i] - ops.begin[i])} with its operands pinned`,
      `asked for ${time(ops.begin[i] - ops.asked[i])} before`,
      ops.moment[i] < 0 ? "outside the step's order" : `moment ${ops.moment[i]}`].join("\n")));
    tracks.at(-1).under = pale;
    if (updates.begin.length) {
      tracks.push(spans("put-off updates", 16, updates.begin, updates.end, () => "optimizer", i => words(updates.label[i]),
        i => `${words(updates.label[i])}\nof the step before, ${time(updates.end[i] - updates.begin[i])}`));
    }
    const cause = i => waits.shares[i].reduce((most, share) => (!most || share[2] > most[2] ? share : most), null);
    tracks.push(spans("waiting for", 20, waits.begin, waits.end, i => (cause(i) ? cause(i)[0] : "memory"),
      i => (cause(i) ? chunk(cause(i)[1]) : ""), i => [
        `waited ${time(waits.end[i] - waits.begin[i])} for ${words(waits.label[i])}`,
        ...waits.shares[i].map(([link, id, us]) => `${time(us)} ${data.links[link].title}, ${chunk(id)}`)].join("\n")));
    for (const [link, used] of Object.entries(data.links)) {
      if (!used.begin.length) continue;
      tracks.push(spans(used.title, 20, used.begin, used.end, () => link, i => chunk(used.chunk[i]), i => [
        `${words(used.kind[i])} ${chunk(used.chunk[i])}${used.ok[i] ? "" : " FAILED"}`,
        `${bytes(used.nbytes[i])} in ${time(used.end[i] - used.real[i])}`,
        `asked for ${time(used.real[i] - used.submitted[i])} before`].join("\n")));
    }
    for (const [tier, budget] of Object.entries(data.budgets)) {
      tracks.push({ kind: "fill", name: `${tier.toUpperCase()} fill`, height: tier === "device" ? 84 : 46, tier, budget });
    }
    return tracks;
  }
  const tracks = makeTracks();

  // ---- searching: the first index whose value is > t
  function after(values, t) {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] > t) high = middle; else low = middle + 1;
    }
    return low;
  }

  // ---- drawing
  let left = 0, width = 1;  // of the plot; measured once per drawing, for asking the browser is slow
  const toX = t => left + (t - view[0]) / (view[1] - view[0]) * width;
  const toTime = x => view[0] + (x - left) / width * (view[1] - view[0]);

  function measure() {
    left = canvas.clientWidth < 700 ? 84 : 128;
    width = Math.max(50, canvas.clientWidth - left - PAD);
  }

  function draw() {
    scheduled = false;
    measure();
    const ratio = window.devicePixelRatio || 1;
    const height = AXIS + tracks.reduce((sum, track) => sum + track.height + PAD, 0) + PAD;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    const palette = {};
    const ink = name => (palette[name] ??= color(name));
    drawAxis(ink, height);
    let top = AXIS;
    let drawn = 0;
    for (const track of tracks) {
      track.top = top;
      context.fillStyle = ink("text");
      context.textAlign = "right";
      context.fillText(track.name, left - 8, top + track.height / 2, left - 12);
      context.textAlign = "left";
      context.save();
      context.beginPath();
      context.rect(left, top - 1, width, track.height + 2);
      context.clip();
      if (track.under) drawSpans(track.under, top, ink, 0.3);
      drawn += track.kind === "spans" ? drawSpans(track, top, ink) : drawFill(track, top, ink);
      context.restore();
      top += track.height + PAD;
    }
    if (selection) {
      context.fillStyle = ink("text");
      context.globalAlpha = 0.15;
      const [from, to] = selection.map(toX);
      context.fillRect(Math.min(from, to), 0, Math.abs(to - from), height);
      context.globalAlpha = 1;
    }
    canvas.dataset.drawn = drawn;
  }

  function drawAxis(ink, height) {
    const rough = (view[1] - view[0]) / (width / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const unit = [1, 2, 5, 10].map(factor => factor * power).find(step => step >= rough);
    context.textAlign = "center";
    for (let t = Math.ceil(view[0] / unit) * unit; t <= view[1]; t += unit) {
      context.fillStyle = ink("line");
      context.fillRect(toX(t), AXIS - 6, 1, height - AXIS);
      context.fillStyle = ink("faint");
      if (toX(t) < left + width - 20) context.fillText(time(t), toX(t), AXIS / 2 - 2);
    }
    for (const step of data.steps) {
      context.fillStyle = ink("text");
      for (const edge of step.span) if (edge >= view[0] && edge <= view[1]) context.fillRect(toX(edge), AXIS - 8, 1, height - AXIS);
    }
    context.textAlign = "left";
  }

  // Spans narrower than a pixel are gathered per column and drawn as strongly as they fill it.
  function drawSpans(track, top, ink, strength = 1) {
    const columns = new Map();
    const last = after(track.begin, view[1]);
    let drawn = 0;
    for (let i = after(track.reach, view[0]); i < last; i++) {
      if (track.end[i] < view[0]) continue;
      drawn++;
      const from = Math.max(toX(track.begin[i]), left);
      const to = Math.min(toX(track.end[i]), left + width);
      if (to - from < 1) {
        const column = Math.floor(from);
        const there = columns.get(column);
        if (there) there.cover += to - from;
        else columns.set(column, { cover: to - from, paint: track.paint(i) });
        continue;
      }
      context.globalAlpha = strength;
      context.fillStyle = ink(track.paint(i));
      context.fillRect(from, top, to - from - (to - from > 3 ? 0.6 : 0), track.height);
      if (to - from > 46) label(track.label(i), from + 4, top + track.height / 2, to - from - 8, ink(track.paint(i)));
    }
    for (const [column, { cover, paint }] of columns) {
      context.globalAlpha = strength * Math.min(1, 0.25 + cover);
      context.fillStyle = ink(paint);
      context.fillRect(column, top, 1, track.height);
    }
    context.globalAlpha = 1;
    return drawn;
  }

  // Black or white, whichever reads better on `ground`.
  function onTop(ground) {
    const [red, green, blue] = [1, 3, 5].map(place => parseInt(ground.slice(place, place + 2), 16));
    return 0.299 * red + 0.587 * green + 0.114 * blue > 125 ? "#000000" : "#ffffff";
  }

  function label(text, x, y, room, ground) {
    let shown = text;
    if (context.measureText(shown).width > room) {
      const keep = Math.floor(shown.length * room / context.measureText(shown).width) - 1;
      if (keep < 4) return;
      shown = `${shown.slice(0, keep)}\u2026`;
    }
    context.fillStyle = onTop(ground);
    context.fillText(shown, x, y);
  }

  function drawFill(track, top, ink) {
    const times = data.fills.time, values = data.fills[track.tier];
    const most = values.reduce((high, value) => Math.max(high, value), 1);
    const scale = track.budget <= 4 * most ? track.budget : most;  // a budget far above would flatten it
    const y = value => top + track.height - value / scale * (track.height - 4);
    context.fillStyle = ink(track.tier);
    let i = Math.max(0, after(times, view[0]) - 1);
    for (let x = left; x < left + width; x++) {
      const until = toTime(x + 1);
      let high = values[i] ?? 0;
      while (i + 1 < times.length && times[i + 1] <= until) high = Math.max(high, values[++i]);
      if (times[0] <= until) context.fillRect(x, y(high), 1, top + track.height - y(high));
    }
    if (track.tier === "device") drawLimit(times, y, ink);
    if (scale === track.budget) {
      context.fillStyle = ink("budget");
      context.fillRect(left, y(scale) - 1, width, 1.5);
    }
    const text = scale === track.budget ? `budget ${bytes(track.budget)}` : `peak ${bytes(most)} of ${bytes(track.budget)}`;
    plate(text, left + width - context.measureText(text).width - 8, y(scale) + 10, ink);
    return 1;
  }

  // A dotted line: how much of DEVICE model data may take in each period.
  function drawLimit(times, y, ink) {
    context.fillStyle = ink("text");
    for (let x = left; x < left + width; x += 4) {
      const i = after(times, toTime(x)) - 1;
      if (i >= 0) context.fillRect(x, y(data.fills.limit[i]) - 1, 2, 1.5);
    }
  }

  function plate(text, x, y, ink) {
    context.fillStyle = ink("ground");
    context.globalAlpha = 0.75;
    context.fillRect(x - 3, y - 8, context.measureText(text).width + 6, 16);
    context.globalAlpha = 1;
    context.fillStyle = ink("text");
    context.fillText(text, x, y);
  }

  // ---- hovering
  function describe(x, y) {
    const track = tracks.find(one => y >= one.top && y <= one.top + one.height);
    if (!track || x < left || x > left + width) return null;
    const t = toTime(x), slack = (view[1] - view[0]) / width * 2;
    if (track.kind === "fill") {
      const i = after(data.fills.time, t) - 1;
      const held = i < 0 ? 0 : data.fills[track.tier][i];
      const limit = track.tier === "device" && i >= 0 ? `\nmodel data may take ${bytes(data.fills.limit[i])} now` : "";
      return `${track.tier.toUpperCase()} holds ${bytes(held)} of ${bytes(track.budget)}${limit}\nat ${time(t)}`;
    }
    for (let i = after(track.begin, t + slack) - 1; i >= 0 && track.reach[i] >= t - slack; i--) {
      if (track.end[i] >= t - slack) return `${track.detail(i)}\nat ${time(track.begin[i])}`;
    }
    return track.name === "computing" ? `between operators\nat ${time(t)}` : null;
  }

  function showTip() {
    const text = pointer && !selection ? describe(pointer.x, pointer.y) : null;
    tip.hidden = text === null;
    if (text === null) return;
    tip.textContent = text;
    const room = canvas.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(4, Math.min(pointer.x + 14, room))}px`;
    const below = pointer.y + 16;
    tip.style.top = `${below + tip.offsetHeight > canvas.clientHeight ? Math.max(4, pointer.y - tip.offsetHeight - 10) : below}px`;
  }

  // ---- going around
  function redraw() {
    if (!scheduled) { scheduled = true; requestAnimationFrame(draw); }
  }

  function look(from, to) {
    const span = Math.min(Math.max(to - from, MIN_SPAN), WHOLE[1]);
    const begin = Math.min(Math.max(from, 0), WHOLE[1] - span);
    view = [begin, begin + span];
    canvas.dataset.view = view.map(Math.round).join(" ");
    for (const button of document.querySelectorAll("#steps button")) {
      button.setAttribute("aria-pressed", String(button.dataset.view === view.join(" ")));
    }
    redraw();
  }

  function zoom(factor, around = (view[0] + view[1]) / 2) {
    look(around - (around - view[0]) * factor, around + (view[1] - around) * factor);
  }

  const pan = share => look(view[0] + share * (view[1] - view[0]), view[1] + share * (view[1] - view[0]));
  const place = event => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };

  canvas.addEventListener("pointerdown", event => {
    const t = toTime(place(event).x);
    selection = [t, t];
  });
  canvas.addEventListener("pointermove", event => {
    pointer = place(event);
    if (selection) { selection[1] = toTime(pointer.x); redraw(); }
    showTip();
  });
  window.addEventListener("pointerup", () => {
    if (!selection) return;
    const [from, to] = [Math.min(...selection), Math.max(...selection)];
    selection = null;
    if (toX(to) - toX(from) > 5) look(from, to);
    redraw();
  });
  canvas.addEventListener("pointerleave", () => { pointer = null; showTip(); });
  canvas.addEventListener("dblclick", () => look(...WHOLE));
  canvas.addEventListener("wheel", event => {
    if (event.ctrlKey || event.metaKey) zoom(event.deltaY > 0 ? 1.25 : 0.8, toTime(place(event).x));
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / width);
    else return;
    event.preventDefault();
  }, { passive: false });
  const keys = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": () => look(...WHOLE),
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2) };
  canvas.addEventListener("keydown", event => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    keys[event.key]();
    event.preventDefault();
  });
  document.getElementById("closer").onclick = keys["+"];
  document.getElementById("wider").onclick = keys["-"];

  const choices = data.steps.map(step => [`step ${step.number}`, step.span]);
  for (const [name, span] of [...choices, ["all", WHOLE]]) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    const seen = [Math.max(0, span[0]), Math.min(WHOLE[1], span[1])];
    button.dataset.view = seen.join(" ");
    button.onclick = () => look(...seen);
    document.getElementById("steps").append(button);
  }
  new ResizeObserver(redraw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  look(...(choices.length ? choices[choices.length >> 1][1] : WHOLE));
  draw();
})();
