"""Style sheet of the page for phone, desktop and print. #light and #dark override the system's color scheme."""

from __future__ import annotations

from maxlm.reporting.drawing import palette

_RULES = """
:root:has(#light:target) { color-scheme: light; }
:root:has(#dark:target) { color-scheme: dark; }
* { box-sizing: border-box; }
html { background: var(--background); color: var(--text); font: 15px/1.5 system-ui, sans-serif;
  -webkit-text-size-adjust: 100%; }
body { max-width: 76rem; margin: 0 auto; padding: 1rem clamp(0.75rem, 3vw, 2rem) 3rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0 0.25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 0.75rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 0.5rem; }
p { margin: 0.5rem 0; max-width: 70ch; }
a { color: var(--link); }
nav { display: flex; flex-wrap: wrap; gap: 0.1rem 1rem; margin: 0.75rem 0; }
ul.plain { list-style: none; padding: 0; margin: 0.5rem 0; }
.lead { color: var(--muted); }
.note, figure small, .unit { color: var(--muted); font-size: 0.9rem; }
.error { color: var(--error); }
.state { font-weight: 600; }
.box { border-left: 4px solid var(--error); background: var(--panel); padding: 0.5rem 0.9rem; margin: 0.75rem 0; }
.box p { margin: 0.2rem 0; max-width: none; }

.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(11rem, 47%), 1fr)); gap: 0.6rem;
  margin: 1rem 0; }
.tile { background: var(--panel); border-radius: 6px; padding: 0.6rem 0.8rem; min-width: 0; }
.tile h3 { font-size: 0.85rem; font-weight: 400; color: var(--muted); margin: 0; }
.tile b { display: block; font-size: 1.25rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { display: block; font-size: 0.85rem; color: var(--muted); }

.scroll { overflow-x: auto; max-width: 100%; margin: 0.9rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.92rem; }
th, td { padding: 0.3rem 0.75rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--grid);
  white-space: nowrap; }
th { font-weight: 600; border-bottom: 2px solid var(--muted); }
th.t, td.t { text-align: left; }
th:first-child, td:first-child { padding-left: 0; }
table.compare td { white-space: normal; min-width: 9rem; }
table.compare td:first-child { min-width: 6rem; }
table.prose td.t:last-child { white-space: normal; min-width: 16rem; }
pre { background: var(--panel); padding: 0.6rem 0.8rem; border-radius: 6px; margin: 0.4rem 0; white-space: pre-wrap;
  unicode-bidi: isolate; font: 0.85rem/1.45 ui-monospace, monospace; max-height: 24rem; overflow: auto; }
details { margin: 0.5rem 0; }
summary { cursor: pointer; }
.key { display: inline-block; width: 0.85em; height: 0.85em; margin-right: 0.4em; vertical-align: -0.05em; }

.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.25rem 2rem; }
figure { margin: 0; min-width: 0; break-inside: avoid; }
.wide + .wide { margin-top: 1.25rem; }
figcaption { font-weight: 600; line-height: 1.3; }
figcaption .unit { font-weight: 400; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0 1.1rem; padding: 0; margin: 0.15rem 0 0.35rem;
  font-size: 0.88rem; line-height: 1.45; }
.legend b { font-variant-numeric: tabular-nums; font-weight: 600; display: inline-block; min-width: 4ch; }
.legend svg { width: 1.5em; height: 0.7em; margin-right: 0.35em; }
.frame { position: relative; display: grid; grid-template: 13.5rem 1.5rem / var(--y) 1fr; }
.wide .frame { grid-template-rows: 21rem 1.5rem; }
.frame .y, .frame .x { position: relative; color: var(--muted); font-size: 0.78rem; line-height: 1;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.frame .y span { position: absolute; right: 0.45rem; transform: translateY(-50%); }
.frame .x { grid-column: 2; }
.frame .x span { position: absolute; top: 0.4rem; transform: translateX(-50%); }
.frame .x span.end { transform: translateX(-100%); }
.frame .x span.start { transform: none; }
.plot { width: 100%; height: 100%; display: block; overflow: hidden;
  border-bottom: 1px solid var(--muted); cursor: crosshair; touch-action: pan-y; }
.plot:focus-visible, .scroll:focus-visible, pre:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
.plot path, .plot rect, .legend path { vector-effect: non-scaling-stroke; fill: none; }
.plot .grid { stroke: var(--grid); stroke-width: 1; }
.plot .shade { fill: var(--error); fill-opacity: 0.13; stroke: none; }
.line { stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.raw { stroke-width: 1; stroke-opacity: 0.35; }
.dots { stroke-width: 6.5; stroke-linecap: round; }
.best { stroke-width: 15; stroke-linecap: round; stroke-opacity: 0.35; }
.line.d1, .raw.d1 { stroke-dasharray: 7 4; }
.line.d2, .raw.d2 { stroke-dasharray: 2 4; }
.mark { stroke-width: 1.2; stroke: var(--muted); stroke-dasharray: 5 4; }
.mark.alert { stroke: var(--error); stroke-dasharray: none; stroke-opacity: 0.75; }
.mark.change { stroke-dasharray: 1.5 3; }
/* On top of the plot, so that the layout does not change while values are shown. */
.hover { position: absolute; top: 0; right: 0; max-width: 85%; padding: 0.05rem 0.4rem; background: var(--panel);
  font-size: 0.85rem; pointer-events: none; }
.hover:empty { display: none; }
.cursor { stroke: var(--text); stroke-width: 1; }

.bars { display: grid; grid-template-columns: minmax(3.5rem, max-content) 1fr; gap: 0.4rem 0.75rem;
  align-items: center; }
.bars .name { font-size: 0.88rem; overflow-wrap: anywhere; max-width: 12rem; }
.bar { width: 100%; height: 1.7rem; display: block; }
.bar path { stroke: var(--background); stroke-width: 1; vector-effect: non-scaling-stroke; }
.bar path.stripe { fill: none; stroke: var(--background); stroke-width: 2; }

@media (max-width: 36rem) {
  html { font-size: 14px; }
  .frame .x span.second { display: none; }
  .wide .frame { grid-template-rows: 15rem 1.5rem; }
  .bars { grid-template-columns: 1fr; gap: 0.1rem; }
  .bars .bar { margin-bottom: 0.5rem; }
  th, td { padding: 0.3rem 0.5rem; }
  table.prose thead { display: none; }
  table.prose tr { display: flex; flex-wrap: wrap; border-bottom: 1px solid var(--grid); padding: 0.25rem 0; }
  table.prose td { border: none; padding: 0 0.75rem 0 0; }
  table.prose td:not(.t)::before { content: attr(data-head) ' '; color: var(--muted); }
  table.prose td.t:last-child { flex: 1 0 100%; min-width: 0; }
}
@media print {
  :root { color-scheme: light !important; }
  html { font-size: 11px; }
  body { max-width: none; padding: 0; }
  nav { display: none; }
  .scroll, pre { overflow: visible; max-height: none; }
  th, td { white-space: normal; }
  h2, h3 { break-after: avoid; }
  * { print-color-adjust: exact; }
}
"""


def style() -> str:
    """Returns the style sheet of the page."""
    curves = [f'.c{number} {{ stroke: var(--c{number}); }}' for number in range(len(palette.CURVES))]
    times = [f'.t-{name} {{ fill: var(--t-{name}); background: var(--t-{name}); }}' for name in palette.TIME]
    return '\n'.join([f':root {{ color-scheme: light dark; {palette.variables()} }}', *curves, *times, _RULES.strip()])
