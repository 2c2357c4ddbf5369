"""What an env worker reports of the requests that agent programs send."""

from types import SimpleNamespace

from hpcrl.roles.program_proxy import MAX_REPORTED_FIELDS, IgnoredFieldReport


def report_fields(*fields):
    emitted = []
    report = IgnoredFieldReport(emitted.append)
    for domain, name in fields:
        report.report_field(SimpleNamespace(domain=domain, trajectory=f"{domain}/0/0"), name)
    return emitted


def test_an_ignored_field_is_reported_once_for_each_domain():
    emitted = report_fields(("lake", "seed"), ("lake", "seed"), ("desk", "seed"), ("lake", "user"))
    assert [(event.domain, event.id) for event in emitted] == [
        ("lake", "lake/0/0"),
        ("desk", "desk/0/0"),
        ("lake", "lake/0/0"),
    ]
    assert "'seed'" in emitted[0].detail
    assert "'user'" in emitted[2].detail


def test_a_program_that_invents_fields_cannot_fill_the_disk():
    assert len(report_fields(*(("lake", f"f{number}") for number in range(10_000)))) == MAX_REPORTED_FIELDS
