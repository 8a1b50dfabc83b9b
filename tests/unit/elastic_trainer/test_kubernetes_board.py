"""The board as a ConfigMap, against a small real server."""

from __future__ import annotations

import contextlib
import errno
import time

import pytest
from board_bench import account, board_of, certificate, server
from config_map_server import (
    AFTER,
    BEFORE,
    FIRST_TOKEN,
    SECOND_TOKEN,
    Fault,
    authority,
    serving,
)
from hypothesis import given
from hypothesis import strategies as st
from test_file_board import replaced

from elastic_trainer.board.kubernetes_board import (
    SWAP,
    ApiServer,
    BoardDeniedError,
    KubernetesBoard,
    NotInPodError,
    NotSentError,
)
from elastic_trainer.board.state import BoardState, update

__all__ = ["account", "certificate", "server"]  # fixtures

PATH = "/api/v1/namespaces/train/configmaps/llama-board"


@pytest.fixture
def board(server, account) -> KubernetesBoard:
    return board_of(server, account)


def test_what_is_written_is_readable_and_the_rest_of_the_object_is_kept(board, server):
    server.objects[PATH] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "llama-board",
            "resourceVersion": "5",
            "labels": {"holdfast.dev/run": "llama"},
            "annotations": {"holdfast.dev/keep": "true"},
            "ownerReferences": [{"name": "x"}],
            "managedFields": [{"manager": "kubectl"}],
        },
    }
    assert board.get_state() is None, "it is there, but nothing was ever written"
    state = BoardState(epoch=3).encode()
    assert board.set_state(state)[2]
    kept = server.objects[PATH]
    assert kept["data"]["state"] == state.decode()
    assert kept["metadata"]["labels"] == {"holdfast.dev/run": "llama"}
    assert kept["metadata"]["annotations"]["holdfast.dev/keep"] == "true"
    assert kept["metadata"]["ownerReferences"] == [{"name": "x"}]
    assert "managedFields" not in kept["metadata"]
    assert "POST" not in {method for method, _ in server.requests}, "no right to create was needed"


def test_a_swap_of_a_writer_alone_is_one_request_over_one_connection(board, server):
    _, token, _ = board.set_state(b"0")
    server.requests.clear()
    for count in range(5):
        _, token, won = board.set_state(b"%d" % count, token)
        assert won
    assert [method for method, _ in server.requests] == ["PUT"] * 5
    assert server.connections == 1


@pytest.mark.parametrize("status", [None, 500, 504])
@pytest.mark.parametrize("first", [True, False])
def test_a_lost_reply_of_a_swap_that_happened_counts_as_won(board, server, status, first):
    token = None if first else board.set_state(b"before")[1]
    server.faults.append(Fault(AFTER, status))
    content, newer, won = board.set_state(b"mine", token)
    assert (content, won) == (b"mine", True)
    assert board.get_state() == (b"mine", newer)


@pytest.mark.parametrize("status", [None, 500, 503])
def test_a_swap_that_was_not_carried_out_is_sent_again(board, server, status):
    token = board.set_state(b"before")[1]
    server.faults.append(Fault(BEFORE, status, headers={"Retry-After": "1"}))
    assert board.set_state(b"mine", token)[2]
    assert board.get_state()[0] == b"mine"


def test_a_lost_reply_upon_which_others_have_built_is_an_error(board, server, account):
    token, other = board.set_state(b"before")[1], board_of(server, account)
    server.faults.append(Fault(AFTER))
    done = []

    def others() -> None:
        if done:  # the second time it is sent
            other.set_state(b"theirs", other.get_state()[1])
        else:
            done.append(1)
            server.meanwhile = others

    server.meanwhile = others
    with pytest.raises(OSError, match=f"Errno {errno.EIO}"):
        board.set_state(b"mine", token)
    assert board.get_state()[0] == b"theirs"


def test_a_swap_that_others_won_is_lost(board, server, account):
    token, other = board.set_state(b"before")[1], board_of(server, account)
    server.meanwhile = lambda: other.set_state(b"theirs", token)
    content, newer, won = board.set_state(b"mine", token)
    assert (content, won) == (b"theirs", False)
    assert other.get_state() == (b"theirs", newer)


def test_a_board_made_by_others_meanwhile_is_lost(board, server, account):
    other = board_of(server, account)
    server.meanwhile = lambda: other.set_state(b"theirs")
    content, _, won = board.set_state(b"mine")
    assert (content, won) == (b"theirs", False)


def test_a_board_that_was_deleted_is_empty(board, server):
    token = board.set_state(b"before")[1]
    server.objects.clear()
    assert board.set_state(b"mine", token) is None
    assert board.get_state() is None


def test_no_server_is_an_error_that_sent_nothing(certificate, account):
    with serving(certificate[1]) as server:
        board = board_of(server, account)
        token = board.set_state(b"x")[1]
    fresh = board_of(server, account)
    with pytest.raises(NotSentError):
        fresh.get_state()
    board._server.close()  # a connection that was open would still be served
    with pytest.raises(OSError):  # noqa: PT011  not sent, or perhaps done
        board.set_state(b"y", token)


def test_a_server_that_does_not_answer_is_given_up(server, account):
    board = board_of(server, account, timeout_s=0.2)
    token = board.set_state(b"x")[1]
    server.faults += [Fault(BEFORE, hold_s=1.0), Fault(BEFORE, hold_s=1.0)]
    begun = time.monotonic()
    with pytest.raises(OSError, match=f"Errno {errno.EIO}"):
        board.set_state(b"y", token)
    assert time.monotonic() - begun < 5


def test_a_connection_that_was_closed_while_idle_does_not_matter(server, account):
    board = board_of(server, account)
    board.set_state(b"x")
    server.faults.append(Fault(BEFORE, methods=("GET",)))
    assert board.get_state()[0] == b"x"
    assert server.connections == 2


@pytest.mark.parametrize(
    ("method", "verb", "state"),
    [("GET", "get", None), ("PUT", "update", b"y"), ("POST", "create", b"y")],
)
def test_what_is_forbidden_is_named(server, account, method, verb, state):
    token = board_of(server, account).set_state(b"x")[1] if method == "PUT" else None
    board = board_of(server, account)
    server.denied.add(method)
    values = rf"\b{verb}\b.*\bllama-board\b.*\btrain\b"
    with pytest.raises(BoardDeniedError, match=values) as caught:
        board.get_state() if state is None else board.set_state(state, token)
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == errno.EACCES


def test_a_token_that_rotates_is_read_anew(board, server, account):
    board.set_state(b"x")
    server.token = SECOND_TOKEN
    (account / "token").write_text(SECOND_TOKEN + "\n")
    assert board.get_state()[0] == b"x"


def test_a_token_that_is_refused_is_an_error_and_never_shown(board, server):
    server.token = SECOND_TOKEN
    with pytest.raises(BoardDeniedError, match="unauthorized") as caught:
        board.get_state()
    assert FIRST_TOKEN not in str(caught.value)


def test_another_authority_is_not_trusted(server, account, tmp_path):
    other, _ = authority(tmp_path / "other")
    (account / "ca.crt").write_bytes(other.read_bytes())
    with pytest.raises(NotSentError, match="CERTIFICATE_VERIFY_FAILED"):
        board_of(server, account).get_state()


def test_another_host_s_certificate_is_not_trusted(account, tmp_path):
    other, context = authority(tmp_path / "other", "IP:192.0.2.1")
    (account / "ca.crt").write_bytes(other.read_bytes())
    with serving(context) as server, pytest.raises(NotSentError, match="CERTIFICATE_VERIFY"):
        board_of(server, account).get_state()
    assert server.requests == [], "the token never left"


def test_outside_a_pod_it_says_so(tmp_path):
    with pytest.raises(NotInPodError, match="KUBERNETES_SERVICE_HOST"):
        ApiServer.of_pod({})
    env = {"KUBERNETES_SERVICE_HOST": "fd00::1", "HOLDFAST_SERVICE_ACCOUNT_DIR": str(tmp_path)}
    with pytest.raises(NotInPodError, match="automountServiceAccountToken"):
        ApiServer.of_pod(env)
    (tmp_path / "token").write_text("x")
    assert ApiServer.of_pod(env)._where.endswith(" fd00::1:443")


@pytest.mark.parametrize("url", ["http://192.0.2.1", "ftp://x", "https://", "http://api.example"])
def test_a_token_never_goes_out_in_the_clear(url, tmp_path):
    with pytest.raises(ValueError, match="https"):
        ApiServer(url, token=tmp_path / "token", authority=None)


def test_plain_http_on_loopback_is_for_a_proxy_beside(account):
    with serving(None) as server:
        api = ApiServer(
            f"http://127.0.0.1:{server.server_address[1]}", token=account / "token", authority=None
        )
        assert KubernetesBoard(api, "train", "b").set_state(b"x")[2]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"metadata": {}},
        {"metadata": {"resourceVersion": 5}},
        {"metadata": {"resourceVersion": "5"}, "data": ["state"]},
        {"metadata": {"resourceVersion": "5"}, "binaryData": {"state": "?"}},
    ],
)
def test_an_answer_that_is_no_configmap_is_an_error(board, server, answer):
    server.objects[PATH] = answer
    with pytest.raises(OSError, match=rf"Errno {errno.EIO}\b.*ConfigMap"):
        board.get_state()


@given(data=st.data())
def test_faults_at_any_point_lose_nothing_that_a_writer_was_told_of(server, account, data):
    """Each commit adds one entry: whatever a writer was told is there, once, in order."""
    server.objects.clear()
    boards = [board_of(server, account) for _ in range(3)]
    told = []
    for turn in range(data.draw(st.integers(1, 12))):
        board = boards[data.draw(st.integers(0, 2))]
        for when in data.draw(st.lists(st.sampled_from([BEFORE, AFTER]), max_size=3)):
            server.faults.append(
                Fault(
                    when,
                    data.draw(st.sampled_from([None, 500, 503, 429])),
                    data.draw(st.sampled_from([("GET",), ("PUT", "POST")])),
                )
            )
        with contextlib.suppress(OSError):
            told.append(update(board, lambda state, t=turn: replaced(state, f"{t}"), 50).epoch)
        server.faults.clear()
    found = boards[0].get_state()
    state = BoardState.decode(found[0]) if found else BoardState()
    assert [commit.step for commit in state.commits] == list(range(state.epoch))
    assert told == sorted(set(told)), "no number was won twice"
    assert len({commit.dir for commit in state.commits}) == len(state.commits), "nothing twice"
    if found:
        assert server.objects[PATH]["metadata"]["annotations"][SWAP]
