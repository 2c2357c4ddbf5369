(function () {
  "use strict";
  var charts = JSON.parse(document.getElementById("chart-data").textContent);
  var plots = [];
  var MIN_TIME_S = 20;
  var BARS_WIDTH = 0.85;
  var WHOLE_TICKS = [0, 1, 2, 3, 4, 5, 6].flatMap(function (power) { return [1, 2, 5].map(function (first) { return first * Math.pow(10, power); }); });

  var PAPER_WIDTH = 640;
  var isPrinted = false;
  function findPrintColors() {
    var rules = Array.prototype.filter.call(document.styleSheets[0].cssRules, function (rule) {
      return rule.media && rule.media.mediaText === "print" && rule.cssRules[0].selectorText === ":root";
    });
    return rules[0].cssRules[0].style;
  }
  function color(name) {
    // Before a page is printed, the colors of the screen are still those that are computed.
    var style = isPrinted ? findPrintColors() : getComputedStyle(document.documentElement);
    return style.getPropertyValue(name).trim();
  }
  function width(element) {
    return Math.max(isPrinted ? Math.min(element.clientWidth, PAPER_WIDTH) : element.clientWidth, 120);
  }
  function show(value) {
    if (value === null || value === undefined) return "-";
    var size = Math.abs(value);
    return size >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  }
  function shownX(chart, index) {
    if (chart.kind === "category") return chart.labels[index];
    if (chart.kind === "time") return new Date(chart.x[index] * 1000).toISOString().slice(0, 19).replace("T", " ");
    return show(chart.x[index]);
  }
  function seriesColor(chart, number) {
    if (chart.series[number].style === "faint") return color("--faint");
    var before = chart.series.slice(0, number).filter(function (one) { return one.style !== "faint"; }).length;
    return color("--s" + (before % 8));
  }
  function placeBars(chart, place, bars) {
    // Unit 1: the left edges and the width of bars in values of x, which are 1 apart.
    var size = BARS_WIDTH / bars;
    return uPlot.paths.bars({ disp: {
      x0: { unit: 1, values: function () { return chart.x.map(function (x) { return x - BARS_WIDTH / 2 + place * size; }); } },
      size: { unit: 1, values: function () { return [size]; } }
    } });
  }
  function makeSeries(chart) {
    var bars = chart.series.filter(function (one) { return one.style === "bars"; }).length;
    var seen = 0;
    return chart.series.map(function (one, number) {
      var stroke = seriesColor(chart, number);
      var made = { label: one.name, stroke: stroke, width: one.style === "faint" ? 1 : 2, points: { show: false }, spanGaps: true };
      if (one.style === "points") {
        made.paths = function () { return null; };
        made.points = { show: true, size: 9, fill: stroke, stroke: color("--page"), width: 1 };
      } else if (one.style === "bars") {
        made.fill = stroke;
        made.paths = placeBars(chart, seen, bars);
        seen += 1;
      } else if (one.values.filter(function (value) { return value !== null; }).length < 2) {
        made.points = { show: true, size: 7, fill: stroke };
      }
      return made;
    });
  }
  function isZero(chart) {
    return chart.series.every(function (one) {
      return one.values.every(function (value) { return value === 0 || value === null || value === undefined; });
    });
  }
  function showTimes(plot, splits) {
    var span = plot.scales.x.max - plot.scales.x.min;
    return splits.map(function (seconds) {
      var text = new Date(seconds * 1000).toISOString();
      return span > 6 * 86400 ? text.slice(5, 10) : span > 86400 ? text.slice(5, 10) + "\n" + text.slice(11, 16) : text.slice(11, span > 600 ? 16 : 19);
    });
  }
  function showTicks(plot, splits, axis, space, distance) {
    var digits = Math.min(Math.max(Math.ceil(-Math.log10(distance) - 1e-9), 0), 8);
    return splits.map(function (value) { return value !== 0 && digits > 0 && (digits < 5 || Math.abs(value) >= 0.1) ? value.toFixed(digits) : show(value); });
  }
  function makeOptions(chart, element) {
    var isCategory = chart.kind === "category";
    var axis = { stroke: color("--soft"), grid: { stroke: color("--grid"), width: 1 }, ticks: { stroke: color("--grid"), width: 1 }, font: "12px system-ui, sans-serif" };
    var x = Object.assign({}, axis, { label: undefined, space: isCategory ? 60 : 50 });
    if (isCategory) {
      x.grid = { show: false };
      x.splits = function (plot) {
        var step = Math.max(1, Math.ceil(chart.x.length * 90 / Math.max(plot.width, 90)));
        return chart.x.filter(function (_, index) { return index % step === 0; });
      };
      x.values = function (plot, splits) {
        return splits.map(function (value) { var at = chart.x.indexOf(value); return at < 0 ? "" : chart.labels[at].split(" to ")[0]; });
      };
    }
    if (chart.kind === "time") {
      x.space = 76;
      x.incrs = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200].concat([1, 2, 5, 10, 20, 50, 100, 200, 500].map(function (days) { return days * 86400; }));
      x.values = showTimes;
    }
    if (!isCategory && chart.kind !== "time") x.incrs = WHOLE_TICKS;
    var y = Object.assign({}, axis, { size: 58, values: showTicks });
    if (isZero(chart)) y.splits = function () { return [0]; };
    var hasBars = chart.series.some(function (one) { return one.style === "bars"; });
    var low = chart.x[0], high = chart.x[chart.x.length - 1];
    var scaleX = { time: chart.kind === "time" };
    if (isCategory) scaleX.range = [low - 0.6, high + 0.6];
    else if (chart.kind === "time" && high - low < MIN_TIME_S) scaleX.range = [(low + high - MIN_TIME_S) / 2, (low + high + MIN_TIME_S) / 2];
    else if (low === high) scaleX.range = [low - 1, high + 1];
    return {
      width: width(element), height: element.clientHeight || 220, legend: { show: false },
      padding: [10, chart.kind === "time" ? 30 : 12, 0, 0],
      tzDate: function (seconds) { return uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"); },
      scales: { x: scaleX, y: isZero(chart) ? { range: [0, 1] } : hasBars ? { range: function (plot, least, most) { return [0, most > 0 ? most * 1.05 : 1]; } } : {} },
      axes: [x, y],
      cursor: { y: false, points: { size: 7 }, drag: { x: false, y: false } },
      series: [{}].concat(makeSeries(chart)),
      hooks: { setCursor: [function (plot) { readOut(chart, element, plot.cursor.idx); }] }
    };
  }
  function readOut(chart, element, index) {
    var line = element.parentNode.querySelector(".readout");
    if (index === null || index === undefined) { line.textContent = ""; return; }
    line.textContent = chart.x_label + " " + shownX(chart, index) + ": " + chart.series.map(function (one) {
      return one.name + " " + show(one.values[index]);
    }).join(", ");
  }
  function draw() {
    plots.forEach(function (one) { one.plot.destroy(); });
    plots = [];
    document.querySelectorAll("[data-chart]").forEach(function (element) {
      var chart = charts[Number(element.dataset.chart)];
      var data = [chart.x].concat(chart.series.map(function (one) { return one.values; }));
      plots.push({ element: element, chart: chart, plot: new uPlot(makeOptions(chart, element), data, element) });
      element.dataset.drawn = "yes";
    });
  }
  function resize() {
    plots.forEach(function (one) {
      if (one.plot.width !== width(one.element)) one.plot.setSize({ width: width(one.element), height: one.element.clientHeight });
    });
  }
  function walk(event) {
    var step = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    var found = plots.filter(function (one) { return one.element === event.currentTarget; })[0];
    if (!step || !found) return;
    event.preventDefault();
    var last = found.chart.x.length - 1;
    var index = found.plot.cursor.idx;
    index = Math.min(Math.max((index === null || index === undefined ? (step > 0 ? -1 : last + 1) : index) + step, 0), last);
    found.plot.setCursor({ left: found.plot.valToPos(found.chart.x[index], "x"), top: 10 });
  }
  function sortTable(button) {
    var head = button.closest("th"), table = head.closest("table");
    var column = Array.prototype.indexOf.call(head.parentNode.children, head);
    var sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    table.querySelectorAll("th[aria-sort]").forEach(function (one) { one.removeAttribute("aria-sort"); });
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    var body = table.tBodies[0];
    Array.prototype.slice.call(body.rows).map(function (row) {
      var cell = row.cells[column], value = cell.dataset.value === undefined ? cell.textContent : cell.dataset.value;
      return { row: row, value: value !== "" && !isNaN(value) ? Number(value) : value };
    }).sort(function (a, b) {
      if (a.value === "" || b.value === "") return (a.value === "") - (b.value === "");
      if (typeof a.value === "number" && typeof b.value === "number") return sign * (a.value - b.value);
      return sign * String(a.value).localeCompare(String(b.value));
    }).forEach(function (one) { body.appendChild(one.row); });
  }
  function filterTable(form) {
    var table = document.getElementById(form.dataset.table);
    var text = form.querySelector("[name=text]").value.toLowerCase();
    var chosen = {};
    form.querySelectorAll("select").forEach(function (one) { chosen[one.name] = one.value; });
    var num = 0;
    Array.prototype.forEach.call(table.tBodies[0].rows, function (row) {
      var fits = row.textContent.toLowerCase().indexOf(text) >= 0 && Object.keys(chosen).every(function (name) {
        return !chosen[name] || row.dataset[name].split(" ").indexOf(chosen[name]) >= 0;
      });
      row.hidden = !fits;
      num += fits;
    });
    form.querySelector("[role=status]").textContent = num + " shown";
  }
  function openTarget() {
    var target = location.hash.length > 1 ? document.getElementById(decodeURIComponent(location.hash.slice(1))) : null;
    for (var one = target; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true;
    if (target) target.scrollIntoView();
  }

  draw();
  document.querySelectorAll("[data-chart]").forEach(function (element) { element.addEventListener("keydown", walk); });
  document.querySelectorAll("th button").forEach(function (button) {
    button.addEventListener("click", function () { sortTable(button); });
  });
  document.querySelectorAll("form.filters").forEach(function (form) {
    form.hidden = false;
    form.addEventListener("submit", function (event) { event.preventDefault(); });
    form.addEventListener("input", function () { filterTable(form); });
  });
  window.addEventListener("hashchange", openTarget);
  window.addEventListener("resize", resize);
  window.addEventListener("beforeprint", function () { isPrinted = true; draw(); });
  window.addEventListener("afterprint", function () { isPrinted = false; draw(); });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  openTarget();
})();
