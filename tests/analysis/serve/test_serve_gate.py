"""Test which requests the server refuses."""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

import pytest

from megatron.analysis.__main__ import main
from megatron.analysis.serve import server
from megatron.analysis.serve.gate import Gate, is_local, new_token

TOKEN = "a token of the test"


def application(environ, start):
    start("200 OK", [("Content-Type", "text/plain")])
    return [b"secret"]


def ask(gate, **environ):
    """Return the status, the headers and the content of the answer to a request."""
    answers = []
    parts = {"HTTP_HOST": "127.0.0.1:8050", "PATH_INFO": "/", "QUERY_STRING": ""}
    content = b"".join(
        gate(parts | environ, lambda status, headers: answers.append((status, dict(headers))))
    )
    ((status, headers),) = answers
    return int(status.split()[0]), headers, content


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8050", 200),
        ("localhost:8050", 200),
        ("LOCALHOST", 200),
        ("[::1]:8050", 200),
        ("evil.example:8050", 400),
        ("127.0.0.1.evil.example", 400),
        ("", 400),
    ],
)
def test_the_host_header_must_name_the_server(host, status):
    assert ask(Gate(application, "127.0.0.1"), HTTP_HOST=host)[0] == status


def test_a_token_is_required_once_and_then_kept_in_a_cookie():
    gate = Gate(application, "0.0.0.0", TOKEN)
    for query in ("", "token=", "token=wrong", "token=" + TOKEN.upper().replace(" ", "+")):
        status, _, content = ask(gate, QUERY_STRING=query)
        assert (status, b"secret" in content) == (403, False)
    query = "v=map&token=" + TOKEN.replace(" ", "+")
    status, headers, _ = ask(gate, QUERY_STRING=query, HTTP_HOST="node7:8050")
    assert (status, headers["Location"]) == (303, "/?v=map")
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie  # a link in another page must open the explorer
    assert TOKEN not in cookie
    pair = cookie.partition(";")[0]
    assert ask(gate, HTTP_COOKIE=pair)[2] == b"secret"
    assert ask(gate, HTTP_COOKIE=pair[:-1] + "x")[0] == 403
    assert ask(gate, HTTP_COOKIE="explorer_0=\x00;;=")[0] == 403


def test_the_way_without_the_token_stays_on_the_server():
    gate = Gate(application, "0.0.0.0", TOKEN)
    query = "token=" + TOKEN.replace(" ", "+")
    for path in ("//evil.example/x", "/\\evil.example"):
        _, headers, _ = ask(gate, QUERY_STRING=query, PATH_INFO=path)
        assert urlsplit(headers["Location"]).netloc == ""
        assert headers["Location"].startswith("/evil.example")


def test_the_way_without_the_token_is_one_header_line():
    gate = Gate(application, "0.0.0.0", TOKEN)
    query = "token=" + TOKEN.replace(" ", "+")
    for path in ("/\t/evil.example", "/a\r\nSet-Cookie: x=y", "/?v=\xe9#", "/\x00"):
        _, headers, _ = ask(gate, QUERY_STRING=query, PATH_INFO=path)
        assert re.fullmatch(r"/[!-~]*", headers["Location"])
        assert not headers["Location"].startswith("//")


def test_servers_on_two_ports_have_two_cookies():
    gate = Gate(application, "0.0.0.0", TOKEN)
    query = "token=" + TOKEN.replace(" ", "+")
    names = [
        ask(gate, QUERY_STRING=query, SERVER_PORT=port)[1]["Set-Cookie"].partition("=")[0]
        for port in ("8050", "8051")
    ]
    assert names == ["explorer_8050", "explorer_8051"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"HTTP_SEC_FETCH_SITE": "none"}, 200),
        ({"HTTP_SEC_FETCH_SITE": "same-origin", "HTTP_ORIGIN": "http://127.0.0.1:8050"}, 200),
        ({"HTTP_SEC_FETCH_SITE": "cross-site", "HTTP_SEC_FETCH_MODE": "no-cors"}, 403),
        ({"HTTP_SEC_FETCH_SITE": "same-site", "HTTP_SEC_FETCH_MODE": "cors"}, 403),
        ({"HTTP_ORIGIN": "http://evil.example", "REQUEST_METHOD": "POST"}, 403),
        ({"HTTP_ORIGIN": "http://127.0.0.1:9999", "REQUEST_METHOD": "POST"}, 403),
        ({"HTTP_ORIGIN": "null", "REQUEST_METHOD": "POST"}, 403),
        ({"HTTP_SEC_FETCH_DEST": "document"}, 200),
        ({"HTTP_SEC_FETCH_DEST": "iframe"}, 403),
        ({"HTTP_SEC_FETCH_DEST": "document", "REQUEST_METHOD": "POST"}, 403),
    ],
)
def test_a_foreign_page_may_only_link_to_the_explorer(headers, status):
    link = {"HTTP_SEC_FETCH_SITE": "cross-site", "HTTP_SEC_FETCH_MODE": "navigate"}
    more = link if "HTTP_SEC_FETCH_DEST" in headers else {}
    environ = {"REQUEST_METHOD": "GET"} | more | headers
    assert ask(Gate(application, "127.0.0.1"), **environ)[0] == status


def test_every_answer_forbids_other_sources():
    for gate in (Gate(application, "127.0.0.1"), Gate(application, "0.0.0.0", TOKEN)):
        headers = ask(gate)[1]
        assert "default-src 'self'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_local_addresses_are_known_and_tokens_differ():
    assert [*map(is_local, ("127.0.0.1", "127.3.2.1", "::1", "localhost"))] == [True] * 4
    assert [*map(is_local, ("0.0.0.0", "10.0.0.3", "node7", "::"))] == [False] * 4
    assert len(new_token()) >= 32
    assert new_token() != new_token()


def test_a_taken_port_is_an_error_with_a_remedy(dump, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(dump), "--port", str(port), "--cache", "none"]) == 2
    error = capsys.readouterr().err
    assert f"port {port} of 127.0.0.1 is taken" in error
    assert "--port 0" in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], "give a number from 0 to 65535"),
        (["--token", "short"], "give 16 or more"),
        (["--formats", "mxfp5"], "mxfp5"),
        (["--logs", "/nowhere"], "no folder /nowhere"),
        (["--study", "nowhere.parquet"], "there is no such file"),
        (["--study", __file__], "is not a table of a study"),
        (["--port", "-1"], "give a number from 0 to 65535"),
        (["--cache", __file__], "cannot be used as a cache"),
    ],
)
def test_a_wrong_option_is_named(dump, capsys, options, words):
    assert main(["serve", str(dump), *options]) == 2
    assert words in capsys.readouterr().err


def test_a_name_of_several_addresses_is_served(tmp_path, capsys, monkeypatch):
    class Several:
        """A stand-in for waitress's server of a name with an IPv4 and an IPv6 address."""

        effective_listen = (("127.0.0.1", 8123), ("::1", 8123))

        def run(self):
            raise KeyboardInterrupt

        def close(self):
            pass

    monkeypatch.setattr(server, "_listen", lambda *_: Several())
    options = server.Options(tmp_path, ["mxfp8"], None, "localhost", 0, "a token & more + #")
    assert server.serve(options) == 0
    assert "http://localhost:8123/?token=a+token+%26+more+%2B+%23\n" in capsys.readouterr().out


def test_a_missing_package_is_named(dump, capsys, monkeypatch):
    from megatron import optional_packages

    monkeypatch.setattr(optional_packages, "find_spec", lambda name: None)
    assert main(["serve", str(dump)]) == 2
    assert "the command serve needs the dash package" in capsys.readouterr().err
