"""The report as JUnit XML and as a Markdown page."""

from __future__ import annotations

from xml.etree import ElementTree

from skyctl.smoke import SmokeReport, StepResult, StepStatus, junit_xml, markdown

PASSED = StepResult("up", StepStatus.PASSED, 45.25, "2 replicas ready")
SKIPPED = StepResult("verify", StepStatus.SKIPPED, 0.0, "not tried")
FAILED = StepResult("generate", StepStatus.FAILED, 1.5, "a <b> & | c\x00", "look: skyctl logs")
BROKEN = StepResult("down", StepStatus.ERROR, 0.5, "KeyError: 'x'")


def report(*steps: StepResult, logs: dict[str, list[str]] | None = None) -> SmokeReport:
    return SmokeReport("tiny", steps, began_at=0.0, seconds=50.0, logs=logs or {})


def parsed(given: SmokeReport) -> ElementTree.Element:
    suite = ElementTree.fromstring(junit_xml(given)).find("testsuite")
    assert suite is not None
    return suite


def test_junit_counts_and_times_every_step() -> None:
    suite = parsed(report(PASSED, FAILED, SKIPPED, BROKEN))
    assert suite.attrib == {
        "name": "skyctl smoke: tiny",
        "tests": "4",
        "failures": "1",
        "errors": "1",
        "skipped": "1",
        "time": "50.000",
    }
    times = {case.get("name"): case.get("time") for case in suite}
    assert times == {"up": "45.250", "generate": "1.500", "verify": "0.000", "down": "0.500"}


def test_junit_says_how_each_step_ended() -> None:
    up, generate, verify, down = parsed(report(PASSED, FAILED, SKIPPED, BROKEN))
    assert up.findtext("system-out") == "2 replicas ready"
    failure = generate.find("failure")
    assert failure is not None and failure.text is not None
    assert "look: skyctl logs" in failure.text and "a <b> & | c" in failure.text
    assert verify.find("skipped") is not None and down.find("error") is not None


def test_the_logs_go_with_the_step_that_failed_and_are_valid_xml_whatever_they_hold() -> None:
    logs = {"tiny-0": ["ok", "\x1b[31mValueError: <\x00>\x1b[0m"]}
    suite = parsed(report(PASSED, FAILED, BROKEN, logs=logs))
    texts = [case.findtext("system-err") for case in suite]
    assert texts[0] is None and texts[2] is None
    assert texts[1] is not None and "── tiny-0" in texts[1] and "ValueError: <" in texts[1]


def test_markdown_has_a_verdict_a_table_and_folded_logs() -> None:
    page = markdown(report(PASSED, FAILED, SKIPPED, logs={"tiny-0": ["a <b>"]}))
    lines = page.splitlines()
    assert lines[0] == "### ❌ Fleet `tiny` failed in 50.0 s"
    assert "| ✅ | up | 45.2 s | 2 replicas ready |" in lines
    assert any(
        line.startswith("| ❌ | generate | 1.5 s | a &lt;b&gt; &amp; \\| c") for line in lines
    )
    assert "| ⏭️ | verify |  | not tried |" in lines
    assert "Next: look: skyctl logs" in lines
    assert "<pre>a &lt;b&gt;</pre>" in lines
    assert markdown(report(PASSED)).startswith("### ✅ Fleet `tiny` passed")


def test_a_skipped_step_does_not_fail_the_whole() -> None:
    assert report(PASSED, SKIPPED).passed
    assert not report(PASSED, BROKEN).passed
    assert report(PASSED, BROKEN, FAILED).first_failure is BROKEN
