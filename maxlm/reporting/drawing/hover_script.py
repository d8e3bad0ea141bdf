"""JavaScript that shows the values of all curves of a chart under the pointer, the finger or the arrow keys.

Without JavaScript, the legends show the last values.
"""

SCRIPT = """
'use strict';
for (const plot of document.querySelectorAll('.plot')) {
  const figure = plot.closest('figure');
  const [low, high] = plot.dataset.x.split(' ').map(Number);
  const label = figure.querySelector('.hover');
  const curves = [...plot.querySelectorAll('path[data-series]')].map((path) => ({
    value: figure.querySelector(`b[data-series="${path.dataset.series}"]`),
    points: path.getAttribute('d').slice(1).split(/[ML]/).map((pair) => pair.split(' ').map(Number)),
  }));
  for (const curve of curves) curve.last = curve.value.textContent;
  const marks = [...plot.querySelectorAll('.mark')].map((path) => ({
    x: low + (high - low) * parseFloat(path.getAttribute('d').slice(1)) / 1000,
    words: path.textContent,
  }));
  const cursor = document.createElementNS('http://www.w3.org/2000/svg', 'path');
  cursor.setAttribute('class', 'cursor');
  let position = null;

  const number = (value) => value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e9)
    ? value.toExponential(3) : value.toLocaleString('en', { maximumSignificantDigits: 4 });
  const twoDigits = (value) => String(Math.floor(value)).padStart(2, '0');
  const duration = (x) => x < 60 ? `${Math.floor(x)} s`
    : x < 3600 ? `${Math.floor(x / 60)} min ${twoDigits(x % 60)} s`
    : `${Math.floor(x / 3600)} h ${twoDigits(x / 60 % 60)} min`;
  const describe = (x) => plot.dataset.kind === 'step' ? `step ${Math.round(x).toLocaleString('en')}` : duration(x);
  const nearest = (points, x) => {
    let first = 0, last = points.length - 1;
    while (last - first > 1) {
      const middle = (first + last) >> 1;
      if (points[middle][0] <= x) first = middle; else last = middle;
    }
    return x - points[first][0] < points[last][0] - x ? points[first] : points[last];
  };

  const showValues = (x) => {
    let shownX = null;
    for (const { points, value } of curves) {
      const point = nearest(points, x);
      // A curve that ended long before has no value here.
      const near = Math.abs(point[0] - x) < (high - low) / 20;
      value.textContent = near ? number(plot.dataset.log ? 10 ** point[1] : point[1]) : '–';
      if (near && (shownX === null || Math.abs(point[0] - x) < Math.abs(shownX - x))) shownX = point[0];
    }
    position = shownX ?? x;
    const close = marks.filter((mark) => Math.abs(mark.x - position) < (high - low) / 100).map((mark) => mark.words);
    label.textContent = [describe(position), ...close].join(' · ');
    cursor.setAttribute('d', `M${1000 * (position - low) / (high - low)} 0v1000`);
    plot.append(cursor);
  };
  const reset = () => {
    for (const { value, last } of curves) value.textContent = last;
    label.textContent = '';
    position = null;
    cursor.remove();
  };
  const showAtPointer = (event) => {
    const box = plot.getBoundingClientRect();
    showValues(low + (high - low) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)));
  };
  plot.addEventListener('pointermove', showAtPointer);
  plot.addEventListener('pointerdown', showAtPointer);
  plot.addEventListener('pointerleave', reset);
  plot.addEventListener('blur', reset);
  plot.addEventListener('keydown', (event) => {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!direction) return;
    event.preventDefault();
    const points = curves.flatMap((curve) => curve.points.map((pair) => pair[0])).sort((a, b) => a - b);
    const from = position ?? (direction > 0 ? low - 1 : high + 1);
    const next = direction > 0 ? points.find((x) => x > from) : points.findLast((x) => x < from);
    if (next !== undefined) showValues(next);
  });
}
"""
