"""Renderings that end, whatever the template does: other episodes of the process wait meanwhile."""

import threading
import time
from pathlib import Path

import pytest

from hpcrl.errors import TemplateLimitError
from hpcrl.models import jinja_template
from hpcrl.models.jinja_template import compile_template, render_template

LOOPS = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
CALLS_ITSELF = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
GROWS = "{% for i in range(100000) %}{% for j in range(1000) %}abcdefghij{% endfor %}{% endfor %}"
GROWS_IN_A_MACRO = f"{{% macro f() %}}{GROWS}{{% endmacro %}}{{{{ f() | length }}}}"


@pytest.fixture(autouse=True)
def short_limits(monkeypatch):
    monkeypatch.setattr(jinja_template, "MAX_RENDER_S", 0.2)
    monkeypatch.setattr(jinja_template, "RENDER_WATCH_INTERVAL_S", 0.02)
    monkeypatch.setattr(jinja_template, "MAX_RENDERED_CHARS", 1 << 20)


def render(text, **variables):
    return render_template(compile_template(text, source=Path("m")), variables)


@pytest.mark.parametrize("text", [LOOPS, CALLS_ITSELF, GROWS_IN_A_MACRO])
def test_a_rendering_that_takes_too_long_is_stopped(text):
    with pytest.raises(TemplateLimitError, match=r"did not render a conversation in 0.2 s"):
        render(text)
    assert render("{{ a }}", a=1) == "1"


@pytest.mark.parametrize("text", [GROWS, "{{ 'ab' * 10 ** 9 }}", "{{ 10 ** 9 * [1] }}", "{{ 2 ** (10 ** 9) }}"])
def test_a_rendering_that_is_too_large_is_stopped(text):
    with pytest.raises(TemplateLimitError, match="more than 1 Mi characters"):
        render(text)


def test_time_that_others_use_does_not_count():
    assert render("{{ wait(0.5) }}", wait=time.sleep) == "None"


def test_renderings_of_several_threads_are_stopped_one_by_one():
    ends = []

    def stop_one():
        try:
            render(LOOPS)
        except TemplateLimitError:
            ends.append(threading.get_ident())

    threads = [threading.Thread(target=stop_one) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert render("{{ a * 3 }}", a="b") == "bbb"
    for thread in threads:
        thread.join()
    assert sorted(ends) == sorted(thread.ident for thread in threads)
