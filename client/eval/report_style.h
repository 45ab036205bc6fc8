// The style sheet of eval.html.
#pragma once

namespace carryover::eval {

inline constexpr char kReportStyle[] = R"css(
:root{color-scheme:light dark;--bg:#fcfcfb;--ink:#1c1d1f;--quiet:#62656b;--edge:#dcdcd8;--card:#fff;
--c0:#8a8d93;--c1:#2166c9;--c2:#d9730d;--c3:#2a8f5b;--c4:#8a5cc4;--c5:#c62f3e;
--good:#1f7a4b;--bad:#b3202f;--open:#6b6e75}
@media(prefers-color-scheme:dark){:root{--bg:#16171a;--ink:#e8e8e6;--quiet:#a0a3aa;--edge:#35373c;
--card:#1d1f23;--c0:#8f939b;--c1:#6ba6ff;--c2:#ffa04d;--c3:#5fce93;--c4:#c09bf0;--c5:#ff7583;
--good:#5fce93;--bad:#ff7583;--open:#a0a3aa}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:1.2rem 1rem 3rem}
h1{font-size:1.5rem;line-height:1.25;margin:.2rem 0 .6rem}
h2{font-size:1.15rem;margin:2.2rem 0 .6rem;padding-top:.8rem;border-top:1px solid var(--edge)}
h3{font-size:1rem;margin:0 0 .3rem}
p{margin:.4rem 0}
small,.quiet{color:var(--quiet);font-size:.84em}
small{white-space:nowrap}
.card{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:.8rem 1rem;
margin:.7rem 0}
.chip{display:inline-block;border:1px solid currentColor;border-radius:99px;padding:0 .6em;
font-size:.85em;font-weight:600;white-space:nowrap}
.good{color:var(--good)}.bad{color:var(--bad)}.open{color:var(--open)}
summary{cursor:pointer;color:var(--quiet);margin-top:.4rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:1rem}
figure{margin:0;background:var(--card);border:1px solid var(--edge);border-radius:8px;
padding:.7rem .8rem;min-width:0}
figcaption{font-weight:600;margin-bottom:.3rem}
figure svg{display:block;width:100%;height:auto}
svg text{fill:var(--quiet);font-size:11.5px}
.grid{stroke:var(--edge);stroke-width:1}.axis{stroke:var(--quiet);stroke-width:1}
.limit{stroke:var(--quiet);stroke-width:1.2;stroke-dasharray:2 4}
.line{fill:none;stroke:var(--c);stroke-width:2}.dashed{stroke-dasharray:6 4}
.whisker{stroke:var(--c);stroke-width:1.4;opacity:.65}.dot{fill:var(--c)}
.thin{fill-opacity:.55}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}
.c5{--c:var(--c5)}
.legend{display:flex;flex-wrap:wrap;gap:.1rem 1rem;font-size:.85em}
.legend .key{display:inline-block;width:22px;height:10px;vertical-align:middle}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.86em;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--edge)}
thead th{color:var(--quiet);font-weight:600;white-space:nowrap}
.strong td{font-weight:600}.strong small{font-weight:400}
.plain th{font-weight:400;color:var(--quiet);white-space:nowrap}
.code{font-family:ui-monospace,monospace;overflow-wrap:anywhere}
)css";

}  // namespace carryover::eval
