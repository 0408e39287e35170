"""What ``dpprof watch`` serves, to whom, and what it refuses."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from children import wait_for
from live_sweeps import plan_clean, serving

from dpprof.cli import watch
from dpprof.report.live.builder import Builder
from dpprof.report.live.server import Server, Watch

HOSTILE = "</script><script>pwned=1</script> {{7*7}} a\u202eb"


def ask(server: Server, request: str) -> tuple[int, dict[str, str], bytes]:
    """Send the bytes of a request as they are; returns status, headers and content."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        connection.sendall(request.encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, content


def get(server: Server, path: str, method: str = "GET", host: str = "127.0.0.1"):
    return ask(server, f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n")


def snapshot(folder: Path) -> dict[Path, tuple[int, int]]:
    found = (path for path in folder.rglob("*"))
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in found}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("watched")
    sweep = plan_clean(root, "standard", "flash-bk", "opacus-hooks")
    sweep.end(0, 1.0)
    sweep.end(1, 1.0, outcome="crashed", message=HOSTILE)
    (root / "outside.txt").write_text("secret")
    (root / "results" / "link").symlink_to("/etc")
    (root / "results" / "status.txt").write_text("secret")
    with serving(root, Builder(root, pause_s=0.0, share=float("inf"))) as one:
        one.root = root
        yield one


@pytest.fixture(scope="module")
def html(server) -> str:
    """The page, once it has been made."""
    pages = []

    def is_made() -> bool:
        pages.append(get(server, "/")[2].decode())
        return '"version":null' not in pages[-1]

    wait_for(is_made)
    return pages[-1]


def test_the_status_is_json_that_no_browser_takes_for_a_page(server) -> None:
    status, headers, content = get(server, "/status.json")

    told = json.loads(content)
    assert status == 200
    assert headers["content-type"] == "application/json"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in headers
    assert told["counts"] == {"done": 1, "failed": 1, "running": 0, "remaining": 1, "planned": 3}
    assert told["failed"][0]["reason"] == f"SyntheticError in backward: {HOSTILE}"
    assert told["problem"] is None


def test_the_page_allows_no_more_than_the_file_but_to_ask_its_own_address(server, html) -> None:
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    rules = dict(rule.split(" ", 1) for rule in policy.replace("&#39;", "'").split("; "))

    assert rules.pop("connect-src") == "'self'"
    assert {name: value for name, value in rules.items() if "sha256" not in value} == {
        "default-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    scripts = rules["script-src"].split()
    assert all(re.fullmatch(r"'sha256-[A-Za-z0-9+/=]{44}'", one) for one in scripts)
    assert len(scripts) == html.count("<script>") == 3
    assert get(server, "/")[1]["content-security-policy"] == "frame-ancestors 'none'"


def test_the_page_has_the_results_so_far_as_data_alone(html) -> None:
    (told,) = re.findall(r'id="content">(.*?)</script>', html)
    content = json.loads(told)

    assert content["experiments"]["columns"]["method"] == ["standard", "flash-bk"]
    messages = content["failures"]["columns"]["error_message"]
    assert messages == [HOSTILE, "no result yet"]
    assert "pwned" not in html.replace(told, "")
    assert "<script>pwned" not in html


@pytest.mark.parametrize(
    "path",
    [
        "/../outside.txt",
        "/%2e%2e/outside.txt",
        "/..%2foutside.txt",
        "/results/status.txt",
        "/status.txt",
        "/link/passwd",
        "/results/link/passwd",
        "//etc/passwd",
        "/status.json/../../outside.txt",
        "/status.json/",
        "/%00",
        "file:///etc/passwd",
        "http://127.0.0.1/outside.txt",
    ],
)
def test_no_path_leads_to_a_file(server, path) -> None:
    status, headers, content = get(server, path)

    assert status == 404
    assert headers["content-type"].startswith("text/plain")
    assert content == b"404 there is only /, /status.json, /favicon.ico\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get"])
def test_other_methods_are_refused(server, method) -> None:
    status, headers, content = get(server, "/status.json", method)

    assert status == 405
    assert headers["allow"] == "get, head"
    assert b"counts" not in content


def test_head_has_the_headers_alone(server) -> None:
    status, headers, content = get(server, "/status.json", "HEAD")

    assert (status, content) == (200, b"")
    assert int(headers["content-length"]) > 0


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8642", "127.0.0.1.evil.example", "localhost@evil", "", "[::1]",
     "127.0.0.2", "127.0.0.1:8642:1", "localhost."],
)  # fmt: skip
def test_a_request_for_another_host_is_refused(server, host) -> None:
    status, _, content = get(server, "/status.json", host=host)

    assert status == 403
    assert content == b"403 the Host of a request must be 127.0.0.1 or localhost\n"


def test_a_request_for_no_host_or_for_two_is_refused(server) -> None:
    assert ask(server, "GET /status.json HTTP/1.0\r\n\r\n")[0] == 403
    twice = "Host: localhost\r\nHost: evil.example\r\n"
    assert ask(server, f"GET /status.json HTTP/1.1\r\n{twice}\r\n")[0] == 403


@pytest.mark.parametrize("host", ["localhost", "LocalHost:9000", "127.0.0.1:1"])
def test_a_port_that_ssh_forwards_is_allowed(server, host) -> None:
    assert get(server, "/status.json", host=host)[0] == 200


def test_it_listens_on_this_machines_own_address_alone(server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.server_port), timeout=10)


def test_what_is_no_request_ends_no_more_than_itself(server) -> None:
    assert ask(server, "nonsense \x1b[31m <b>\r\n\r\n")[1]["content-type"].startswith("text/plain")
    with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
        connection.sendall(b"GET /status.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert get(server, "/status.json")[0] == 200


def wait_until(watch_: Watch, condition) -> dict:
    """Ask for the status until something holds of it."""
    told = {}

    def holds() -> bool:
        told.clear()
        told.update(watch_.status())
        return condition(told)

    wait_for(holds)
    return told


def test_what_cannot_be_made_is_told_and_made_later(tmp_path) -> None:
    sweep = plan_clean(tmp_path, "standard", "flash-bk")
    sweep.end(0, 1.0)
    builder = Builder(tmp_path, pause_s=0.0, share=float("inf"))
    one = Watch(tmp_path, builder)
    wait_until(one, lambda told: told["page"])
    first = builder.page
    assert first.results == 1

    manifest = next(tmp_path.glob("results/plan/manifest-*.json"))
    text = manifest.read_text()
    manifest.write_text(text[:40])
    told = wait_until(one, lambda told: told["problem"])
    assert "is not a manifest" in told["problem"]
    assert told["counts"]["done"] == 1  # as it was

    manifest.write_text(text)
    sweep.end(1, 1.0)
    told = wait_until(one, lambda told: told["page"]["version"] != first.version)
    assert told["problem"] is None
    wait_until(one, lambda told: told["page"]["results"] == 2)
    one.close()


def test_a_process_that_was_killed_is_started_again(tmp_path) -> None:
    plan_clean(tmp_path, "standard")
    one = Watch(tmp_path, Builder(tmp_path, pause_s=0.0, share=float("inf")))
    before = set(psutil.Process().children())
    one.status()
    (child,) = set(psutil.Process().children()) - before
    child.kill()

    told = wait_until(one, lambda told: told["page_problem"])
    assert "is started again" in told["page_problem"]
    told = wait_until(one, lambda told: told["page"])
    assert told["page_problem"] is None
    one.close()


def refuse(capsys, *given: str) -> str:
    """Call the command with what it refuses; returns its last line."""
    with pytest.raises(SystemExit) as ended:
        watch.main(given)
    assert ended.value.code in {1, 2}
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("port", ["65536", "-1", "x", "1e3", "", "9" * 5000, "٣"])
def test_a_port_that_is_none_is_refused_with_what_is_allowed(capsys, port) -> None:
    said = refuse(capsys, f"--port={port}")

    assert "--port" in said
    assert said.endswith("it must be from 1 to 65535, or 0 for any that is free")


def test_a_port_that_is_taken_is_refused_by_name(capsys, tmp_path, server) -> None:
    plan_clean(tmp_path, "standard")
    taken = server.server_port
    said = refuse(capsys, f"--results={tmp_path / 'results'}", f"--port={taken}")

    assert said == (
        f"error: --port: {taken} is taken; give another up to 65535, or 0 for any that is free"
    )


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (".", "results: is not a folder; run snakemake, which makes it"),
        ("results", "is no sweep's results, since plan/ in it has no manifest-*.json"),
        ("other", "--results: other is not allowed; it must be a folder named results"),
    ],
)
def test_a_folder_that_is_no_sweeps_is_refused(capsys, tmp_path, monkeypatch, made, told) -> None:
    monkeypatch.chdir(tmp_path)
    Path(made).mkdir(exist_ok=True)

    assert told in refuse(capsys, f"--results={made if made == 'other' else 'results'}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_it_ends_with_its_children_and_has_written_nothing(tmp_path, number, code) -> None:
    plan_clean(tmp_path, "standard").end(0, 1.0)
    before = snapshot(tmp_path)
    program = "from dpprof.cli.main import main; main(['watch', '--port=0'])"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        said = process.stdout.readline()
        (url,) = re.findall(r"^(http://127\.0\.0\.1:\d+/) shows results; Ctrl-C ends it$", said)
        urllib.request.urlopen(url + "status.json", timeout=60).read()  # noqa: S310 (its own)
        (child,) = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, number)
        rest, errors = process.communicate(timeout=60)

    assert process.returncode == code
    assert rest == ""
    interrupted = "dpprof: interrupted; the page is no longer served; a sweep goes on\n"
    assert errors == (interrupted if number == signal.SIGINT else "")
    wait_for(lambda: not child.is_running())
    assert snapshot(tmp_path) == before
