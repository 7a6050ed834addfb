// The console's own script: live numbers, charts, quiet reloading, dialogs. Everything shown is set as text, never as markup.
"use strict";
(() => {
  const REFRESH_MS = 1000 * Number(document.body.dataset.refreshS || 4);
  const RETRY_MS = 3000;
  const banner = document.getElementById("banner");
  const dialog = document.getElementById("ask");
  const charts = new Map();
  const RANGES = { "15m": [900, "15 min"], "1h": [3600, "1 h"], "6h": [21600, "6 h"], "24h": [86400, "24 h"] };
  const HISTORY_MS = 15000;
  const SILENT_MS = 10000;  // the gateway sends a sample a second
  let past = {};
  let newest = null;
  let range = "1h";
  try { range = RANGES[localStorage.getItem("lakebed-range")] ? localStorage.getItem("lakebed-range") : "1h"; } catch { /* forbidden */ }

  // Numbers, written as the server writes them.
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const plain = (value) => Number(value).toLocaleString("en-US", { maximumFractionDigits: 1 });
  const forms = {
    short(value) {
      const size = Math.abs(value);
      if (size >= 1e9) return (value / 1e9).toFixed(1) + "G";
      if (size >= 1e6) return (value / 1e6).toFixed(1) + "M";
      if (size >= 1e4) return (value / 1e3).toFixed(1) + "k";
      return plain(value);
    },
    size(value) {
      let unit = 0;
      while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
      return (unit ? value.toFixed(1) : Math.round(value)) + " " + units[unit];
    },
    age(value) {
      if (value <= 0) return "0 s";
      if (value < 1) return Math.round(value * 1000) + " ms";
      if (value < 10) return value.toFixed(1) + " s";
      if (value < 120) return Math.round(value) + " s";
      if (value < 7200) return Math.round(value / 60) + " min";
      if (value < 172800) return Math.round(value / 3600) + " h";
      return Math.round(value / 86400) + " d";
    },
  };
  const lookup = (sample, key) => {
    const [kind, name] = key.split(".");
    const from = { rate: sample.rates, level: sample.levels, lake: sample.lake }[kind] || sample.totals;
    return from ? from[name] : undefined;
  };
  const show = (sample) => {
    for (const place of document.querySelectorAll("[data-live]")) {
      const value = lookup(sample, place.dataset.live);
      if (value === undefined) continue;
      place.textContent = value === null ? "–" : forms[place.dataset.form || "short"](value);
    }
    for (const edge of document.querySelectorAll("[data-moves]")) {
      edge.classList.toggle("moves", (lookup(sample, edge.dataset.moves) || 0) > 0);
    }
  };

  // On a phone the pages lie in a row that scrolls: where we are is in sight.
  document.querySelector("nav a[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

  // Charts.
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const columns = (of, keys) => {
    const found = (typeof of === "string" ? past[of] : of) || { at_s: [], series: {} };
    return [found.at_s, ...keys.map((key) => found.series[key] || found.at_s.map(() => null))];
  };
  // A value between two gaps has no line: it is drawn as a dot.
  const alone = (plot, at) => {
    const values = plot.data[at];
    return values.flatMap((value, n) => (value != null && values[n - 1] == null && values[n + 1] == null ? [n] : []));
  };
  const clock = (at) => new Date(at * 1000).toISOString().slice(11, range === "15m" || range === "1h" ? 19 : 16);
  // Without a pointer on the chart its legend shows the newest values.
  const latest = (plot) => { if (plot.cursor.idx == null && plot.data[0].length) plot.setLegend({ idx: plot.data[0].length - 1 }); };
  const makeChart = (place) => {
    const fixed = place.dataset.points ? JSON.parse(place.dataset.points) : null;  // drawn by the server, not live
    const of = fixed || place.dataset.of;
    const wanted = place.dataset.series.split(",").map((text) => text.split("|"));
    const form = forms[place.dataset.form || "short"];
    const inks = ["--one", "--two", "--three", "--four"];
    const steps = place.dataset.form === "size" ? { incrs: Array.from({ length: 50 }, (_, n) => 2 ** n) } : {};  // round in KiB
    const axis = { stroke: color("--faint"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    place.replaceChildren();
    const plot = new uPlot({
      width: Math.max(200, place.clientWidth), height: 150,
      cursor: { y: false, points: { size: 6 } },
      hooks: { setCursor: [latest] },
      scales: {
        x: { range: () => [Date.now() / 1000 - Number(place.dataset.spanS || RANGES[range][0]), Date.now() / 1000] },
        y: fixed ? {} : { range: (u, low, high) => [0, Math.max((high || 0) * 1.15, 1)] },
      },
      axes: [
        { ...axis, size: 26, space: 70, values: (u, ticks) => ticks.map(clock) },
        { ...axis, ...steps, size: 52, space: 34, values: (u, ticks) => ticks.map((tick) => form(tick)) },
      ],
      series: [
        { label: "UTC", value: (u, at) => (at ? new Date(at * 1000).toISOString().slice(11, 19) : "–") },
        ...wanted.map(([, label], n) => ({
          label, stroke: color(inks[n % 4]), width: 2, dash: n >= 4 ? [5, 4] : undefined, points: { show: true, size: 4, fill: color(inks[n % 4]), filter: alone },
          fill: n === 0 ? color(inks[0]) + "1c" : undefined,
          value: (u, value) => (value == null ? "–" : form(value)),
        })),
      ],
    }, columns(of, wanted.map(([key]) => key)), place);
    charts.set(place, { plot, of, keys: wanted.map(([key]) => key) });
    latest(plot);
  };
  const drawCharts = () => {
    for (const [place, { plot }] of charts) {
      if (!place.isConnected) { plot.destroy(); charts.delete(place); }
    }
    for (const place of document.querySelectorAll(".chart")) {
      if (!charts.has(place)) makeChart(place);
      else {
        const { plot, of, keys } = charts.get(place);
        plot.setData(columns(of, keys));
        latest(plot);
      }
    }
  };
  const redrawCharts = () => {
    for (const { plot } of charts.values()) plot.destroy();
    charts.clear();
    drawCharts();
  };
  let resizing = 0;
  addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(redrawCharts, 150); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);

  // The past: of the lake from the bucket, of this gateway from its memory. A moment without data is a gap.
  const showRange = () => {
    for (const place of document.querySelectorAll("[data-range-shown]")) place.textContent = RANGES[range][1];
    for (const input of document.querySelectorAll('input[name="range"]')) input.checked = input.value === range;
  };
  const loadHistory = async () => {
    if (document.hidden || !document.querySelector(".chart")) return;
    try {
      const answer = await fetch("/history.json?range=" + range);
      if (!answer.ok) return;
      past = await answer.json();
      document.documentElement.dataset.history = String(past.lake.at_s.length);
      drawCharts();
    } catch { /* the banner reports lost contact */ }
  };
  document.addEventListener("change", (change) => {
    if (change.target.name !== "range") return;
    range = change.target.value;
    try { localStorage.setItem("lakebed-range", range); } catch { /* forbidden */ }
    showRange();
    redrawCharts();
    loadHistory();
  });

  // Live numbers: the browser reconnects by itself, except after a refusal.
  const listen = () => {
    const source = new EventSource("/live");
    source.addEventListener("sample", (message) => {
      newest = JSON.parse(message.data);
      heard();
      show(newest);
      document.documentElement.dataset.live = String(newest.at_ms);
    });
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED) setTimeout(listen, RETRY_MS);
    };
  };

  // The banner: shown while the gateway cannot be reached.
  const showBanner = (text) => {
    banner.querySelector("strong").textContent = text;
    banner.hidden = !text;
  };

  // Lost contact: what is shown is old, so every state turns grey and says so.
  let heardAt = Date.now();
  const heard = () => {
    heardAt = Date.now();
    if (document.documentElement.dataset.contact === "lost") showBanner("");
    document.documentElement.dataset.contact = "kept";
  };
  const lost = () => {
    const at = new Date(heardAt).toISOString().slice(11, 19);
    showBanner("The gateway has not responded since " + at + " UTC. States below are unknown; numbers are of that time. Retrying.");
    document.documentElement.dataset.contact = "lost";
  };
  if (document.querySelector("main[data-page]")) {
    setInterval(() => { if (!document.hidden && Date.now() - heardAt > SILENT_MS) lost(); }, 1000);
  }

  // The page reloads its content, unless the user is typing, selecting or in a dialog.
  const page = () => document.getElementById("page");
  const busy = () => {
    const at = document.activeElement;
    const typing = at && at.matches("input:not([type=radio]), textarea, select");
    const marked = getSelection() && !getSelection().isCollapsed;
    return document.hidden || dialog.open || typing || marked;
  };
  let asking = false;
  const refresh = async (force) => {
    if (asking || (!force && busy())) return;
    asking = true;
    const headers = force ? {} : { "x-quiet": "1" };
    try {
      await htmx.ajax("GET", location.pathname + location.search, { target: "#page", select: "#page", swap: "morph:outerHTML", headers });
    } catch {
      lost();
    } finally {
      asking = false;
    }
  };
  setInterval(refresh, REFRESH_MS);
  document.addEventListener("visibilitychange", () => refresh());
  if (window.Idiomorph) {
    Idiomorph.defaults.callbacks.beforeNodeMorphed = (old) => !(old.classList && old.classList.contains("chart"));
    Idiomorph.defaults.callbacks.beforeAttributeUpdated = (name, old) => !(name === "open" && old.matches("details"));
  }
  document.addEventListener("htmx:sendError", lost);
  document.addEventListener("htmx:beforeSwap", (swap) => {
    const { xhr, target } = swap.detail;
    const html = (xhr.getResponseHeader("content-type") || "").startsWith("text/html");
    if (xhr.status === 401 || xhr.responseURL.includes("/login")) {
      swap.detail.shouldSwap = false;
      location.assign("/login?next=" + encodeURIComponent(location.pathname + location.search));
    } else if (swap.detail.requestConfig?.headers["x-quiet"] && busy()) {
      swap.detail.shouldSwap = false;  // the user began something since the request: the next reload follows
    } else if (html && (target.id === "ask-body" || target.id === "page")) {
      swap.detail.shouldSwap = true;
      swap.detail.isError = false;
      showBanner("");
      heard();
    } else if (xhr.status >= 400) {
      let message = "";
      try { message = JSON.parse(xhr.responseText).message; } catch { message = ""; }
      showBanner(message || "The gateway returned " + xhr.status + ". Retrying.");
    }
  });
  document.addEventListener("htmx:afterSwap", (swap) => {
    if (swap.detail.target.id === "ask-body" && !dialog.open) dialog.showModal();
    if (newest) show(newest);
    showRange();
    drawCharts();
  });
  document.body.addEventListener("lakebed-changed", () => refresh(true));

  // Buttons.
  document.addEventListener("click", async (click) => {
    const button = click.target.closest("[data-do]");
    if (!button) return;
    if (button.dataset.do === "close") dialog.close();
    if (button.dataset.do === "theme") {
      const dark = color("color-scheme") === "dark" || getComputedStyle(document.documentElement).colorScheme === "dark";
      document.documentElement.dataset.theme = dark ? "light" : "dark";
      try { localStorage.setItem("lakebed-theme", document.documentElement.dataset.theme); } catch { /* forbidden */ }
      redrawCharts();
    }
    if (button.dataset.do === "copy") {
      const text = document.getElementById(button.dataset.from).textContent;
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(document.getElementById(button.dataset.from));
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    }
  });

  if (document.querySelector("main[data-page]")) {
    showRange();
    drawCharts();
    loadHistory();
    setInterval(loadHistory, HISTORY_MS);
    document.addEventListener("visibilitychange", loadHistory);
    listen();
  }
})();
