"""The report's page as a Jinja template: no script, no request, one file."""

from __future__ import annotations

from agentcache.replay.drawing import page_head

__all__ = ["TEMPLATE"]

TEMPLATE = page_head("Replay on {{ model }}")

TEMPLATE += """\
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
