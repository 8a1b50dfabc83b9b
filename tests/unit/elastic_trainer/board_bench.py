"""A board that is a ConfigMap of a small server, and who may use it."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_map_server import (
    FIRST_TOKEN,
    Server,
    authority,
    serving,
)

from elastic_trainer.board.kubernetes_board import ApiServer, KubernetesBoard


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def server(certificate):
    with serving(certificate[1]) as running:
        yield running


@pytest.fixture
def account(tmp_path, certificate) -> Path:
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text(FIRST_TOKEN)
    (folder / "ca.crt").write_bytes(certificate[0].read_bytes())
    return folder


def env_of(server: Server, account: Path) -> dict[str, str]:
    return {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(server.server_address[1]),
        "HOLDFAST_SERVICE_ACCOUNT_DIR": str(account),
    }


def board_of(server: Server, account: Path, *, timeout_s: float = 5.0) -> KubernetesBoard:
    api = ApiServer.of_pod(env_of(server, account), timeout_s=timeout_s)
    return KubernetesBoard(api, "train", "llama-board", sleep=lambda _: None)
