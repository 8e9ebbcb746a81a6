"""What a branch of the Hub is now is asked under the same deadline as everything else."""

import os
import socket
import subprocess
import sys
import threading
import time

ASK = """
from keepmtp.checkpoints.hub import dataset_commit
from keepmtp.recipes.errors import KeepMTPError
try:
    print(dataset_commit("org/data", "main", "calibration.dataset org/data"))
except KeepMTPError as error:
    print(error)
"""


def drip(listener: socket.socket) -> None:
    """Answer every question with a byte now and then, for ever."""
    while True:
        try:
            asked, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_one, args=(asked,), daemon=True).start()


def _one(asked: socket.socket) -> None:
    try:
        asked.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
        )
        while True:
            asked.sendall(b" ")
            time.sleep(0.2)
    except OSError:
        asked.close()


def test_a_dataset_is_asked_for_under_a_deadline():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drip, args=(listener,), daemon=True).start()
        told = {
            "HF_ENDPOINT": f"http://127.0.0.1:{listener.getsockname()[1]}",
            "KEEPMTP_HUB_TIMEOUT": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", ASK],
            capture_output=True,
            text=True,
            timeout=30,
            env=os.environ | told,
        )
    assert done.returncode == 0 and "; got " in done.stdout, done.stderr
