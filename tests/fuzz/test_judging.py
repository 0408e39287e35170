"""The judge of hostile cases finds the harm that it looks for."""

from pathlib import Path

import psutil
import pytest


@pytest.fixture
def judging(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import judging  # noqa: PLC0415 (where it lies)

    # A fork begins with the memory of this process, which has run other tests.
    own = psutil.Process().memory_info().rss
    monkeypatch.setattr(judging, "BYTES", judging.BYTES + own)
    return judging


@pytest.mark.parametrize(
    ("kind", "harmless", "harmful"),
    [
        (".md", r"\[pwned\](javascript:pwned) &lt;pwned>", "[pwned](javascript:pwned)"),
        (".md", r"\`touch pwned\` | # pwned |", "| `touch pwned` |"),
        (".md", "&lt;pwned&gt;", "<pwned onload=pwned()>"),
        (".md", "x # pwned", "x\n# pwned"),
        (".tex", r"\textbackslash{}pwned\{\} \textasciicircum{}", r"\pwned{}"),
        (".html", '<script>x = "\\u003cpwned>"</script><p>&lt;pwned></p>', "<p><pwned></p>"),
        (".html", "<p>onload=pwned()</p>", "<p onload=pwned()></p>"),
    ],
)
def test_text_that_became_markup_is_found(judging, kind, harmless, harmful) -> None:
    assert not judging.find_markup(harmless, kind)
    assert judging.find_markup(harmful, kind)


def say(text: str, status: int = 1):
    def run(_case) -> int:
        print(text)
        return status

    return run


def write(path: str, text: str = "x"):
    def run(_case) -> int:
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text(text)
        return 0

    return run


def fail(_case) -> int:
    raise KeyError("x")


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (say("no"), None),
        (write("results/x.json"), None),
        (fail, "exit status 3, a traceback"),
        (say("no", 4), "exit status 4"),
        (say(""), "nothing said"),
        (say("\x1b[2J"), "codes for a terminal"),
        (say("x" * 200), "201 letters"),
        (write("../x"), "changed ['x']"),
        (write("x"), "changed ['inside/x']"),
        (write("results/pwned"), "executed ["),
        (write("results/report.md", "<pwned>"), "markup in ['report.md']"),
    ],
)
def test_harm_is_found(judging, run, found) -> None:
    kind = judging.Kind(None, lambda _case: None, run, (0, 1), writes=True, letters=100)
    wrong = judging.judge(kind, None)

    assert wrong is None if found is None else wrong.startswith(found)
