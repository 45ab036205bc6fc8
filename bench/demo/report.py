"""The demo's result as a table for the terminal and as one HTML page that needs nothing else."""

import html

NAMES = {"native": "native", "hit": "same-version hit", "carried": "carried"}


def ms(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share):
    return f"{100 * share:.0f} %"


def headings(result):
    whole = f"all {result['answer_tokens']}"
    return ["prefix", "native", "hit", "carried", "speedup", "first token", whole, "first token", whole]


def cells(row):
    like = row["answers_like_native"]
    return [f"{row['prefix_tokens']:,}", *(ms(row[f"{arm}_ms"]) for arm in NAMES), f"{row['speedup']:.2f}×",
            percent(like["carried"]["first_token"]), percent(like["carried"]["whole"]),
            percent(like["old_version"]["first_token"]), percent(like["old_version"]["whole"])]


def hit_agreement(result):
    """The control: how often the target's own cache gives the whole native answer."""
    return sum(row["answers_like_native"]["hit"]["whole"] for row in result["ttft"]) / len(result["ttft"])


def table(result):
    old, new, first_row = result["source_version"], result["target_version"], result["ttft"][0]
    rows = [headings(result)] + [cells(row) for row in result["ttft"]]
    # Over the last two pairs of columns stands what was compared with native.
    groups = ["carried = native", f"{old} = native"]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for pair, group in zip((5, 7), groups):
        widths[pair + 1] = max(widths[pair + 1], len(group) - widths[pair] - 2)
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    timed = sum(widths[:5]) + 2 * 4
    over = "median ms to the first token".center(timed) + "".join(
        "  " + group.center(widths[pair] + 2 + widths[pair + 1]) for pair, group in zip((5, 7), groups))
    return "\n".join([
        f"{result['model']}: {new} serves, reading the cache that {old} left. {first_row['suffix_tokens']} tokens follow the "
        f"prefix; {first_row['samples']} requests a value.", "", over.rstrip(), lines[0], "-" * len(lines[0]), *lines[1:], "",
        f"median speedup {result['median_speedup']:.2f}×; control: a same-version hit gives the native answer in "
        f"{percent(hit_agreement(result))} of cases"])


STYLE = """
:root { color-scheme: light dark; --page: #fbfbf9; --ink: #1c1e21; --soft: #5b6067; --rule: #d9dad6;
  --native: #8a8f98; --hit: #b7791f; --carried: #0f7b6c; }
@media (prefers-color-scheme: dark) { :root { --page: #16181b; --ink: #e9eaec; --soft: #a4a9b0; --rule: #383c42;
  --native: #7c828b; --hit: #d9a13f; --carried: #3fb8a5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.25rem 3rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem; }
p { margin: .4rem 0; max-width: 46rem; }
.soft { color: var(--soft); }
.figures { display: flex; flex-wrap: wrap; gap: .75rem 2.5rem; margin: 1.5rem 0 .5rem; padding: 0; list-style: none; }
.figures b { display: block; font-size: 1.9rem; line-height: 1.1; font-variant-numeric: tabular-nums; }
.figures span { color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 36rem; height: auto; }
svg text { fill: var(--ink); font-size: 13px; paint-order: stroke; stroke: var(--page); stroke-width: 3px; }
svg .soft { fill: var(--soft); }
.native { fill: var(--native); } .hit { fill: var(--hit); } .carried { fill: var(--carried); }
.grid { stroke: var(--rule); stroke-width: 1; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; width: 100%; }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid var(--rule); white-space: nowrap; }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
thead .group { text-align: center; }
tbody th { font-weight: 600; }
blockquote { margin: .5rem 0; padding: .1rem 0 .1rem .9rem; border-left: 3px solid var(--rule); white-space: pre-wrap;
  overflow-wrap: anywhere; }
"""

BAR, GAP, LEFT, WIDTH = 16, 20, 116, 860


def nice_step(largest):
    """A round number that gives four to eight steps up to `largest`."""
    power = 10.0 ** (len(str(int(largest))) - 1) if largest >= 1 else 0.1
    for factor in (0.2, 0.25, 0.5, 1, 2):
        if largest / (power * factor) <= 8:
            return power * factor
    return power * 2


def chart(result):
    """Bars of the median time to the first token, three to a prefix length, on one linear axis."""
    rows = result["ttft"]
    largest = max(row[f"{arm}_ms"] for row in rows for arm in NAMES)
    scale = (WIDTH - LEFT - 130) / largest
    top = 34
    height = top + len(rows) * (3 * BAR + GAP) + 12
    step = nice_step(largest)
    parts, tick = [f'<text class="soft" x="{LEFT - 12}" y="{top - 14}" text-anchor="end">prefix tokens</text>'], 0.0
    bars = []  # drawn last, over the texts' halos
    while tick <= largest * 1.001:
        x = LEFT + tick * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 8}" y2="{height - 8}"/>'
                     f'<text class="soft" x="{x:.1f}" y="{top - 14}" text-anchor="middle">{tick:,.6g}</text>')
        tick += step
    for i, row in enumerate(rows):
        y = top + i * (3 * BAR + GAP)
        parts.append(f'<text x="{LEFT - 12}" y="{y + 1.5 * BAR + 5}" text-anchor="end">{row["prefix_tokens"]:,}</text>')
        for j, arm in enumerate(NAMES):
            value = row[f"{arm}_ms"]
            width = max(value * scale, 1.5)
            label = f"{ms(value)} ms" + (f" · {row['speedup']:.1f}× faster" if arm == "carried" else "")
            weight = ' font-weight="600"' if arm == "carried" else ""
            parts.append(f'<text x="{LEFT + width + 7:.1f}" y="{y + j * BAR + 12}"{weight}>{label}</text>')
            bars.append(f'<rect class="{arm}" x="{LEFT}" y="{y + j * BAR}" width="{width:.1f}" height="{BAR - 2}" rx="2"/>')
    longest = rows[-1]
    description = (f"With {longest['prefix_tokens']:,} tokens of prefix the first token comes after {ms(longest['native_ms'])} ms "
                   f"natively, {ms(longest['hit_ms'])} ms from a cache of the same version and {ms(longest['carried_ms'])} ms "
                   "from the carried cache. The table below holds every value.")
    return (f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="chart-title chart-text">'
            '<title id="chart-title">Median time to the first token by prefix length</title>'
            f'<desc id="chart-text">{description}</desc>{"".join(parts + bars)}</svg>')


def legend(result):
    meaning = {"native": f"{result['target_version']} computes the prefix",
               "hit": f"{result['target_version']} reads its own cache",
               "carried": f"{result['target_version']} reads the cache of {result['source_version']}"}
    items = [f'<span style="white-space:nowrap"><svg viewBox="0 0 12 12" style="display:inline-block;width:.8em;min-width:0" aria-hidden="true">'
             f'<rect class="{arm}" width="12" height="12" rx="2"/></svg> {NAMES[arm]}: {meaning[arm]}</span>' for arm in NAMES]
    return '<p>' + ' &ensp; '.join(items) + '</p>'


def html_table(result):
    old, tokens = result["source_version"], result["answer_tokens"]
    body = []
    for row in result["ttft"]:
        first, *others = cells(row)
        body.append(f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in others) + "</tr>")
    return f"""<table>
<thead><tr><th rowspan="2" scope="col">Prefix<br>tokens</th>
<th colspan="4" scope="colgroup" class="group">Time to first token, median ms</th>
<th colspan="2" scope="colgroup" class="group">Carried answers as native</th>
<th colspan="2" scope="colgroup" class="group">{old} answers as native</th></tr>
<tr><th scope="col">native</th><th scope="col">hit</th><th scope="col">carried</th><th scope="col">speedup</th>
<th scope="col">first token</th><th scope="col">all {tokens}</th><th scope="col">first token</th><th scope="col">all {tokens}</th></tr></thead>
<tbody>{"".join(body)}</tbody></table>"""


def page(result):
    rows = result["ttft"]
    old, new = result["source_version"], result["target_version"]
    longest = rows[-1]
    machine = result["machine"]
    samples, suffix = rows[0]["samples"], rows[0]["suffix_tokens"]
    first_token = sum(row["answers_like_native"]["carried"]["first_token"] for row in rows) / len(rows)
    scraped = "".join(f"<tr><th scope='row' style='text-align:left'>{html.escape(name)}</th><td>{value:,.0f}</td></tr>"
                      for name, value in result["prometheus"].items() if value is not None)
    example = "".join(f"<p>{html.escape(NAMES[arm])}</p><blockquote>{html.escape(text)}</blockquote>"
                      for arm, text in result["example"].items())
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>carryover: {html.escape(result['model'])} {old} to {new}</title><style>{STYLE}</style></head>
<body>
<h1>The caches of {old} still serve after the update to {new}</h1>
<p class="soft">Model {html.escape(result['model'])}. Each value is the median of {samples} requests sent one at a time over gRPC and
timed by the client; {suffix} tokens follow the prefix.</p>
<ul class="figures">
<li><b>{result['median_speedup']:.1f}×</b><span>faster to the first token (median)</span></li>
<li><b>{ms(longest['native_ms'])} → {ms(longest['carried_ms'])} ms</b><span>with {longest['prefix_tokens']:,} tokens of prefix</span></li>
<li><b>{percent(first_token)}</b><span>of carried answers begin as native</span></li>
</ul>
<h2>Time to the first token by prefix length (ms)</h2>
{legend(result)}
<div class="scroll">{chart(result)}</div>
<h2>Every value</h2>
<div class="scroll">{html_table(result)}</div>
<p class="soft">Answers are greedy, {result['answer_tokens']} tokens long. “As native” compares with what {new} says when it computes
the prefix itself. The last two columns show how much the update changes answers in the first place: {old} with its own cache. The control, a same-version hit, gives the whole native answer in
{percent(hit_agreement(result))} of cases.</p>
<h2>One answer at {longest['prefix_tokens']:,} tokens</h2>
{example}
<h2>What Prometheus scraped</h2>
<table style="width:auto"><tbody>{scraped}</tbody></table>
<p class="soft">{html.escape(machine['cpu'])}, {machine['cores']} cores; weights {html.escape(result['weights_dtype'])}, cache
{html.escape(result['kv_dtype'])}; commit {html.escape(str(result['commit']))}; {html.escape(result['date'])}.</p>
</body></html>
"""
