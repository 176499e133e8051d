"""How the page of a run looks, by day and by night.

Colours are close to Okabe and Ito's (2008, "Color Universal Design"), told apart by colour-blind readers too; by night lighter.
"""

STYLE = """
:root {
  --back: #fff; --card: #fff; --text: #1f2328; --weak: #59636e; --rule: #d8dee4; --grid: #e8ebee;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b5568a; --c4: #e69f00; --c5: #56b4e9; --c6: #7a7a7a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #0d1117; --card: #151b23; --text: #e6edf3; --weak: #9198a1; --rule: #3d444d; --grid: #262c36;
    --c0: #58b0f0; --c1: #ff8a4c; --c2: #2fc79b; --c3: #e59ac4; --c4: #f2b63d; --c5: #a5d8f7; --c6: #a8a8a8;
  }
}
body {
  font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 78rem; margin: 0 auto; padding: 1.5rem;
}
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; } h3 { font-size: 1rem; margin: 0; }
.condition { margin: .2rem 0 1rem; padding-left: .6rem; border-left: 4px solid var(--c2); }
.condition.stopped { border-color: var(--c1); } .condition.goes-on { border-color: var(--c0); }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: .4rem 1.5rem; margin: 0 0 1.5rem; }
dt { color: var(--weak); font-size: .8rem; } dd { margin: 0; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .8rem 1rem; border: 1px solid var(--rule); border-radius: 8px; background: var(--card); }
figcaption p { margin: 0; color: var(--weak); font-size: .82rem; min-height: 2.5em; }
.keys { font-size: .85rem; margin: .3rem 0; min-height: 1.5em; } .key { margin-right: 1rem; white-space: nowrap; }
.key i { display: inline-block; width: 1.3rem; border-top: 3px solid; vertical-align: middle; margin-right: .35rem; }
.key i.dashed { border-top-style: dashed; }
.key i.round { width: .6rem; height: .6rem; border: 0; border-radius: 50%; background: currentColor; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
.tick { fill: var(--weak); } .label { fill: var(--text); } .grid { stroke: var(--grid); } .axis { stroke: var(--weak); }
.level { stroke: var(--weak); stroke-dasharray: 2 3; }
.curve { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
.curve.thin { stroke-width: 1; opacity: .3; } .curve.dashed { stroke-dasharray: 6 4; }
.dot { fill: currentColor; } .area { fill: currentColor; }
.zone rect { fill: transparent; } .zone line { stroke: var(--text); stroke-width: 1; opacity: 0; }
.zone:hover line { opacity: .5; }
.s0 { color: var(--c0); } .s1 { color: var(--c1); } .s2 { color: var(--c2); } .s3 { color: var(--c3); }
.s4 { color: var(--c4); } .s5 { color: var(--c5); } .s6 { color: var(--c6); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .88rem; }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--grid); }
th { white-space: nowrap; font-weight: 600; } td { font-variant-numeric: tabular-nums; }
.note { color: var(--weak); font-size: .88rem; }
details { margin: 2rem 0; } summary { cursor: pointer; font-weight: 600; }
pre {
  font-size: .82rem; background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: .8rem; overflow-x: auto;
}
"""
