"""Chat templates that run on, or fill the memory, end with one line; those of models stay as they are."""

from __future__ import annotations

import pytest

from ikpy.errors import FileFormatError
from ikpy.vocab import ChatTemplate, template_limits
from ikpy.vocab.template_limits import CHARACTERS, STEPS

TEXT = f"makes more than {CHARACTERS} characters of text"
FEW = 1 << 17  # instead of STEPS, so that these take less than a second each
LOOP = f"runs on for more than {FEW} steps"
WIDTH = "a format's width is out of bounds"
LONG = "{% set s = 'ab' * 5000000 %}"  # 10 M characters, which are allowed
SHARED = "{% set n = namespace(x=['ab']) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
DOUBLED = "{%% set n = namespace(s='ab') %%}{%% for i in range(60) %%}{%% set n.s = %s %%}{%% endfor %%}"
RANGES = "{% for i in range(99999) %}{% for j in range(99999) %}"
ENDS = "{% endfor %}{% endfor %}"

ENDLESS = {
    "product": ("{{ 'a' * 10**9 }}", TEXT),
    "product of a list": ("{{ ([1] * 10**9) | length }}", TEXT),
    "product of products": ("{{ 'a' * 10**8 * 10**8 }}", TEXT),
    "range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "nested loops": (RANGES + ENDS, LOOP),
    "nested loops with text": (RANGES + "{{ i }} and {{ j }}" + ENDS, LOOP),
    "filtered loop": (RANGES.replace("99999) %}{% for j in range(99999)", "99999) %}{% for j in range(99999) if j < 0")
                      + ENDS, LOOP),
    "recursive loop": ("{% for i in range(999) recursive %}{{ loop(range(999)) if loop.depth < 4 }}{% endfor %}", LOOP),
    "doubled by +": (DOUBLED % "n.s + n.s", TEXT),
    "doubled by ~": (DOUBLED % "n.s ~ n.s", TEXT),
    "doubled by a block": (
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set t %}{{ n.s }}{{ n.s }}{% endset %}"
        "{% set n.s = t %}{% endfor %}",
        TEXT,
    ),
    "doubled list": (DOUBLED.replace("'ab'", "[1]") % "n.s + n.s", TEXT),
    "shared lists as text": (SHARED + "{{ n.x }}", TEXT),
    "shared lists joined": (SHARED + "{{ n.x | join }}", TEXT),
    "shared lists as JSON": (SHARED + "{{ n.x | tojson }}", TEXT),
    "shared lists of map as JSON": (SHARED + "{{ [n.x] | map('list') | tojson }}", TEXT),
    "shared lists by ~": (SHARED + "{{ n.x ~ 1 }}", TEXT),
    "shared lists by %": (SHARED + "{{ '%s' % n.x }}", TEXT),
    "shared lists in upper case": (SHARED + "{{ n.x | upper }}", TEXT),
    "summed lists": ("{{ ([range(99999) | list] * 99999) | sum(start=[]) | length }}", TEXT),
    "macros": ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", LOOP),
    "slices": (LONG + "{% for i in range(99999) %}{{ s[i:] | length }}{% endfor %}", TEXT),
    "searches": (LONG + "{% for i in range(99999) %}{{ 'c' in s }}{% endfor %}", "runs for more than 0.5 seconds"),
    "replaced": (LONG + "{{ s.replace('a', s) }}", TEXT),
    "replaced by a filter": (LONG + "{{ s | replace('a', s) }}", TEXT),
    "joined": (LONG + "{{ s.join([s] * 100) }}", TEXT),
    "joined by a filter": (LONG + "{{ ([s] * 100) | join(s) }}", TEXT),
    "translated": (LONG + "{{ s.translate({97: s}) }}", TEXT),
    "tabs": ("{{ '\t\t'.expandtabs(10**9) }}", TEXT),
    "centred": ("{{ 'a'.center(10**9) }}", TEXT),
    "zeros": ("{{ '1'.zfill(10**10) }}", TEXT),
    "centred by a filter": ("{{ 'a' | center(10**9) }}", TEXT),
    "centred block": ("{% filter center(1000000000) %}a{% endfilter %}", TEXT),
    "indented": ("{{ 'a\n' | indent(1000000000) }}", TEXT),
    "indented JSON": ("{{ {'a': 1} | tojson(indent=1000000000) }}", TEXT),
    "wrapped": (LONG + "{{ s | wordwrap(1, wrapstring=s) }}", TEXT),
    "batches": ("{{ [1] | batch(10**10, 'x') | list }}", TEXT),
    "slices of a list": ("{{ [1] | slice(10**10) | list }}", TEXT),
    "width": ("{{ '%1000000000d' % 1 }}", WIDTH),
    "width of a filter": ("{{ '%1000000000d' | format(1) }}", WIDTH),
    "width given apart": ("{{ '%*d' % (10**9, 1) }}", WIDTH),
    "width of format": ("{{ '{:1000000000}'.format(1) }}", WIDTH),
    "width in a width": ("{{ '{:{}}'.format(1, 10**9) }}", WIDTH),
    "places": (LONG + "{{ ('{0}' * 1000).format(s) }}", TEXT),
    "named places": (LONG + "{{ ('%(a)s' * 1000) % {'a': s} }}", TEXT),
    "power": ("{{ 9 ** (9 ** 9) }}", "makes numbers of more than 65536 bits"),
    "squares": (
        "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "makes numbers of more than 65536 bits",
    ),
    "rounded": ("{{ 1.5 | round(10**9, 'ceil') }}", "makes numbers of more than 65536 bits"),
    "bytes": ("{{ (1).to_bytes(10**10) | length }}", TEXT),
    "times": ("{{ strftime_now('%Y' * 9999999) }}", TEXT),
    "random text": ("{{ lipsum(10**9) }}", "'lipsum' is undefined"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_template(name, monkeypatch):
    source, message = ENDLESS[name]
    monkeypatch.setattr(template_limits, "STEPS", FEW)
    if "seconds" in message:
        monkeypatch.setattr(template_limits, "SECONDS", 0.5)
    with pytest.raises(FileFormatError, match=f"^chat template, line [12]: .*({message})") as caught:
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    print(name, caught.value)
    assert "\n" not in str(caught.value)


def test_a_probe_that_runs_on_is_the_last(monkeypatch):
    monkeypatch.setattr(template_limits, "STEPS", FEW)
    loops = RANGES + ENDS
    template = ChatTemplate("{% if messages[0].content == 'probe' %}" + loops + "{% endif %}x")
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert template.render([{"role": "user", "content": "y"}]) == "x"
    with pytest.raises(FileFormatError, match=LOOP):
        template.render([{"role": "assistant", "content": None, "tool_calls": [call]}])


def test_long_conversations_are_no_endless_templates():
    """3 M characters of content, 10,000 messages and 200 tools stay far within the bounds."""
    source = (
        "{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}"
        "{% for m in messages %}{{ '<' + m.role + '>' }}{{ m.content | trim }}{{ '\\n' ~ loop.index ~ '{}'.format(1) }}"
        "{% if loop.last %}{{ loop.length }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a" * 300} for _ in range(10000)]
    tools = [{"name": f"t{n}", "parameters": {str(k): {"type": "string"} for k in range(20)}} for n in range(200)]
    text = ChatTemplate(source).render(messages, tools=tools)
    assert text.endswith("\n100001" + "10000")
    assert len(text) > 3_000_000


def test_the_usual_number_of_steps():
    with pytest.raises(FileFormatError, match=f"runs on for more than {STEPS} steps|for more than 10 seconds"):
        ChatTemplate(RANGES + ENDS).render([])


def test_every_rendering_starts_anew():
    template = ChatTemplate("{% for i in range(90000) %}{{ i }}{% endfor %}")
    for _ in range(STEPS // 90000 + 2):  # more than one rendering may take
        assert template.render([]).startswith("0123")
