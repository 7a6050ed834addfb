// Draws the charts of a report: each .chart holds its data as JSON.
(() => {
  "use strict";
  const HEIGHT = 260;
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
  const extreme = (value) => value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e15);
  const short = (value) => (value == null ? "–" : extreme(value) ? value.toPrecision(3) : compact.format(value));
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Each line as the sum of itself and the lines below it.
  const stack = (columns) => {
    const sums = columns[0].map(() => 0);
    return [columns[0], ...columns.slice(1).map((ys) => ys.map((y, at) => (sums[at] += y)))];
  };

  // Marks are elements over the plot, so that their words show under the pointer; a zoom moves them.
  const mark = (plot, { marks, kind }) => {
    for (const old of plot.over.querySelectorAll(".mark")) old.remove();
    for (const [x, words] of marks) {
      if (x < plot.scales.x.min || x > plot.scales.x.max) continue;
      const line = document.createElement("div");
      const left = plot.valToPos(x, "x");
      line.className = left > plot.over.clientWidth * 0.8 ? "mark left" : "mark";
      line.style.left = `${left}px`;
      line.title = words;
      if (kind === "histogram") line.appendChild(document.createElement("b")).textContent = words;
      plot.over.append(line);
    }
  };

  const draw = (place, chart) => {
    const { kind, lines, unit, x_unit: xUnit } = chart;
    const joined = uPlot.join(lines.map(([, xs, ys]) => [xs, ys]), lines.map(() => [2, 2]));  // 2: null interrupts the line
    const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui", labelFont: "italic 11px system-ui", labelSize: 16, values: (u, ticks) => ticks.map(short) };
    const styles = {
      lines: () => ({ width: 2 }),
      stacked: (ink) => ({ width: 1, fill: `${ink}bf`, points: { show: false } }),
      histogram: (ink) => ({ fill: ink, paths: uPlot.paths.bars({ size: [0.95], align: 1 }), points: { show: false } }),
    };
    const step = joined[0][1] - joined[0][0];
    const scales = { x: { time: false }, y: { range: (u, low, high) => [Math.min(0, low), Math.max(0, high * 1.05) || 1] } };
    if (kind === "histogram") scales.x.range = (u, low, high) => [low, high === joined[0].at(-1) ? high + step : high];
    const series = lines.map(([label], n) => {
      const ink = color(`--c${n}`);
      return { label, stroke: ink, ...styles[kind](ink), value: (u, y, column, at) => short(at == null ? null : joined[column][at]) };
    });
    return new uPlot({
      width: place.clientWidth, height: HEIGHT, scales,
      axes: [{ ...axis, size: 30, label: xUnit }, { ...axis, size: 52, label: unit }],
      bands: kind === "stacked" ? lines.slice(1).map((_, n) => ({ series: [n + 2, n + 1] })) : [],
      series: [{ label: xUnit || "x", value: (u, x) => short(x) }, ...series],
      hooks: { draw: [(plot) => mark(plot, chart)] },
    }, kind === "stacked" ? stack(joined) : joined, place);
  };

  const charts = [...document.querySelectorAll(".chart")].map((place) => {
    const chart = JSON.parse(place.querySelector("script").textContent);
    return { place, chart, plot: draw(place, chart) };
  });
  document.getElementById("without-script").remove();
  addEventListener("resize", () => { for (const { place, plot } of charts) plot.setSize({ width: place.clientWidth, height: HEIGHT }); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const each of charts) { each.plot.destroy(); each.plot = draw(each.place, each.chart); }
  });
})();
