'use strict';
// Draws the charts with uPlot: smoothing, logarithmic values, zoom, and values under the pointer or the arrow keys.
// Without this script, the page shows the first, last, lowest and highest values in tables.
(() => {
  const controls = document.querySelector('.controls');
  const probe = document.body.appendChild(document.createElement('i'));
  probe.hidden = true;
  // Canvases need resolved colors, so the style sheet is read through an element.
  const colorOf = (name) => { probe.className = name; return getComputedStyle(probe).color; };
  const variable = (name) => {
    probe.style.color = `var(--${name})`;
    const value = colorOf('');
    probe.style.color = '';
    return value;
  };
  const faded = (color, alpha) => color.replace('rgb(', 'rgba(').replace(')', `, ${alpha})`);
  const DASHES = [[], [7, 4], [2, 4]];
  const MARK_DASHES = { alert: [], restart: [5, 4], change: [1.5, 3] };
  const MAX_DOTS = 60;
  // Seconds between two labels of a time axis.
  const TIMES = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 604800];

  const number = (value) => value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e9)
    ? value.toExponential(3) : value.toLocaleString('en', { maximumSignificantDigits: 4 });
  const compact = (value) => Math.abs(value) >= 1e4
    ? value.toLocaleString('en', { notation: 'compact', maximumSignificantDigits: 4 }) : number(value);
  const twoDigits = (value) => String(Math.floor(value)).padStart(2, '0');
  const duration = (x) => x < 60 ? `${Math.round(x)} s`
    : x < 3600 ? `${Math.floor(x / 60)} min ${twoDigits(x % 60)} s`
    : `${Math.floor(x / 3600)} h ${twoDigits(x / 60 % 60)} min`;

  // Exponential moving average as in TensorBoard, corrected for its start at 0.
  const smoothed = (values, weight) => {
    let sum = 0, count = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      count += 1;
      return sum / (1 - weight ** count);
    });
  };
  // After a rollback the steps start again, but uPlot needs ascending positions: splits a curve there.
  const ascending = ([xs, ys]) => {
    const pieces = [];
    xs.forEach((x, index) => {
      if (!index || x <= xs[index - 1]) pieces.push([[], []]);
      pieces.at(-1)[0].push(x);
      pieces.at(-1)[1].push(ys[index]);
    });
    return pieces;
  };

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.spec = JSON.parse(figure.querySelector('script').textContent);
      this.root = figure.querySelector('.plot');
      this.hover = figure.querySelector('.hover');
      this.spoken = figure.querySelector('.frame .spoken');
      this.values = [...figure.querySelectorAll('.legend b')];
      this.last = this.values.map((value) => value.textContent);
      this.buttons = [...figure.querySelectorAll('.legend button')];
      const xs = this.spec.series.flatMap((one) => one.points[0]);
      const high = xs.reduce((a, b) => Math.max(a, b)), lowest = xs.reduce((a, b) => Math.min(a, b));
      // A run starts at 0, even if its first line is later.
      const low = lowest <= 0.5 * high ? 0 : lowest;
      const margin = 0.01 * (high - low || 1);
      this.full = { min: low - margin, max: high + margin };
      this.range = this.full;
      this.buttons.forEach((button, index) => button.addEventListener('click', () => {
        this.show(index, button.getAttribute('aria-pressed') === 'false');
      }));
      this.root.addEventListener('keydown', (event) => this.key(event));
      this.root.addEventListener('blur', () => this.clear());
      this.draw();
      new ResizeObserver(() => this.plot.setSize(this.size())).observe(this.root);
    }

    size() { return { width: Math.max(50, this.root.clientWidth), height: this.root.clientHeight }; }

    // Returns the columns of the plot: for each curve its values, and if it is smoothed also their average.
    columns() {
      const weight = Number(controls.elements.smoothing.value), log = this.isLog();
      const shown = (ys) => log ? ys.map((y) => y > 0 ? y : null) : ys;
      return this.spec.series.flatMap((one, index) => ascending(one.points).flatMap(([xs, ys]) => {
        const raw = { index, one, xs, ys: shown(ys), isRaw: true, isFaint: one.smooth && weight > 0 };
        return raw.isFaint ? [raw, { ...raw, ys: shown(smoothed(ys, weight)), isRaw: false, isFaint: false }] : [raw];
      }));
    }

    isLog() { return controls.elements.log.checked || this.spec.log; }

    isShown(index) { return this.buttons[index].getAttribute('aria-pressed') === 'true'; }

    // Draws the chart again, with the same range.
    draw() {
      this.plot?.destroy();
      const columns = this.shown = this.columns(), log = this.isLog();
      const muted = variable('muted'), grid = { stroke: variable('grid'), width: 1 };
      const axis = { stroke: muted, grid, ticks: { show: false }, font: '11px system-ui, sans-serif' };
      const series = columns.map(({ index, one, isFaint, ys }) => {
        const color = colorOf(`c${one.color}`), points = ys.filter((y) => y !== null).length;
        return {
          show: this.isShown(index), stroke: isFaint ? faded(color, 0.35) : color, width: isFaint ? 1 : 1.8,
          dash: DASHES[one.dash], spanGaps: false,
          // A single value has no line.
          points: { show: points === 1 || (one.dots && points <= MAX_DOTS && !isFaint), size: 6, fill: color },
        };
      });
      const marks = (u) => {
        const { left, top, width, height } = u.bbox, ratio = devicePixelRatio;
        u.ctx.save();
        u.ctx.beginPath();
        u.ctx.rect(left, top, width, height);
        u.ctx.clip();
        for (const { x, kind } of this.spec.marks) {
          const at = u.valToPos(x, 'x', true);
          u.ctx.strokeStyle = kind === 'alert' ? variable('error') : muted;
          u.ctx.setLineDash(MARK_DASHES[kind].map((length) => length * ratio));
          u.ctx.lineWidth = 1.2 * ratio;
          u.ctx.beginPath();
          u.ctx.moveTo(at, top);
          u.ctx.lineTo(at, top + height);
          u.ctx.stroke();
        }
        u.ctx.setLineDash([]);
        for (const [index, { best, points: [xs, ys], color }] of this.spec.series.entries()) {
          if (best === null || !this.isShown(index) || !xs.includes(best)) continue;
          u.ctx.strokeStyle = colorOf(`c${color}`);
          u.ctx.lineWidth = 2 * ratio;
          u.ctx.beginPath();
          const y = u.valToPos(ys[xs.indexOf(best)], 'y', true);
          u.ctx.arc(u.valToPos(best, 'x', true), y, 8 * ratio, 0, 2 * Math.PI);
          u.ctx.stroke();
        }
        u.ctx.restore();
      };
      const shade = (u) => {
        if (!this.spec.shade) return;
        const [from, to] = this.spec.shade.map((x) => u.valToPos(x, 'x', true));
        u.ctx.fillStyle = faded(variable('error'), 0.13);
        u.ctx.fillRect(from, u.bbox.top, to - from, u.bbox.height);
      };
      this.plot = new uPlot({
        ...this.size(),
        legend: { show: false },
        cursor: {
          y: false, points: { size: 7 }, drag: { x: true, y: false },
          dataIdx: (u, column, closest, x) => this.nearest(u.data[0], u.data[column], closest, x),
          bind: { dblclick: () => () => zoom(null) },
        },
        scales: {
          x: { time: false, range: (u, min, max) => [min, max], ...this.range },
          y: { distr: log ? 3 : 1, range: (u, min, max) => this.valueRange(min, max, log) },
        },
        axes: [
          { ...axis, size: 26, values: (u, ticks) => ticks.map(this.spec.x === 'time' ? duration : compact),
            space: 80, incrs: this.spec.x === 'time' ? TIMES : undefined },
          { ...axis, size: (u, texts) => 14 + 6.5 * Math.max(2, ...(texts ?? []).map((text) => text?.length ?? 0)),
            values: (u, ticks) => ticks.map((value) => value === null ? '' : compact(value)) },
        ],
        series: [{}, ...series],
        hooks: {
          drawClear: [shade], draw: [marks], setCursor: [() => this.read()],
          setScale: [(u, key) => { if (key === 'x') this.zoomed(u.scales.x); }],
        },
      }, uPlot.join(columns.map(({ xs, ys }) => [xs, ys])), this.root);
    }

    valueRange(min, max, log) {
      if (min === null) return log ? [1, 10] : [0, 1];
      if (log) return uPlot.rangeLog(min, max, 10, false);
      if (this.spec.zero) [min, max] = [Math.min(0, min), Math.max(0, max)];
      // Outliers are above the plot, unless the reader zooms to them.
      if (this.spec.top !== null && min < this.spec.top) max = Math.min(max, this.spec.top);
      const edge = 0.04 * (max - min) || 0.1 * Math.abs(max) || 1;
      return [min === 0 && this.spec.zero ? 0 : min - edge, max + edge];
    }

    // Returns the index of the closest value of a curve; a curve that ended long before has no value.
    nearest(xs, ys, closest, x) {
      const { min, max } = this.plot?.scales.x ?? this.full;
      let best = null;
      for (const direction of [-1, 1]) {
        let index = closest;
        while (index >= 0 && index < xs.length && ys[index] == null) index += direction;
        if (ys[index] != null && (best === null || Math.abs(xs[index] - x) < Math.abs(xs[best] - x))) best = index;
      }
      return best !== null && Math.abs(xs[best] - x) < (max - min) / 20 ? best : null;
    }

    // Shows the values under the cursor in the legend.
    read() {
      const { left, idxs } = this.plot.cursor;
      if (left < 0) return this.clear();
      const found = new Map();
      let position = null;
      const x = this.plot.posToVal(left, 'x');
      this.shown.forEach(({ index, isRaw }, column) => {
        const at = idxs[column + 1];
        if (!isRaw || at === null || at === undefined || !this.isShown(index)) return;
        found.set(index, this.plot.data[column + 1][at]);
        const candidate = this.plot.data[0][at];
        if (position === null || Math.abs(candidate - x) < Math.abs(position - x)) position = candidate;
      });
      const textOf = (index) => found.has(index) ? number(found.get(index)) : '–';
      this.values.forEach((value, index) => { value.textContent = textOf(index); });
      this.position = position ?? x;
      const { min, max } = this.plot.scales.x;
      const close = this.spec.marks.filter((mark) => Math.abs(mark.x - this.position) < (max - min) / 100);
      const where = this.spec.x === 'time' ? duration(this.position)
        : `step ${Math.round(this.position).toLocaleString('en')}`;
      this.hover.textContent = [where, ...close.map((mark) => mark.text)].join(' · ');
      this.sentence = [where, ...[...found].map(([index, y]) => `${this.spec.series[index].name} ${number(y)}`),
        ...close.map((mark) => mark.text)].join(', ');
    }

    clear() {
      this.values.forEach((value, index) => { value.textContent = this.last[index]; });
      this.hover.textContent = this.spoken.textContent = '';
      this.position = null;
    }

    key(event) {
      const { min, max } = this.plot.scales.x, x = this.position ?? (min + max) / 2;
      const zooms = { '+': 0.5, '=': 0.5, '-': 2 };
      const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (direction) {
        const xs = this.plot.data[0].filter((at) => at >= min && at <= max);
        const from = this.position ?? (direction > 0 ? -Infinity : Infinity);
        const next = direction > 0 ? xs.find((at) => at > from) : xs.findLast((at) => at < from);
        if (next !== undefined) this.plot.setCursor({ left: this.plot.valToPos(next, 'x'), top: 0 });
        this.spoken.textContent = this.sentence ?? '';
      } else if (event.key in zooms) {
        const half = (max - min) / 2 * zooms[event.key];
        zoom({ min: Math.max(this.full.min, x - half), max: Math.min(this.full.max, x + half) }, this.spec.x);
      } else if (event.key === '0') zoom(null);
      else return;
      event.preventDefault();
    }

    show(index, isShown) {
      this.buttons[index].setAttribute('aria-pressed', isShown);
      this.shown.forEach((column, at) => {
        if (column.index === index) this.plot.setSeries(at + 1, { show: isShown });
      });
    }

    zoomed({ min, max }) {
      if (min === this.range.min && max === this.range.max) return;
      zoom({ min, max }, this.spec.x);
    }

    setRange(range) {
      this.range = range;
      if (this.plot.scales.x.min !== range.min || this.plot.scales.x.max !== range.max) this.plot.setScale('x', range);
    }
  }

  // Sets the range of all charts with the same axis; null: the full range of all charts.
  const zoom = (range, kind) => {
    for (const chart of charts) if (!range || chart.spec.x === kind) chart.setRange(range ?? chart.full);
  };
  const drawAll = () => charts.forEach((chart) => chart.draw());
  const charts = [];
  if (!controls) return;
  charts.push(...[...document.querySelectorAll('.chart')].map((figure) => new Chart(figure)));
  controls.hidden = false;
  controls.elements.smoothing.addEventListener('input', (event) => {
    controls.elements.weight.value = Number(event.target.value).toFixed(2);
    drawAll();
  });
  controls.elements.log.addEventListener('change', drawAll);
  controls.addEventListener('change', (event) => {
    if (event.target.name !== 'run') return;
    for (const chart of charts) {
      chart.spec.series.forEach((one, index) => {
        if (String(one.run) === event.target.value) chart.show(index, event.target.checked);
      });
    }
  });
  controls.addEventListener('submit', (event) => event.preventDefault());
  controls.querySelector('button').addEventListener('click', (event) => { event.preventDefault(); zoom(null); });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawAll);
  addEventListener('hashchange', drawAll);
  // #light and #dark take effect after this script.
  if (location.hash) addEventListener('load', drawAll);
})();
