"""The report's page as a Jinja template: no script, no request, one file."""

from __future__ import annotations

from agentcache.replay.drawing import page_head

__all__ = ["TEMPLATE"]

TEMPLATE = page_head("Simulation of {{ title }}")

TEMPLATE += """\
<p class="soft">{{ subtitle }}</p>
{% for trace in traces %}
<h2>{{ trace.name }}</h2>
<p class="soft">{{ trace.facts }}</p>
{% for figure in trace.figures %}
<section>
<h2>{{ figure.title }}</h2>
<p class="soft">{{ figure.caption }}</p>
<figure>{{ figure.svg }}</figure>
</section>
{% endfor %}
<section>
<h2>Runs</h2>
<div class="scroll"><table>
<thead><tr><th class="text">policy</th><th class="text">admission</th><th>hints</th>
<th>budget</th><th>hit rate</th><th>FLOPs saved</th><th>computed p50</th><th>p95</th>
<th>peak</th><th>evictions</th><th>states reused</th><th>KV reused</th><th>policy CPU</th></tr>
</thead>
<tbody>
{% for row in trace.rows %}
<tr><td class="text">{{ row.policy }}</td><td class="text">{{ row.admission }}</td>
<td>{{ row.hints }}</td>
{% for cell in row.cells %}
<td>{{ cell }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody></table></div>
</section>
{% endfor %}
{% if notes %}
<section>
<h2>Left out</h2>
<ul>{% for note in notes %}<li>{{ note }}</li>{% endfor %}</ul>
</section>
{% endif %}
</main>
</body>
</html>
"""
