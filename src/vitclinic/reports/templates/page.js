"use strict";
(() => {
  const root = document.documentElement;
  const element = (id) => document.getElementById(id);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const templates = JSON.parse(element("templates").textContent);

  // ---- what the page carries, unpacked once ----
  const unpacked = new Map();
  const unpack = (name) => {
    if (!unpacked.has(name)) unpacked.set(name, inflate(element(`packed-${name}`).textContent));
    return unpacked.get(name);
  };
  const inflate = async (base64) => {
    const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  let loading = null;
  const plotly = () => {
    loading ??= unpack("plotly").then((program) => {
      const script = document.createElement("script");
      script.textContent = program;
      document.head.append(script);
      return window.Plotly;
    });
    return loading;
  };

  // ---- theme: the system's, until somebody chooses ----
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  let printing = false;
  const theme = () => (printing ? "light" : chosen ?? (dark.matches ? "dark" : "light"));
  const showTheme = () => {
    root.dataset.theme = theme();
    element("theme").setAttribute("aria-pressed", String(theme() === "dark"));
    for (const plot of visible) refresh(plot);
  };

  // ---- figures: drawn when they come into view ----
  const figures = new Map(); // name -> {data, layout}, once unpacked
  const visible = new Set();
  const plots = all(".plot");
  const options = { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset" };
  const touch = window.matchMedia("(pointer: coarse)").matches;

  const layoutOf = (name) => {
    const layout = structuredClone(figures.get(name).layout);
    if (touch) layout.dragmode ??= false;
    return { uirevision: "kept", ...layout, autosize: true, width: undefined, template: templates[theme()] };
  };
  const columnsOf = (layout) => {
    const starts = Object.entries(layout).filter(([key]) => /^(xaxis|scene|polar)\d*$/.test(key))
      .map(([, axis]) => Math.round(20 * ((axis.domain?.x ?? axis.domain)?.[0] ?? 0)));
    return new Set(starts).size || 1;
  };
  const drawNow = (plot) => {
    const { figure } = plot.dataset;
    const layout = layoutOf(figure);
    const columns = columnsOf(layout);
    if (columns > 1) plot.style.minWidth = `${columns * 230}px`;
    plot.dataset.theme = theme();
    plot.dataset.state = "drawing";
    const act = plot.classList.contains("js-plotly-plot") ? window.Plotly.react : window.Plotly.newPlot;
    const drawing = act(plot, structuredClone(figures.get(figure).data), layout, options);
    return drawing.then(() => {
      if ("peeks" in plot.dataset && act === window.Plotly.newPlot) watchPointer(plot);
      plot.dataset.state = "drawn";
    });
  };
  const ready = async (plot) => {
    const { figure } = plot.dataset;
    const [text] = await Promise.all([unpack(`plot-${figure}`), plotly()]);
    if (!figures.has(figure)) figures.set(figure, JSON.parse(text));
  };
  const refresh = async (plot) => {
    try {
      await ready(plot);
      if (plot.dataset.theme !== theme()) await drawNow(plot);
    } catch (error) {
      plot.dataset.state = "failed";
      plot.classList.add("failed");
      plot.textContent = "This figure could not be drawn; its numbers are below.";
      console.error(error);
    }
  };
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) visible.add(target);
      else visible.delete(target);
      if (isIntersecting) refresh(target);
    }
  }, { rootMargin: "400px 0px" });

  // ---- albums: each image is in the page once, however many rows show it ----
  const albums = new Map(); // name -> addresses, once unpacked
  const imagesOf = async (name) => {
    if (!albums.has(name)) albums.set(name, JSON.parse(await unpack(`album-${name}`)));
    return albums.get(name);
  };
  const showAlbum = async (album) => {
    const places = album.querySelectorAll("img[data-picture]:not([src])");
    if (!places.length) return;
    const images = await imagesOf(album.dataset.album);
    for (const place of places) place.src = images[place.dataset.picture];
  };
  // ---- the image under the pointer, of plots whose points have their number in the album as customdata ----
  const peek = Object.assign(document.createElement("img"), { className: "peek", hidden: true, alt: "" });
  const showPeek = async (plot, { event, points: [{ customdata: number }] }) => {
    if (number === null || number === undefined) return;
    peek.dataset.wanted = number;
    const images = await imagesOf(plot.dataset.figure);
    if (peek.dataset.wanted !== String(number)) return; // the pointer has moved on
    peek.src = images[number];
    await peek.decode();
    if (peek.dataset.wanted !== String(number)) return;
    peek.classList.toggle("tiny", peek.naturalWidth < 40);
    peek.hidden = false;
    const { width, height } = peek.getBoundingClientRect();
    const left = Math.min(Math.max(event.clientX - width / 2, 4), root.clientWidth - width - 4);
    const above = event.clientY - height - 24;
    Object.assign(peek.style, { left: `${left}px`, top: `${above > 4 ? above : event.clientY + 24}px` });
  };
  const hidePeek = () => {
    delete peek.dataset.wanted;
    peek.hidden = true;
  };
  const watchPointer = (plot) => {
    document.body.append(peek);
    plot.on("plotly_hover", (hovered) => showPeek(plot, hovered));
    plot.on("plotly_click", (tapped) => showPeek(plot, tapped)); // a finger does not hover
    plot.on("plotly_unhover", hidePeek);
    for (const what of ["scroll", "pointerdown"]) window.addEventListener(what, hidePeek, { passive: true });
  };
  const showAlbums = () => Promise.all(all(".album").map(showAlbum));

  // ---- numbers ----
  const rowsOf = (csv) => {
    const rows = [[]];
    for (const [, quoted, bare, end] of csv.matchAll(/(?:"((?:[^"]|"")*)"|([^",\r\n]*))(,|\r\n|$)/g)) {
      rows.at(-1).push(quoted === undefined ? bare : quoted.replaceAll('""', '"'));
      if (end === "\r\n") rows.push([]);
      if (end === "") break;
    }
    rows.pop(); // behind the last line's end
    return rows;
  };
  const SHOWN = 500;
  const showTable = async (details) => {
    const box = details.querySelector(".scroll");
    if (!details.open || box.childElementCount) return;
    const [head, ...rows] = rowsOf(await unpack(`csv-${details.dataset.figure}`));
    const table = document.createElement("table");
    const line = (parent, tag, cells) => {
      const row = parent.insertRow();
      for (const text of cells) row.append(Object.assign(document.createElement(tag), { textContent: text }));
    };
    line(table.createTHead(), "th", head);
    const body = table.createTBody();
    for (const cells of rows.slice(0, SHOWN)) line(body, "td", cells);
    box.replaceChildren(table);
    if (rows.length > SHOWN) box.append(`The first ${SHOWN} rows; the CSV has all ${rows.length}.`);
  };

  // ---- saving ----
  const download = (address, name) => Object.assign(document.createElement("a"), { href: address, download: name }).click();
  const saveCsv = async (name) => {
    const address = URL.createObjectURL(new Blob([await unpack(`csv-${name}`)], { type: "text/csv;charset=utf-8" }));
    download(address, `${name}.csv`);
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  };
  const saveImage = async (name, format) => {
    const plot = document.querySelector(`.plot[data-figure="${name}"]`);
    await refresh(plot);
    const paper = getComputedStyle(root).getPropertyValue("--card").trim();
    const { clientWidth: width, clientHeight: height } = plot;
    const text = plot.dataset.title.replace(/[&<>$%]/g, (found) => `&#${found.codePointAt(0)};`);
    const layout = { ...plot.layout, paper_bgcolor: paper, width, height: height + 36, autosize: false };
    layout.margin = { ...layout.margin, t: (layout.margin?.t ?? 40) + 36 };
    layout.title = { text, x: 0.01, xanchor: "left", y: 1, yanchor: "top", pad: { t: 12 }, font: { size: 16 } };
    const size = { format, width, height: height + 36, scale: 2 };
    download(await window.Plotly.toImage({ data: plot.data, layout, config: options }, size), `${name}.${format}`);
  };

  // ---- sections ----
  const folds = () => all("details.probe");
  const showFold = () => {
    if (!element("fold")) return;
    const open = folds().some((details) => details.open);
    element("fold").textContent = open ? "Close all" : "Open all";
    element("fold").setAttribute("aria-expanded", String(open));
  };
  const reveal = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    if (target) target.scrollIntoView();
  };

  // ---- printing: everything open, drawn, light, and as wide as paper ----
  const PAPER = 680;
  let before = [];
  const toPaper = () => {
    if (printing) return;
    printing = true;
    root.dataset.theme = "light";
    before = all("main details:not(.table, .aside)").map((details) => [details, details.open]);
    for (const [details] of before) details.open = true;
    for (const plot of plots.filter(({ dataset }) => figures.has(dataset.figure) && window.Plotly)) {
      drawNow(plot);
      window.Plotly.relayout(plot, { width: PAPER, autosize: false });
    }
  };
  const toScreen = () => {
    if (!printing) return;
    printing = false;
    for (const [details, open] of before) details.open = open;
    for (const plot of plots) delete plot.dataset.theme;
    showTheme();
  };
  const print = async () => {
    await Promise.all([showAlbums(), ...plots.map(ready)]);
    window.print();
  };

  // ---- wiring ----
  const start = () => {
    root.dataset.theme = theme();
    element("theme").setAttribute("aria-pressed", String(theme() === "dark"));
    dark.addEventListener("change", showTheme);
    element("theme").addEventListener("click", () => {
      chosen = theme() === "dark" ? "light" : "dark";
      showTheme();
    });
    element("fold")?.addEventListener("click", () => {
      const open = folds().some((details) => details.open);
      for (const details of folds()) details.open = !open;
      showFold(); // at once: toggle events come later
    });
    for (const details of folds()) details.addEventListener("toggle", showFold);
    window.addEventListener("hashchange", reveal);
    document.addEventListener("click", ({ target }) => { // the same link again changes no hash
      const link = target.closest("a[href^='#']");
      if (link && link.hash === location.hash) reveal();
    });
    if (window.innerWidth < 980) document.querySelector(".contents details").open = false;
    reveal();
    showFold();
    if (!("DecompressionStream" in window)) {
      element("too-old").hidden = false;
      return;
    }
    element("print").addEventListener("click", print);
    window.addEventListener("beforeprint", toPaper);
    window.addEventListener("afterprint", toScreen);
    for (const details of all("details.table")) details.addEventListener("toggle", () => showTable(details));
    for (const button of all("button[data-save]")) {
      const { save, figure } = button.dataset;
      button.addEventListener("click", () => (save === "csv" ? saveCsv(figure) : saveImage(figure, save)));
    }
    for (const plot of plots) watch.observe(plot);
    const idle = window.requestIdleCallback ?? ((act) => setTimeout(act, 500));
    idle(() => plots.reduce((earlier, plot) => earlier.then(() => ready(plot)), showAlbums()));
  };
  start();
})();
