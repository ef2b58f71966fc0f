"""Templates of model folders are bounded in time and memory, and kept from Python's internals."""

import json
import resource
import time
from functools import partial

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from afm_mlx.errors import TokenizerError
from afm_mlx.tokenizer import template_sandbox
from afm_mlx.tokenizer.chat_template import V6_TEMPLATE, ChatTemplate
from tests.tools.cases import each

USER = {"role": "user", "content": "Hi <b>"}

DOUBLED = """
{%- set ns = namespace(x='aaaaaaaa') %}
{%- for i in range(60) %}{% set ns.x = OP %}{% endfor %}
{{- ns.x | length }}"""
BOMBS = {
    "power": "{{ 10**(10**9) }}",
    "text times": "{{ 'a' * 10**10 }}",
    "list times": "{{ [0] * 10**10 }}",
    "range": "{{ range(10**9) | list }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "block": "{% set x %}{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endset %}",
    "doubled +": DOUBLED.replace("OP", "ns.x + ns.x"),
    "doubled ~": DOUBLED.replace("OP", "ns.x ~ ns.x"),
    "doubled list": DOUBLED.replace("OP", "[ns.x, ns.x]"),
    "doubled dict": DOUBLED.replace("OP", "dict(a=ns.x, b=ns.x)"),
    "doubled tuple": DOUBLED.replace("OP", "(ns.x, ns.x)"),
    "doubled join": DOUBLED.replace("OP", "[ns.x, ns.x] | join"),
    "doubled format": DOUBLED.replace("OP", "'%s%s' | format(ns.x, ns.x)"),
    "doubled str.format": DOUBLED.replace("OP", "'{0}{0}'.format(ns.x)"),
    "doubled %": DOUBLED.replace("OP", "'%s%s' % (ns.x, ns.x)"),
    "doubled replace": DOUBLED.replace("OP", "ns.x.replace('a', 'aa')"),
    "doubled filter": DOUBLED.replace("OP", "ns.x | replace('a', 'aa')"),
    "namespaces": DOUBLED.replace("OP", "namespace(a=ns.x, b=ns.x)") + "{{ ns.x }}{{ 'a' * 10**10 }}",
    "center": "{{ 'a' | center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "indent": "{{ ('\\n' * 999999) | indent(9999) }}",
    "expandtabs": "{{ ('\\t' * 999999).expandtabs(9999) }}",
    "replace": "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
    "join": "{{ (['a' * 999999] * 9999) | join }}",
    "str.join": "{{ ''.join((['a' * 999999] * 9999) | select) }}",
    "format": "{{ '%10000000000d' | format(1) }}",
    "%": "{{ '%*d' % (10**10, 1) }}",
    "str.format": "{{ '{:>{w}}'.format(1, w=10**10) }}",
    "split": "{{ ('é\\u4e00' * 9999999) | list | length }}",
    "tojson": "{{ [[[1]]] | tojson(indent=10**10) }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "round": "{{ 1.5 | round(10**10, 'ceil') }}",
    "slice": "{{ [1] | slice(10**10) | list }}",
    "batch": "{{ [1] | batch(10**10, 0) | list }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "endless macro": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "compared": DOUBLED.replace("OP", "[ns.x, ns.x]") + "{{ ns.x == ns.x }}",
    "hexadecimal": "{{ 0x" + "f" * 20000 + " * 0x" + "f" * 20000 + " }}",
    "digits": "{{ " + "9" * 5000 + " }}",
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "blocks": "{% if a %}" * 200 + "{% endif %}" * 200,
    "source": "x" * 300_000,
    "statement": "{% break %}",
    "other template": "{% extends 'x' %}",
    "class": "{{ ''.__class__.__mro__ }}",
    "change": "{{ messages.append(1) }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "globals of Jinja's own": "{{ lipsum.__globals__['os'].getcwd() }}",
    "class in a format": "{{ '{0.__class__}'.format(messages) }}",
}  # fmt: skip


@each("name", list(BOMBS))
def test_what_takes_too_much_or_is_forbidden_is_refused(name):
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises(TokenizerError, match=r"template (failed|is not valid)") as failure:
        ChatTemplate(BOMBS[name]).render([USER])
    assert len(str(failure.value)) < 1000
    assert time.thread_time() - start < 8
    # Kilobytes; a Mac counts in bytes, which makes the bound loose there.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000


SAME = [
    V6_TEMPLATE + " ",
    """{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ m.role ~ ': ' ~ m.content | trim }}
    {% else %}none{% endfor %}""",
    """{% set ns = namespace(n=0) %}{% for m in messages if m.content %}{% set ns.n = ns.n + 1 %}
    {% endfor %}{{ ns.n }}""",
    "{{ messages | map(attribute='role') | join(', ') }}{{ messages[1:] | length }}{{ 'a b'.split() | last }}",
    """{% macro f(x, y=2) %}<{{ x * y }}>{{ caller() if caller }}{% endmacro %}{{ f(3) }}
    {% call f('a') %}b{% endcall %}""",
    """{% for k, v in {'a': 1, 'b': [1, (2, 3)]}.items() %}
    {{ k }}={{ v | tojson }}{{ '%s-%05d' | format(k, 7) }}{% endfor %}""",
    """{% for m in messages recursive %}{{ m.role }}{{ loop(m.inner) if m.inner }}{% endfor %}
    {{ 7 // 2 }}{{ 2 ** 10 }}""",
    """{{ 'abc' | indent(2, first=true) | upper }}{{ [3, 1, 2] | sort | first }}
    {{ '{:>5}|{}'.format(1, 'x') }}""",
    """{% for a in range(9) %}{% if a == 3 %}{% continue %}{% elif a > 5 %}{% break %}{% endif %}
    {{ a }}{% endfor %}""",
    """{% set x %}a{{ messages | length }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}
    {{ none }}{{ 1.5 }}{{ [1, 'a'] }}""",
    """{{ ('a', 'b') | join }}{% set a, b = 1, 2 %}{{ a }}{{ b }}{{ 'x' in ['x'] }}
    {{ cycler('a', 'b').next() }}{{ missing }}""",
    "{{ {'é': '日本<'} | tojson(ensure_ascii=true) }}{{ 'é<' | tojson }}",
]


@each("source", SAME)
def test_renders_what_jinjas_own_sandbox_renders(source):
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    messages = [USER, {"role": "assistant", "content": "x\n", "inner": [{"role": "tool"}]}]
    expected = environment.from_string(source).render(messages=messages)
    assert ChatTemplate(source).render(messages) == expected


def test_a_long_chat_is_no_bomb(monkeypatch):
    monkeypatch.setattr(template_sandbox, "STEPS", 100)
    source = "{% for m in messages %}{{ m.role + ': ' + m.content | trim ~ '\n' }}{% endfor %}"
    messages = [{"role": "user", "content": f"{i} " * 50} for i in range(300)]
    assert ChatTemplate(source).render(messages).count("\n") == 300
