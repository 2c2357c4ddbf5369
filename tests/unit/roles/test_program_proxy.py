"""What an env worker reports of the requests that agent programs send."""

from types import SimpleNamespace

from hpcrl.roles.program_proxy import MAX_REPORTED_NOTICES, RequestReport


def report_notices(*notices):
    emitted = []
    report = RequestReport(emitted.append)
    for domain, notice in notices:
        report.report(SimpleNamespace(domain=domain, trajectory=f"{domain}/0/0"), notice)
    return emitted


def test_a_notice_is_reported_once_for_each_domain():
    emitted = report_notices(("lake", "seed"), ("lake", "seed"), ("desk", "seed"), ("lake", "user"))
    assert [(event.domain, event.id) for event in emitted] == [
        ("lake", "lake/0/0"),
        ("desk", "desk/0/0"),
        ("lake", "lake/0/0"),
    ]
    assert emitted[0].detail == "programs of domain 'lake' send seed"
    assert emitted[2].detail == "programs of domain 'lake' send user"


def test_a_program_that_invents_fields_cannot_fill_the_disk():
    assert len(report_notices(*(("lake", f"f{number}") for number in range(10_000)))) == MAX_REPORTED_NOTICES
