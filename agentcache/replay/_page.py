"""The report's page as a Jinja template: no script, no request, one file."""

from __future__ import annotations

__all__ = ["TEMPLATE"]

TEMPLATE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>Replay on {{ model }}</title>
<style>
:root { color-scheme: light; --ink: #212529; --soft: #5c6670; --line: #e3e7eb; --good: #2b8a3e;
 --bad: #c92a2a; --accent: #1c6fb8; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f9; color: var(--ink);
 font: 15px/1.5 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 4px; }
p { margin: 0 0 10px; }
.soft { color: var(--soft); }
.good { color: var(--good); }
.bad { color: var(--bad); }
.note { border-left: 3px solid var(--bad); padding: 2px 0 2px 12px; margin: 14px 0 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(225px, 1fr)); gap: 12px;
 margin: 22px 0 12px; }
.card, section { background: #fff; border: 1px solid var(--line); border-radius: 8px; }
.card { padding: 13px 16px; }
.card .label { color: var(--soft); font-size: 13px; }
.card .value { font-size: 25px; font-weight: 600; line-height: 1.3; }
.card .more { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
section { padding: 18px 20px; margin-top: 12px; }
figure { margin: 10px 0 0; overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 640px; height: auto; }
figure svg text { font-family: system-ui, "Segoe UI", Roboto, Helvetica, Arial,
 sans-serif !important; }
.scroll { overflow: auto; max-height: 560px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 0 5px 18px; border-bottom: 1px solid var(--line);
 vertical-align: top; white-space: nowrap; }
th { font-weight: 600; font-size: 13px; color: var(--soft); position: sticky; top: 0;
 background: #fff; }
th.text, td.text { text-align: left; padding-left: 0; min-width: 170px;
 white-space: normal; overflow-wrap: anywhere; }
td.text + td.text, th.text + th.text { padding-left: 18px; }
tr:last-child td { border-bottom: 0; }
ul { margin: 6px 0 0; padding-left: 20px; }
li { margin: 2px 0; overflow-wrap: anywhere; }
h3 { font-size: 15px; margin: 16px 0 0; }
code { font: 12.5px/1.4 ui-monospace, "SF Mono", Menlo, Consolas, monospace; background: #f1f3f5;
 padding: 1px 4px; border-radius: 3px; white-space: pre-wrap; overflow-wrap: anywhere; }
@media print { body { background: #fff; } section, .card { break-inside: avoid; }
 .scroll { max-height: none; } }
</style>
</head>
<body>
<main>
<h1>Replay on {{ model }}</h1>
<p class="soft">{{ subtitle }}</p>
{% if stopped_early is not none %}
<p class="note"><strong>Stopped early:</strong> {{ stopped_early }}</p>
{% endif %}
<div class="cards">
{% for card in cards %}
<div class="card"><div class="label">{{ card.label }}</div>
<div class="value {{ card.tone }}">{{ card.value }}</div>
<div class="more">{{ card.more }}</div></div>
{% endfor %}
</div>
{% if not figures %}
<section><p>No calls were replayed, so there is nothing to plot.</p></section>
{% endif %}
{% for figure in figures %}
<section>
<h2>{{ figure.title }}</h2>
<p class="soft">{{ figure.caption }}</p>
<figure>{{ figure.svg }}</figure>
</section>
{% endfor %}
{% if trajectories %}
<section>
<h2>Trajectories</h2>
<div class="scroll"><table>
<thead><tr><th class="text">trajectory</th><th>calls</th><th>prompt tokens</th>
<th>cached</th><th>computed</th><th>computed per call</th><th>hit rate</th></tr></thead>
<tbody>
{% for row in trajectories %}
<tr><td class="text">{{ row.name }}</td>
{% for cell in row.cells %}
<td>{{ cell }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody></table></div>
</section>
{% endif %}
<section>
<h2>Verification</h2>
<p>Calls computed again without the cache, and compared: the most likely id at every position, the
logits (error in units of their standard deviation) and every layer's state (relative error).
Errors up to {{ tolerance }} count as equal.</p>
<p class="{{ verify_tone }}"><strong>{{ verify }}</strong></p>
{% if failures %}
<div class="scroll"><table>
<thead><tr><th class="text">trajectory</th><th>call</th><th>positions</th><th>differing ids</th>
<th>logits</th><th>states</th></tr></thead>
<tbody>
{% for row in failures %}
<tr><td class="text">{{ row.name }}</td>
{% for cell in row.cells %}
<td>{{ cell }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody></table></div>
{% endif %}
</section>
<section>
<h2>Misses</h2>
{% if misses %}
<p class="soft">Why calls reused less than their whole prompt, and the first examples of each
reason.</p>
<div class="scroll"><table>
<thead><tr><th class="text">reason</th><th>calls</th><th>tokens computed</th></tr></thead>
<tbody>
{% for miss in misses %}
<tr><td class="text"><strong>{{ miss.reason }}</strong>
<ul>
{% for example in miss.examples %}
<li>{{ example.where }}
{% if example.expected is not none %}<br>expected <code>{{ example.expected }}</code>{% endif %}
{% if example.got is not none %}<br>got <code>{{ example.got }}</code>{% endif %}
</li>
{% endfor %}
</ul></td><td>{{ miss.calls }}</td><td>{{ miss.tokens }}</td></tr>
{% endfor %}
</tbody></table></div>
{% else %}
<p>None.</p>
{% endif %}
</section>
<section>
<h2>Input files</h2>
<p>{{ files }}</p>
{% if rejected %}
<h3>Rejected</h3>
<ul>{% for message in rejected %}<li>{{ message }}</li>{% endfor %}</ul>
{% endif %}
{% if notes %}
<h3>Skipped or read in part</h3>
<ul>{% for message in notes %}<li>{{ message }}</li>{% endfor %}</ul>
{% endif %}
</section>
</main>
</body>
</html>
"""
