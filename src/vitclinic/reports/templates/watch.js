"use strict";
(() => {
  const EVERY = 2000; // milliseconds between looks
  const MOST = 8; // runs that are shown at a time: as many as there are colours
  const AXES = 9; // of the parallel coordinates, with the result
  const root = document.documentElement;
  const element = (id) => document.getElementById(id);
  const templates = JSON.parse(element("templates").textContent);
  const colours = templates.light.layout.colorway;
  const make = (tag, text, attributes = {}) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  // plotly's labels are a kind of HTML, with templates
  const label = (text) => String(text).replace(/[&<>$%{}]/g, (found) => `&#${found.codePointAt(0)};`);

  let runs = [];
  let columns = [];
  let chosen = null; // ids, once somebody has chosen; until then those that run, or ran last
  let sorting = { column: "started", down: true };
  const curves = new Map(); // id -> {version, panels}
  const slots = []; // ids by colour, so that a run keeps its colour

  // ---- how values are written ----
  const duration = (seconds) => {
    if (seconds === null || !Number.isFinite(seconds)) return "";
    const units = [[86400, "days"], [3600, "h"], [60, "min"]].find(([size]) => seconds >= 1.5 * size);
    return units ? `${(seconds / units[0]).toFixed(1)} ${units[1]}` : `${Math.max(1, Math.round(seconds))} s`;
  };
  const written = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value !== "number" || Number.isInteger(value)) return String(value);
    return String(Number(value.toPrecision(4)));
  };
  const local = (text) => { // a time of a run, which is in UTC, as the clock of the page has it
    const at = new Date(text);
    return Number.isNaN(at.getTime()) ? text : at.toLocaleString("sv-SE");
  };
  const state = (run) => {
    if (run.status !== "running") return run.status;
    return run.silent > 300 ? `running, silent for ${duration(run.silent)}` : "running";
  };

  // ---- which runs are shown ----
  const shown = () => {
    const known = new Set(runs.map(({ id }) => id));
    const latest = [...runs].sort((a, b) => b.started.localeCompare(a.started));
    const running = latest.filter(({ status }) => status === "running");
    const wanted = chosen ?? (running.length ? running : latest).slice(0, 4).map(({ id }) => id);
    const now = [...wanted].filter((id) => known.has(id)).slice(0, MOST);
    slots.forEach((id, place) => { if (!now.includes(id)) slots[place] = null; });
    for (const id of now) {
      if (slots.includes(id)) continue;
      const free = slots.indexOf(null);
      slots[free < 0 ? slots.length : free] = id;
    }
    return now.map((id) => runs.find((run) => run.id === id));
  };
  const colour = (id) => colours[slots.indexOf(id) % colours.length];
  const choose = (id, on) => {
    const now = new Set(shown().map((run) => run.id));
    if (on) now.add(id); else now.delete(id);
    chosen = [...now].slice(-MOST);
    show();
    look();
  };

  // ---- cards ----
  const showCards = (list) => {
    const box = element("cards");
    const cards = list.map((run) => {
      const card = box.querySelector(`[data-run="${run.id}"]`) ?? make("article", undefined, { class: "card network", "data-run": run.id });
      const title = make("h3");
      title.append(make("span", "", { class: "chip", style: `background:${colour(run.id)}`, "aria-hidden": "true" }), ` ${run.name}`);
      const parts = [title];
      const kind = run.status === "finished" ? "healthy" : ["diverged", "failed", "unknown"].includes(run.status) ? "problem" : "plain";
      const line = make("p");
      line.append(make("span", state(run), { class: `severity ${kind}` }));
      if (run.seconds_left !== null && run.silent <= 300) line.append(` ${duration(run.seconds_left)} left`);
      parts.push(line);
      if (run.total_steps) parts.push(make("progress", undefined, { max: run.total_steps, value: Math.min(run.step, run.total_steps), "aria-label": `progress of ${run.name}` }));
      const facts = [`step ${run.step.toLocaleString("en")}${run.total_steps ? ` of ${run.total_steps.toLocaleString("en")}` : ""}`];
      if (run.epoch !== null) facts.push(`epoch ${run.epoch}`);
      if (run.images_per_second !== null && run.status === "running") facts.push(`${Math.round(run.images_per_second).toLocaleString("en")} images/s`);
      parts.push(make("p", facts.join(", ")));
      const scores = Object.entries(run.scores).map(([name, value]) => `${name} ${written(value)}`);
      if (scores.length) parts.push(make("p", scores.join(", ")));
      if (run.reason) parts.push(make("p", run.reason, { class: "why" }));
      if (run.samples) {
        const address = `/runs/${run.id}/samples.png?${run.samples}`;
        const old = card.querySelector("img");
        parts.push(old?.getAttribute("src") === address ? old
          : make("img", undefined, { src: address, alt: `Training images of ${run.name}, as the network sees them` }));
      }
      card.replaceChildren(...parts);
      return card;
    });
    box.replaceChildren(...(cards.length ? cards : [make("p", "No runs here yet; this page shows them when they start.", { class: "none" })]));
  };

  // ---- curves ----
  const theme = () => root.dataset.theme;
  const options = { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset" };
  const draw = (plot, data, layout) =>
    window.Plotly.react(plot, data, { uirevision: "kept", autosize: true, ...layout, template: templates[theme()] }, options);
  const faded = (hex, share) => `rgba(${[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",")},${share})`;
  const traces = (run, kinds) => Object.entries(kinds).flatMap(([kind, curve]) => {
    const tone = colour(run.id);
    const common = { x: curve.step, y: curve.mean, name: label(`${run.name} (${kind})`), legendgroup: run.id, showlegend: false };
    const hover = `step %{x}: %{y:.4g}<extra>${label(run.name)}, ${kind}</extra>`;
    if (kind !== "train") return [{ ...common, mode: "lines+markers", line: { color: tone, width: 1, dash: "dot" }, marker: { color: tone, size: 6 }, hovertemplate: hover }];
    const band = { x: [...curve.step, ...[...curve.step].reverse()], y: [...curve.high, ...[...curve.low].reverse()], fill: "toself", fillcolor: faded(tone, 0.15), line: { width: 0 }, mode: "lines", hoverinfo: "skip", showlegend: false };
    return [band, { ...common, mode: curve.step.length > 1 ? "lines" : "markers", line: { color: tone, width: 2 }, hovertemplate: hover }];
  });
  const decades = (list, panel) => { // that the values span; NaN if some are not above 0
    const kinds = list.flatMap((run) => Object.values(curves.get(run.id)?.panels[panel] ?? {}));
    const values = kinds.flatMap(({ low, high }) => [...low, ...high]).filter((value) => value !== null);
    return Math.log10(Math.max(...values)) - Math.log10(Math.min(...values));
  };
  // Ticks in full. Plotly would write 2 and 5 between powers of ten; of few decades it would label all nine digits, one
  // over another; and within one decade an ordinary axis reads better. A loss that diverged would flatten all others.
  const axisOf = (list, panel) => {
    const diverged = panel === "loss" && Number.isFinite(decades(list, panel)) && decades(list, panel) >= 4;
    if (panel !== "gradient norm" && !diverged) return { type: "linear", rangemode: panel === "learning rate" ? "tozero" : "normal" };
    const span = decades(list, panel);
    if (!Number.isFinite(span) || (span > 0 && span < 1)) return { type: "linear", rangemode: "normal" };
    return { type: "log", tickformat: "~g", ...(span < 2 ? { dtick: "D2" } : {}) };
  };
  const showCurves = (list) => {
    const box = element("curves");
    const names = new Set(list.flatMap((run) => Object.entries(curves.get(run.id)?.panels ?? {}).filter(([, kinds]) => Object.keys(kinds).length).map(([name]) => name)));
    const order = ["gradient norm", "learning rate"];
    const panels = [...names].sort((a, b) => order.indexOf(a) - order.indexOf(b));
    const kept = new Map([...box.querySelectorAll("figure")].map((figure) => [figure.dataset.panel, figure]));
    const figures = panels.map((panel) => {
      const figure = kept.get(panel) ?? make("figure", undefined, { "data-panel": panel });
      if (!kept.has(panel)) figure.append(make("figcaption", panel), make("div", undefined, { class: "plot", role: "img" }));
      return figure;
    });
    if (figures.length !== kept.size || panels.some((panel) => !kept.has(panel))) box.replaceChildren(...figures);
    for (const figure of figures) {
      const { panel } = figure.dataset;
      const plot = figure.querySelector(".plot");
      const data = list.flatMap((run) => traces(run, curves.get(run.id)?.panels[panel] ?? {}));
      const last = list.map((run) => [run.name, Object.values(curves.get(run.id)?.panels[panel] ?? {})[0]])
        .filter(([, curve]) => curve).map(([name, curve]) => `${name} ${written(curve.mean.at(-1))} at step ${curve.step.at(-1)}`);
      plot.setAttribute("aria-label", `${panel} over steps; last: ${last.join("; ")}`);
      const yaxis = axisOf(list, panel);
      draw(plot, data, { margin: { l: 52, r: 10, t: 10, b: 40 }, xaxis: { title: { text: "step" } }, yaxis, hovermode: "closest" });
    }
    if (!figures.length && !box.childElementCount) box.append(make("p", "Nothing to draw yet.", { class: "none" }));
  };

  // ---- the table ----
  const FIXED = {
    run: (run) => run.name, status: state, started: (run) => local(run.started),
    step: (run) => run.step, "time left": (run) => run.seconds_left,
  };
  const valueOf = (run, column) => {
    if (column in FIXED) return FIXED[column](run);
    return run.scores[column] ?? run.keys[column] ?? null;
  };
  const cell = (run, column) => {
    if (column === "time left") return duration(run.seconds_left);
    if (column === "step") return run.total_steps ? `${run.step} / ${run.total_steps}` : String(run.step);
    return written(valueOf(run, column));
  };
  const passes = (run, text) => text.trim().split(/\s+/).filter(Boolean).every((word) => {
    const test = /^([^<>=]+)(<=|>=|<|>|=)(.+)$/.exec(word);
    const column = test && (columns.find((name) => name.toLowerCase() === test[1].toLowerCase())
      ?? columns.find((name) => name.toLowerCase().split(/[ .]/).includes(test[1].toLowerCase())));
    if (!column) return columns.some((name) => cell(run, name).toLowerCase().includes(word.toLowerCase()));
    const value = valueOf(run, column);
    if (test[2] === "=") return String(value) === test[3] || (typeof value === "number" && value === Number(test[3]));
    if (typeof value !== "number") return false;
    const other = Number(test[3]);
    return { "<": value < other, ">": value > other, "<=": value <= other, ">=": value >= other }[test[2]];
  });
  const compare = (a, b) => {
    const [x, y] = [valueOf(a, sorting.column), valueOf(b, sorting.column)];
    const lost = (value) => value === null || value === undefined || value === "";
    if (lost(x) || lost(y)) return lost(x) - lost(y) || a.name.localeCompare(b.name); // what is missing comes last
    const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return (sorting.down ? -order : order) || a.name.localeCompare(b.name);
  };
  const showHead = () => {
    const head = element("table").tHead;
    const names = columns.join("\n");
    if (head.dataset.names !== names) {
      head.dataset.names = names;
      const line = make("tr");
      for (const column of columns) {
        const button = make("button", column, { type: "button" });
        button.addEventListener("click", () => {
          sorting = { column, down: sorting.column === column ? !sorting.down : runs.some((run) => typeof valueOf(run, column) === "number") };
          show();
        });
        const th = make("th", undefined, { scope: "col", "data-column": column });
        th.append(button);
        line.append(th);
      }
      head.replaceChildren(line);
    }
    for (const th of head.querySelectorAll("th")) {
      const mine = th.dataset.column === sorting.column;
      if (mine) th.setAttribute("aria-sort", sorting.down ? "descending" : "ascending"); else th.removeAttribute("aria-sort");
      th.querySelector("button").textContent = th.dataset.column + (mine ? (sorting.down ? " ↓" : " ↑") : "");
    }
  };
  const rows = new Map();
  const showTable = (list, visible) => {
    const ids = new Set(list.map(({ id }) => id));
    const body = element("table").tBodies[0];
    const lines = visible.map((run) => {
      const line = rows.get(run.id) ?? make("tr");
      if (!rows.has(run.id)) {
        rows.set(run.id, line);
        const box = make("input", undefined, { type: "checkbox" });
        box.addEventListener("change", () => choose(run.id, box.checked));
        const name = make("label");
        name.append(box, make("span"));
        const th = make("th", undefined, { scope: "row" });
        th.append(name);
        line.append(th);
      }
      const box = line.querySelector("input");
      box.checked = ids.has(run.id);
      box.setAttribute("aria-label", `show ${run.name}`);
      line.querySelector("label span").textContent = run.name;
      line.firstChild.title = run.name;
      while (line.cells.length < columns.length) line.append(make("td"));
      while (line.cells.length > columns.length) line.lastChild.remove();
      columns.slice(1).forEach((column, place) => {
        const text = cell(run, column);
        const td = line.cells[place + 1];
        if (td.textContent !== text) Object.assign(td, { textContent: text, title: text });
      });
      return line;
    });
    const same = lines.length === body.rows.length && lines.every((line, place) => body.rows[place] === line);
    if (!same) {
      const active = document.activeElement;
      body.replaceChildren(...lines);
      if (active && body.contains(active)) active.focus();
    }
    const count = `${visible.length === runs.length ? "" : `${visible.length} of `}${runs.length} run${runs.length === 1 ? "" : "s"}`;
    if (element("count").textContent !== count) element("count").textContent = count; // read aloud when it is written
  };

  // ---- parallel coordinates ----
  const isMissing = (value) => value === null || value === undefined;
  const scaleOf = (values) => { // what a recipe does not say stands below all values
    const known = values.filter((value) => !isMissing(value));
    const { place, ticks } = scaleOfKnown(known);
    if (known.length === values.length) return { place, ticks };
    const lift = (at) => 0.16 + 0.84 * at;
    return { place: (value) => (isMissing(value) ? 0 : lift(place(value))), ticks: [[0, "not set"], ...ticks.map(([at, text]) => [lift(at), text])] };
  };
  const scaleOfKnown = (known) => {
    if (known.length && known.every((value) => typeof value === "number")) {
      const [low, high] = [Math.min(...known), Math.max(...known)];
      const log = low > 0 && high / low > 50;
      const way = (value) => (log ? Math.log(value) : value);
      const place = (value) => (high > low ? (way(value) - way(low)) / (way(high) - way(low)) : 0.5);
      const distinct = [...new Set(known)].sort((a, b) => a - b);
      const middle = log ? Math.sqrt(low * high) : (low + high) / 2;
      return { place, ticks: (distinct.length <= 4 ? distinct : [low, middle, high]).map((value) => [place(value), written(value)]) };
    }
    const distinct = [...new Set(known.map(String))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const place = (value) => (distinct.length > 1 ? distinct.indexOf(String(value)) / (distinct.length - 1) : 0.5);
    const step = Math.ceil(distinct.length / 8);
    return { place, ticks: distinct.filter((_, at) => at % step === 0).map((value) => [place(value), value.length > 18 ? `${value.slice(0, 17)}…` : value]) };
  };
  const showParallel = (visible) => {
    const results = columns.filter((column) => runs.some((run) => column in run.scores));
    const menu = element("result");
    if (menu.dataset.names !== results.join("\n")) {
      const before = menu.value;
      menu.dataset.names = results.join("\n");
      menu.replaceChildren(...results.map((name) => make("option", name, { value: name })));
      const having = (name) => runs.filter((run) => name in run.scores).length;
      const usual = [2, 1].flatMap((least) => ["test accuracy", "val accuracy"].filter((name) => having(name) >= least))[0];
      menu.value = results.includes(before) ? before : usual ?? results.find((name) => !name.startsWith("train")) ?? results[0];
    }
    const result = menu.value;
    const drawn = visible.filter((run) => result in run.scores).slice(0, 300);
    const differ = (column) => new Set(drawn.map((run) => JSON.stringify(run.keys[column] ?? null))).size > 1;
    const keys = columns.filter(differ).slice(0, AXES - 1);
    const enough = drawn.length > 1 && keys.length > 0;
    element("parallel").hidden = !enough;
    element("no-parallel").hidden = enough;
    element("no-parallel").textContent = "This needs two runs with a result whose recipes differ.";
    if (!enough) return;
    const axes = [...keys, result];
    const scales = axes.map((axis) => scaleOf(drawn.map((run) => valueOf(run, axis))));
    const ids = shown().map(({ id }) => id);
    const data = drawn.map((run) => {
      const value = scales.at(-1).place(run.scores[result]);
      const mine = ids.includes(run.id);
      return {
        x: axes.map((_, at) => at), y: axes.map((axis, at) => scales[at].place(valueOf(run, axis))),
        mode: "lines+markers", showlegend: false, opacity: mine ? 1 : 0.55, marker: { size: 5 },
        line: { width: mine ? 3.5 : 1.5, color: mine ? colour(run.id) : `hsl(${215 - 175 * value}, 65%, 50%)` },
        text: axes.map((axis) => label(`${axis} ${isMissing(valueOf(run, axis)) ? "not set" : written(valueOf(run, axis))}`)), hovertemplate: `%{text}<extra>${label(run.name)}</extra>`,
      };
    });
    const annotations = axes.flatMap((axis, at) => [
      { x: at, y: 1.13, text: `<b>${label(axis.length > 18 ? `…${axis.slice(-17)}` : axis)}</b>`, showarrow: false, font: { size: 11 } },
      ...scales[at].ticks.map(([y, text]) => ({ x: at, y, text: label(text), showarrow: false, font: { size: 10 }, xanchor: at === axes.length - 1 ? "right" : "left", xshift: at === axes.length - 1 ? -6 : 6, yshift: 7 })),
    ]);
    const plot = element("parallel");
    plot.style.minWidth = `${axes.length * 120}px`;
    plot.setAttribute("aria-label", `Parallel coordinates of ${drawn.length} runs: ${axes.join(", ")}`);
    draw(plot, data, {
      annotations, hovermode: "closest", margin: { l: 60, r: 60, t: 16, b: 16 },
      shapes: axes.map((_, at) => ({ type: "line", x0: at, x1: at, y0: 0, y1: 1 })),
      xaxis: { visible: false, range: [-0.15, axes.length - 0.85], fixedrange: true }, yaxis: { visible: false, range: [-0.06, 1.2], fixedrange: true },
    });
  };

  // ---- everything ----
  const show = () => {
    const names = (part) => [...new Set(runs.flatMap((run) => Object.keys(run[part])))];
    const rank = (name) => ["test", "val", "train"].indexOf(name.split(" ")[0]);
    columns = [...Object.keys(FIXED), ...names("scores").sort((a, b) => rank(a) - rank(b) || a.localeCompare(b)), ...names("keys")];
    const list = shown();
    const visible = runs.filter((run) => passes(run, element("filter").value)).sort(compare);
    showHead();
    showCards(list);
    showCurves(list);
    showTable(list, visible);
    showParallel(visible);
  };
  const ask = async (address) => {
    const answer = await fetch(address, { cache: "no-store" });
    if (!answer.ok) throw new Error(`${address}: ${answer.status}`);
    return answer.json();
  };
  let looking = false;
  const look = async () => {
    if (looking) return;
    looking = true;
    let soon = false;
    try {
      const table = await ask("/runs");
      ({ runs } = table);
      soon = table.unread > 0;
      for (const run of shown()) {
        const known = curves.get(run.id);
        if (known && known.version === run.version && known.started === run.started) continue;
        const found = await ask(`/runs/${run.id}/curves`);
        curves.set(run.id, { version: found.whole ? run.version : -1, started: run.started, panels: found.panels });
        soon ||= !found.whole;
      }
      element("note").hidden = !table.cut;
      if (table.cut) element("note").textContent = `These are the first ${runs.length} runs; watch a folder with fewer to see others.`;
      element("pulse").textContent = `as of ${new Date().toLocaleTimeString()}`;
      show();
      root.dataset.looks = String(Number(root.dataset.looks ?? 0) + 1);
    } catch (error) {
      element("note").hidden = false;
      element("note").textContent = "The server does not answer: it was stopped, or the training that it was started with has ended. This is the last that it said.";
      console.warn(error);
    }
    looking = false;
    clearTimeout(timer);
    timer = setTimeout(look, soon ? 50 : EVERY);
  };
  let timer = null;

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let picked = null;
  const showTheme = () => {
    root.dataset.theme = picked ?? (dark.matches ? "dark" : "light");
    element("theme").setAttribute("aria-pressed", String(theme() === "dark"));
    if (runs.length) show();
  };
  dark.addEventListener("change", showTheme);
  window.addEventListener("beforeprint", () => { root.dataset.theme = "light"; if (runs.length) show(); }); // paper is
  window.addEventListener("afterprint", showTheme);
  element("theme").addEventListener("click", () => { picked = theme() === "dark" ? "light" : "dark"; showTheme(); });
  element("filter").addEventListener("input", show);
  element("result").addEventListener("change", show);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  showTheme();
  look();
})();
