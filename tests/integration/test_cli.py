#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The daemon and the command as people meet them: arguments, exit codes, signals, files, HTTP.

usage: test_cli.py KVFERRYD KVFERRY EXAMPLES_DIR [unittest arguments]
"""
import http.client
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
KVFERRYD, KVFERRY, EXAMPLES = sys.argv[1:4]
SMALL = [
    "dram.bytes=96MiB", "dram.area_bytes=1MiB", "dram.piece_bytes=96MiB", "staging.total=96MiB",
    "staging.client=4MiB", "nvme.0.bytes=128MiB", "nvme.0.segment_bytes=8MiB", "clients.max=16",
]
STORE = ["--set", "nvme.0.bytes=128MiB", "--set", "nvme.0.segment_bytes=8MiB"]
START_S = 120
DEADLINE_S = 120


def run(*arguments, data=None, env=None):
    """Run a command to its end: (exit code, stdout, stderr) as bytes, text, text."""
    done = subprocess.run(arguments, input=data if data is not None else b"", capture_output=True,
                          env={**os.environ, **(env or {})}, timeout=DEADLINE_S, check=False)
    return done.returncode, done.stdout, done.stderr.decode()


def wait_for(condition, what, seconds=START_S):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds} s for {what}")
        time.sleep(0.02)


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("kvferryd", timeout=DEADLINE_S)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(DEADLINE_S)
        try:
            self.sock.connect(self.path)
        except OSError:
            self.sock.close()
            raise


def ask(connection, method, path, body=None):
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class Daemon:
    """A kvferryd in a folder of its own, with small tiers."""

    def __init__(self, folder, *sets, env=None):
        self.folder = folder
        self.socket = os.path.join(folder, "kvferryd.sock")
        self.admin = self.socket + ".admin"
        self.log = os.path.join(folder, "log")
        arguments = [KVFERRYD, "--dir", folder]
        for value in SMALL + list(sets):
            arguments += ["--set", value]
        self.arguments = arguments
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=log, env={**os.environ, **(env or {})})

    def wait_ready(self):
        def is_ready():
            if self.process.poll() is not None:
                raise AssertionError(f"exit {self.process.returncode}: {self.log_text()}")
            return os.path.exists(self.admin) and self.get("/readyz")[0] == 200
        wait_for(is_ready, "ready")
        return self

    def get(self, path):
        try:
            return ask(UnixConnection(self.admin), "GET", path)
        except OSError:
            return 0, ""

    def post(self, path):
        return ask(UnixConnection(self.admin), "POST", path)

    def log_text(self):
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return file.read()

    def signal_and_wait(self, number):
        self.process.send_signal(number)
        return self.process.wait(timeout=DEADLINE_S)

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Case(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="kvf-cli-")
        self.addCleanup(shutil.rmtree, self.folder)

    def start(self, *sets, env=None):
        daemon = Daemon(self.folder, *sets, env=env)
        self.addCleanup(daemon.end)
        return daemon.wait_ready()

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, text):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)
        return self.path(name)

    def one_line(self, result, code, *parts):
        """An exit code, and one line that has all parts."""
        self.assertEqual(result[0], code, result)
        self.assertEqual(result[2].count("\n"), 1, result[2])
        for part in parts:
            self.assertIn(part, result[2])


class DaemonArguments(Case):
    def test_help_has_every_option(self):
        code, out, _ = run(KVFERRYD, "--help")
        self.assertEqual(code, 0)
        options = run(KVFERRYD, "--print-options")[1].decode().splitlines()
        self.assertGreater(len(options), 30)
        for line in options:
            name, kind, default = line.split("\t")[:3]
            name = name.replace("[]", ".N")
            self.assertIn(f"    {name} ({kind}{', default ' + default if default else ''})\n",
                          out.decode())

    def test_version(self):
        code, out, _ = run(KVFERRYD, "--version")
        self.assertEqual(code, 0)
        self.assertRegex(out.decode(), r"^kvferryd \d+\.\d+\.\d+\n$")

    def test_usage_errors(self):
        for arguments in (["--bogus"], ["word"], ["--config"], ["--config", "a", "--dir", "b"],
                          ["--yes"], ["--bytes", "1K"]):
            self.assertEqual(run(KVFERRYD, *arguments)[0], 2, arguments)

    def test_config_errors_are_one_line(self):
        path = self.write("wrong.yaml", "dram:\n  byts: 1GiB\n")
        self.one_line(run(KVFERRYD, "--config", path), 2,
                      f"kvferryd: {path}:2: dram.byts: no such option; did you mean 'bytes'?")
        self.one_line(run(KVFERRYD, "--config", self.path("none.yaml")), 2, "cannot be read")
        self.one_line(run(KVFERRYD, "--dir", "/proc/none"), 2, "/proc/none", "name one in a folder")
        self.one_line(run(KVFERRYD, "--dir", self.folder, "--set", "dram.bytes=1TB"), 2,
                      "kvferryd: command line: dram.bytes: '1TB' has the unknown unit 'TB'")
        self.one_line(run(KVFERRYD, "--dir", self.folder, *STORE, "--set", "dram.bytes=9000TiB"), 2,
                      "dram.bytes: the daemon would take", "all there is", "lower")

    def test_print_config_reads_back(self):
        code, out, _ = run(KVFERRYD, "--dir", self.folder, "--print-config")
        self.assertEqual(code, 0)
        path = self.write("printed.yaml", out.decode())
        self.assertEqual(run(KVFERRYD, "--config", path, "--print-config"), (0, out, ""))

    def test_the_installed_file(self):
        """As it is, and with every line uncommented, it says what the daemon does without it."""
        installed = os.path.join(ROOT, "agent", "kvferryd.yaml")
        plain = self.write("empty.yaml", "")
        _, defaults, _ = run(KVFERRYD, "--config", plain, "--print-config")
        self.assertEqual(run(KVFERRYD, "--config", installed, "--print-config")[1], defaults)
        with open(installed, encoding="utf-8") as file:
            text = re.sub(r"^#( {2,}|(?=[a-z]))", r"\1", file.read(), flags=re.MULTILINE)
        path = self.write("all.yaml", text)
        code, out, error = run(KVFERRYD, "--config", path, "--print-config")
        self.assertEqual(code, 0, error)
        drive = re.search(r"nvme:\n((?:  .*\n)+)", out.decode())
        self.assertEqual(out.decode().replace(drive.group(0), "nvme: []\n"), defaults.decode())

    def test_check(self):
        sets = [argument for value in SMALL for argument in ("--set", value)]
        code, out, _ = run(KVFERRYD, "--dir", self.folder, *sets, "--check")
        self.assertEqual(code, 0)
        rows = re.findall(r"^(.{22}) +([\d.]+)", out.decode(), re.MULTILINE)
        sizes = {name.strip(): float(size) for name, size in rows}
        parts = [name for name in sizes
                 if name not in ("total", "available", "limit", "drives")]
        self.assertAlmostEqual(sum(sizes[name] for name in parts), sizes["total"], delta=0.1)
        self.assertEqual(sizes["arena"], 96)
        self.assertTrue(out.decode().endswith("fits\n"))
        self.assertFalse(os.path.exists(self.path("nvme.store")), "--check makes no store")
        self.one_line(run(KVFERRYD, "--dir", self.folder, *STORE, "--set", "dram.bytes=8000TiB",
                          "--check"), 2, "dram.bytes", "lower")


class DaemonLife(Case):
    def test_sigterm_drains(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            daemon = self.start()
            self.assertEqual(daemon.signal_and_wait(number), 0, daemon.log_text())
            self.assertFalse(os.path.exists(daemon.socket))
            self.assertFalse(os.path.exists(daemon.admin))

    def test_drain_by_http(self):
        daemon = self.start()
        self.assertEqual(daemon.post("/v1/drain")[0], 200)
        self.assertEqual(daemon.process.wait(timeout=DEADLINE_S), 0)

    def test_stale_sockets_are_taken_over(self):
        daemon = self.start()
        daemon.signal_and_wait(signal.SIGKILL)
        self.assertTrue(os.path.exists(daemon.socket))
        self.assertTrue(os.path.exists(daemon.admin))
        self.assertEqual(self.start().signal_and_wait(signal.SIGTERM), 0)

    def test_second_daemon_is_refused(self):
        daemon = self.start()
        code, _, error = run(*daemon.arguments)
        self.assertEqual(code, 2, error)
        other = self.path("other")
        code, _, error = run(*daemon.arguments, "--set", f"nvme.0.path={other}")
        self.assertEqual(code, 2, error)
        self.assertIn(daemon.socket, error)
        code, _, error = run(*daemon.arguments, "--set", f"nvme.0.path={other}", "--set",
                             f"sockets.0.path={self.path('b.sock')}", "--set",
                             f"admin.socket={daemon.admin}")
        self.assertEqual(code, 2, error)
        self.assertIn("admin socket", error)
        self.assertFalse(os.path.exists(self.path("b.sock")), "it cleans up what it had made")
        self.assertEqual(run(KVFERRY, "ping", "--count", "1", "--socket", daemon.socket)[0], 0,
                         "the first one did not notice")
        self.assertEqual(daemon.get("/readyz")[0], 200)

    def test_folder_at_the_socket(self):
        os.mkdir(self.path("kvferryd.sock"))
        self.one_line(run(KVFERRYD, "--dir", self.folder), 2, "is a folder", "never the socket")

    def test_permissions(self):
        daemon = self.start("sockets.0.mode=0600")
        self.assertEqual(stat.S_IMODE(os.stat(daemon.socket).st_mode), 0o600)
        self.assertEqual(stat.S_IMODE(os.stat(daemon.admin).st_mode), 0o600)
        daemon.signal_and_wait(signal.SIGTERM)
        daemon = self.start("sockets.0.mode=0666", "admin.mode=0640")
        self.assertEqual(stat.S_IMODE(os.stat(daemon.socket).st_mode), 0o666)
        self.assertEqual(stat.S_IMODE(os.stat(daemon.admin).st_mode), 0o640)
        daemon.signal_and_wait(signal.SIGTERM)
        gid = os.getgid() if os.getuid() != 0 else 54321  # of no name: containers have such
        daemon = self.start(f"sockets.0.group={gid}")
        self.assertEqual(os.stat(daemon.socket).st_gid, gid)

    def test_it_says_who_reads_what(self):
        daemon = self.start()
        self.assertIn("can read each other's blocks", daemon.log_text())
        self.assertIn("lossy profiles: refused unless calibration", daemon.log_text())
        self.assertRegex(daemon.log_text(), r"nvme: .*(io_uring|threads)")
        daemon.signal_and_wait(signal.SIGTERM)
        daemon = self.start("allow_uncalibrated=true")
        self.assertIn("lossy profiles: allowed without a calibration", daemon.log_text())

    def test_what_has_passed_is_listed(self):
        folder = self.path("calibrated")
        os.mkdir(folder)
        with open(os.path.join(folder, "passed.json"), "w", encoding="utf-8") as file:
            json.dump({"kvferry_profile": 1, "name": "balanced", "weights_digest": "ab" * 32,
                       "workload": ["chat", "code"],
                       "geometry": {"n_layers": 2, "n_heads": 1, "dim_k": 64, "dim_v": 64,
                                    "rope_state": "post"}}, file)
        with open(os.path.join(folder, "wrong.json"), "w", encoding="utf-8") as file:
            file.write("{}")
        sets = [argument for value in SMALL for argument in ("--set", value)]
        code, out, error = run(KVFERRYD, "--dir", self.folder, *sets, "--set",
                               f"calibration.dir={folder}", "--check")
        self.assertEqual((code, out.decode()[-5:]), (0, "fits\n"))
        self.assertIn("passed.json: profile balanced has passed", error)
        self.assertIn("wrong.json: kvferry_profile: is missing", error)
        daemon = self.start(f"calibration.dir={folder}")
        log = daemon.log_text()
        self.assertIn("passed.json: profile balanced has passed for weights abababab", log)
        self.assertIn("wrong.json: kvferry_profile: is missing", log)
        code, out, _ = run(KVFERRY, "profiles", "-o", "json", "--socket", daemon.socket)
        self.assertEqual(code, 0)
        self.assertEqual(json.loads(out)["calibrated"],
                         [{"file": "passed.json", "profile": "balanced",
                           "weights_digest": "ab" * 32, "adapter_digest": "00" * 32,
                           "workload": ["chat", "code"], "kinds": 0, "layers": 2}])
        text = run(KVFERRY, "profiles", "--socket", daemon.socket)[1].decode()
        self.assertRegex(text, r"(?m)^balanced +passed.json +abababababababab\.\. chat, code$")

    def test_reload(self):
        folder = self.path("calibrated")
        os.mkdir(folder)
        daemon = self.start(f"calibration.dir={folder}")

        def ask_daemon(*command):
            return run(KVFERRY, *command, "--socket", daemon.socket)

        def passed():
            code, out, _ = ask_daemon("profiles", "-o", "json")
            self.assertEqual(code, 0)
            return [row["file"] for row in json.loads(out)["calibrated"]]

        self.assertEqual(passed(), [])
        with open(os.path.join(folder, "passed.json"), "w", encoding="utf-8") as file:
            json.dump({"kvferry_profile": 1, "name": "balanced", "weights_digest": "ab" * 32,
                       "workload": ["chat"],
                       "geometry": {"n_layers": 2, "n_heads": 1, "dim_k": 64, "dim_v": 64,
                                    "rope_state": "post"}}, file)
        code, out, _ = ask_daemon("reload")
        self.assertEqual(code, 0)
        self.assertIn("1 profiles have passed, 0 before", out.decode())
        self.assertEqual(passed(), ["passed.json"])
        os.rename(folder, self.path("away"))
        self.one_line(ask_daemon("reload"), 1, "cannot be read", "read before stays in use")
        self.assertEqual(passed(), ["passed.json"])
        os.mkdir(folder)
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(lambda: passed() == [], "the reload")
        self.assertEqual(daemon.signal_and_wait(signal.SIGTERM), 0)
        daemon = self.start()
        self.one_line(ask_daemon("reload"), 1, "calibration.dir is not set")

    def is_ready(self, manager):
        """What the manager hears first, but for the progress of a start that takes a second."""
        heard = b"EXTEND_TIMEOUT"
        while heard.startswith(b"EXTEND_TIMEOUT"):
            heard = manager.recv(300)
        self.assertEqual(heard, b"READY=1\nSTATUS=serving")

    def test_notify(self):
        for name in (self.path("notify"), "\0kvf-test-" + os.path.basename(self.folder)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
                manager.bind(name)
                manager.settimeout(START_S)
                daemon = self.start(env={"NOTIFY_SOCKET": name.replace("\0", "@")})
                self.is_ready(manager)
                self.assertEqual(daemon.signal_and_wait(signal.SIGTERM), 0)
                self.assertEqual(manager.recv(300), b"STOPPING=1")

    def test_notify_of_what_takes_long(self):
        name = self.path("notify")
        more = b"EXTEND_TIMEOUT_USEC=30000000\nSTATUS="
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(name)
            manager.settimeout(START_S)
            daemon = self.start(env={"NOTIFY_SOCKET": name})
            self.assertEqual(run(KVFERRY, "put", "--key-text", "a", "--durable", "--socket",
                                 daemon.socket, data=b"a")[0], 0)
            client = subprocess.Popen([KVFERRY, "ping", "--count", "100000000", "--socket",
                                       daemon.socket], stderr=subprocess.DEVNULL)
            self.addCleanup(client.wait)
            self.addCleanup(client.kill)
            wait_for(lambda: json.loads(daemon.get("/v1/stat")[1])["clients"] == 1, "the client")
            client.send_signal(signal.SIGSTOP)  # so that it does not leave when it is told to
            self.assertEqual(daemon.signal_and_wait(signal.SIGTERM), 0)
            client.kill()
            self.is_ready(manager)
            self.assertEqual(manager.recv(300), b"STOPPING=1")
            self.assertEqual(manager.recv(300), more + b"draining: 1 clients, 0 MiB to write")
            self.start(env={"NOTIFY_SOCKET": name})
            said = manager.recv(300)
            while said.endswith(b" 0 blocks so far"):
                said = manager.recv(300)
            self.assertTrue(said.startswith(more + b"recovering " + self.folder.encode()), said)
            self.assertTrue(said.endswith(b" of 120 MiB looked at, 1 blocks so far"), said)
            self.is_ready(manager)

    def test_notify_of_verify(self):
        name = self.path("notify")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(name)
            manager.settimeout(START_S)
            daemon = self.start(env={"NOTIFY_SOCKET": name})
            for key in "ab":
                self.assertEqual(run(KVFERRY, "put", "--key-text", key, "--socket", daemon.socket,
                                     data=b"a")[0], 0)
            self.is_ready(manager)
            answer = json.loads(daemon.post("/v1/verify?max=1")[1])
            self.assertEqual((answer["bad"], answer["places"]), (0, 2))
            self.assertIn(answer["verified"], (1, 2))  # in memory, and on the drive as well
            self.assertEqual(manager.recv(300), b"EXTEND_TIMEOUT_USEC=30000000\nSTATUS=serving; "
                             b"verifying: 1 of 2 places looked at")
            daemon.post(f"/v1/verify?max=100&cursor={answer['next_cursor']}")
            self.assertEqual(manager.recv(300), b"STATUS=serving")

    def test_memory_is_what_check_says(self):
        with open(KVFERRYD, "rb") as file:
            program = file.read()
        if b"__asan_init" in program or b"__tsan_init" in program:
            self.skipTest("sanitizers take memory of their own")
        daemon = self.start()
        code, out, error = run(KVFERRY, "bench", "--count", "120", "--size", "1MiB", "--socket",
                               daemon.socket)
        self.assertEqual(code, 0, error)
        with open(f"/proc/{daemon.process.pid}/status", encoding="ascii") as file:
            peak_kib = int(re.search(r"VmHWM:\s+(\d+)", file.read()).group(1))
        total = re.search(r"^total +([\d.]+)", run(*daemon.arguments, "--set",
                                                  f"sockets.0.path={self.path('x.sock')}",
                                                  "--check")[1].decode(), re.MULTILINE)
        self.assertLessEqual(peak_kib / 1024, float(total.group(1)))
        # and the arena really is in it: not an estimate that nothing could exceed
        self.assertGreater(peak_kib / 1024, 96)


class Format(Case):
    def setUp(self):
        super().setUp()
        self.store = self.path("store")

    def format(self, *arguments):
        return run(KVFERRYD, "--format", self.store, *arguments)

    def test_it_asks(self):
        self.one_line(self.format("--bytes", "64MiB"), 1, "add --yes")
        self.assertFalse(os.path.exists(self.store))

    def test_new_file_needs_a_size(self):
        self.one_line(self.format("--yes"), 2, "add --bytes SIZE")

    def test_foreign_file(self):
        with open(self.store, "wb") as file:
            file.write(b"somebody's data" * 100000)
            file.truncate(128 << 20)
        before = os.stat(self.store).st_mtime_ns
        sets = [argument for value in SMALL + [f"nvme.0.path={self.store}"]
                for argument in ("--set", value)]
        code, _, error = run(KVFERRYD, "--dir", self.folder, *sets)
        self.assertEqual(code, 2, error)
        self.assertEqual(os.stat(self.store).st_mtime_ns, before, "not a byte was written")
        code, out, error = run(KVFERRYD, "--dir", self.folder, *sets, "--format", self.store,
                               "--yes")
        self.assertEqual(code, 0, error)
        self.assertIn("holds data that is not kvferry's", out.decode())
        self.assertIn("is an empty kvferry store now", out.decode())
        daemon = self.start(f"nvme.0.path={self.store}")
        self.assertEqual(daemon.signal_and_wait(signal.SIGTERM), 0)
        code, out, _ = run(KVFERRYD, "--dir", self.folder, *sets, "--format", self.store)
        self.assertEqual(code, 1)
        self.assertIn("holds a kvferry store: all its blocks are lost", out.decode())

    def test_store_in_use(self):
        daemon = self.start()
        self.store = self.path("nvme.store")
        code, _, error = self.format("--yes")
        self.assertNotEqual(code, 0)
        self.assertIn("open", error)
        self.assertEqual(daemon.get("/readyz")[0], 200)


class Http(Case):
    def start_tcp(self):
        """A daemon and its port; another one if somebody took the port that was free."""
        for _ in range(20):
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", 0))
                port = sock.getsockname()[1]
            try:
                return self.start(f"admin.listen=127.0.0.1:{port}"), port
            except AssertionError as error:
                if "in use" not in str(error):
                    raise
        raise AssertionError("no port stays free")

    def test_tcp_has_health_and_metrics_only(self):
        daemon, port = self.start_tcp()

        def tcp(method, path):
            return ask(http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S), method,
                       path)
        for path in ("/healthz", "/livez", "/readyz", "/metrics"):
            self.assertEqual(tcp("GET", path)[0], 200)
        self.assertIn("\nkvferry_ready 1\n", tcp("GET", "/metrics")[1])
        for path in ("/v1/stat", "/v1/clients", "/v1/blocks", "/v1/namespaces"):
            self.assertEqual(tcp("GET", path)[0], 404)
            self.assertEqual(daemon.get(path)[0], 200)
        for path in ("/v1/drain", "/v1/purge?namespace=1", "/v1/evict?namespace=1", "/v1/verify"):
            self.assertEqual(tcp("POST", path)[0], 404)
        self.assertEqual(tcp("POST", "/healthz")[0], 405)
        self.assertIsNone(daemon.process.poll())

    def test_wrong_questions(self):
        daemon = self.start()
        for path in ("/v1/blocks?max=0", "/v1/blocks?max=1001", "/v1/blocks?cursor=xyz",
                     "/v1/blocks?namespace=12345678901234567", "/v1/blocks?max=9x"):
            self.assertEqual(daemon.get(path)[0], 400, path)
        for path in ("/v1/evict", "/v1/evict?key_id=12", "/v1/purge", "/v1/purge?namespace=0",
                     "/v1/evict?namespace=1&key_id=" + 64 * "0", "/v1/verify?max=100000"):
            self.assertEqual(daemon.post(path)[0], 400, path)
        self.assertEqual(daemon.post("/v1/evict?key_id=" + 64 * "0")[0], 404)
        self.assertEqual(daemon.get("/v1/none")[0], 404)
        self.assertEqual(daemon.get("/v1/drain")[0], 405)
        with self.assertRaises((OSError, http.client.HTTPException)):
            ask(UnixConnection(daemon.admin), "POST", "/v1/verify", body=b"x" * 100000)
        self.assertEqual(daemon.get("/healthz")[0], 200)

    def test_silent_connections_do_not_stop_it(self):
        daemon, port = self.start_tcp()
        silent = []
        for _ in range(64):
            sock = socket.socket()
            sock.settimeout(0.02)
            try:
                sock.connect(("127.0.0.1", port))
                sock.send(b"GET /metr")
            except OSError:
                pass
            silent.append(sock)
        self.assertEqual(daemon.get("/healthz")[0], 200, "the Unix socket has room of its own")
        for sock in silent:
            sock.close()
        wait_for(lambda: self.try_tcp(port) == 200, "the TCP socket to come back")

    def try_tcp(self, port):
        try:
            return ask(http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S), "GET",
                       "/readyz")[0]
        except OSError:
            return 0

    def test_metrics_parse(self):
        daemon = self.start()
        _, text = daemon.get("/metrics")
        sample = re.compile(r'^kvferry_[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? [-+.\de]+$')
        for line in text.splitlines():
            if not line.startswith("#"):
                self.assertRegex(line, sample)
        promtool = shutil.which("promtool")
        if promtool is not None:
            code, _, error = run(promtool, "check", "metrics", data=text.encode())
            self.assertEqual(code, 0, error)


class Command(Case):
    def setUp(self):
        super().setUp()
        self.daemon = self.start()

    def kvferry(self, *arguments, data=None):
        return run(KVFERRY, *arguments, data=data, env={"KVFERRY_SOCKET": self.daemon.socket})

    def ok(self, *arguments, data=None):
        code, out, error = self.kvferry(*arguments, data=data)
        self.assertEqual((code, error), (0, ""), arguments)
        return out

    def ok_json(self, *arguments, data=None):
        return json.loads(self.ok(*arguments, "-o", "json", data=data))

    def test_put_and_get(self):
        data = os.urandom(300001)
        self.assertEqual(self.ok("put", "--key-text", "a", data=data), b"stored: 300001 bytes\n")
        self.assertEqual(self.ok("put", "--key-text", "a", data=data), b"exists: 300001 bytes\n")
        self.assertEqual(self.ok("get", "--key-text", "a"), data)
        out = self.path("out")
        self.assertEqual(self.ok("get", out, "--key-text", "a"), b"hit: 300001 bytes from dram\n")
        with open(out, "rb") as file:
            self.assertEqual(file.read(), data)
        self.one_line(self.kvferry("put", "--key-text", "a", data=b"other"), 1, "conflict")
        self.assertEqual(self.ok("get", "--key-text", "a"), data, "the first one stands")

    def test_key_text_is_the_hash_it_says(self):
        self.ok("put", "--key-text", "hello", data=b"x")
        # b2sum -l 256 of "hello"
        key = "324dcf027dd4a30a932c441f365a25e86b173defa4b8e58948253471b81b72cf"
        self.assertEqual(self.ok("get", "--key", key), b"x")

    def test_miss(self):
        code, out, error = self.kvferry("get", "--key-text", "none")
        self.assertEqual((code, out, error), (1, b"", "miss\n"))
        out = self.path("out")
        self.assertEqual(self.kvferry("get", out, "--key-text", "none")[0], 1)
        self.assertFalse(os.path.exists(out), "a miss makes no file")
        self.ok("put", "--key-text", "a", "--label", "one", data=b"x")
        self.assertEqual(self.kvferry("get", "--key-text", "a", "--label", "two")[2], "miss\n")
        self.assertEqual(self.ok("get", "--key-text", "a", "--label", "one"), b"x")

    def test_sizes(self):
        for size in (1, 4095, 4096, 4097, 5000000):
            data = os.urandom(size)
            key = f"size {size}"
            self.ok("put", "--key-text", key, data=data)
            self.assertEqual(self.ok("get", "--key-text", key), data)
        self.one_line(self.kvferry("put", "--key-text", "e", data=b""), 1, "input is empty")
        self.one_line(self.kvferry("put", "--key-text", "e", data=bytes((64 << 20) + 1)), 1,
                      "more than 64 MiB")

    def test_durable_survives_sigkill(self):
        data = os.urandom(100000)
        self.assertEqual(self.ok("put", "--key-text", "a", "--durable", data=data),
                         b"durable: 100000 bytes\n")
        self.ok("put", "--key-text", "b", "--no-write", data=data)
        self.daemon.signal_and_wait(signal.SIGKILL)
        self.daemon = self.start()
        out = self.path("out")
        self.assertEqual(self.ok("get", out, "--key-text", "a"), b"hit: 100000 bytes from nvme\n")
        with open(out, "rb") as file:
            self.assertEqual(file.read(), data)
        self.assertEqual(self.kvferry("get", "--key-text", "b")[2], "miss\n")

    def test_ls_verify_evict_purge(self):
        for i in range(20):
            self.ok("put", "--key-text", str(i), "--label", "lab", "--durable", data=b"%d" % i)
        rows = self.ok("ls").decode()
        self.assertRegex(rows, r"(?m)^[0-9a-f]{16} .* 20 .* lab$")
        blocks = self.ok("ls", "--namespace", "lab", "-o", "json").decode().splitlines()
        self.assertEqual(len(blocks), 20)
        self.assertEqual(len({json.loads(line)["key_id"] for line in blocks}), 20)
        self.assertEqual(len(self.ok("ls", "--namespace", "lab", "--count",
                                     "7").decode().splitlines()), 7)
        verified = self.ok_json("verify")
        self.assertGreaterEqual(verified["verified"], 20)
        self.assertEqual(verified["bad"], 0)
        self.assertEqual(self.ok("evict", "--key-text", "3", "--label", "lab"), b"evicted\n")
        self.assertEqual(self.kvferry("evict", "--key-text", "3", "--label", "lab")[0], 1)
        self.assertEqual(self.kvferry("get", "--key-text", "3", "--label", "lab")[2], "miss\n")
        self.assertEqual(self.ok_json("evict", "--namespace", "lab")["evicted"], 19)
        self.ok("put", "--key-text", "x", "--label", "lab", "--durable", data=b"x")
        namespace = json.loads(blocks[0])["namespace_id"]
        self.assertEqual(self.ok_json("purge", "--namespace", namespace)["evicted"], 1)
        self.daemon.signal_and_wait(signal.SIGKILL)
        self.daemon = self.start()
        for key in ("x", "7"):
            self.assertEqual(self.kvferry("get", "--key-text", key, "--label", "lab")[2], "miss\n",
                             "purged for good")
        self.one_line(self.kvferry("purge", "--namespace", "none"), 1, "no namespace has the label")

    def test_stat_ping_clients(self):
        self.ok("put", "--key-text", "a", data=b"x" * 5000)
        self.ok("get", "--key-text", "a")
        self.kvferry("get", "--key-text", "none")
        figures = self.ok_json("stat")
        self.assertTrue(figures["ready"])
        self.assertEqual(figures["metrics"]["put_blocks"], 1)
        self.assertEqual(figures["metrics"]["get_hits_dram"], 1)
        self.assertEqual(figures["metrics"]["get_misses"], 1)
        self.assertEqual(figures["dram"]["stored_blocks"], 1)
        self.assertEqual(figures["dram"]["capacity_bytes"], 96 << 20)
        self.assertEqual(len(figures["nvme"]), 1)
        text = self.ok("stat").decode()
        for word in ("ready", "dram", "nvme 0", "misses 1"):
            self.assertIn(word, text)
        self.assertRegex(self.ok("ping", "--count", "50").decode(), r"^50 round trips: min ")
        times = self.ok_json("ping", "--count", "50")
        self.assertLessEqual(times["min_ns"], times["p50_ns"])
        self.assertLessEqual(times["p50_ns"], times["p99_ns"])
        self.assertGreater(times["min_ns"], 0)
        # those of the commands before have gone, which the daemon sees in a moment
        wait_for(lambda: self.ok_json("clients")["clients"] == [], "the last client to go")
        self.assertIn("connection", self.ok("clients").decode())

    def test_top(self):
        top = subprocess.Popen([KVFERRY, "top", "-o", "json", "--count", "100000", "--interval",
                                "20ms", "--socket", self.daemon.socket], stdout=subprocess.PIPE)
        self.addCleanup(top.stdout.close)
        self.addCleanup(top.wait)
        self.addCleanup(top.kill)
        top.stdout.readline()
        self.ok("put", "--key-text", "a", data=b"x" * 5000)
        for key in ("a", "none"):
            self.kvferry("get", "--key-text", key)
        sums = dict.fromkeys(("put_blocks", "put_bytes", "get_hits_dram", "get_misses"), 0.0)
        means = {"put_ns": [], "get_dram_ns": []}
        while round(sums["get_misses"]) < 1:
            look = json.loads(top.stdout.readline())
            for name in sums:
                sums[name] += look["per_second"][name] * look["seconds"]
            for name, values in means.items():
                values += [look["mean"][name]] if look["mean"][name] is not None else []
        self.assertEqual([round(one) for one in sums.values()], [1, 5000 + 4096, 1, 1])
        self.assertEqual([len(values) for values in means.values()], [1, 1])
        # another daemon's counters begin anew
        self.daemon.signal_and_wait(signal.SIGKILL)
        self.assertEqual(self.kvferry("top")[0], 3)
        self.daemon = self.start()
        text = self.ok("top", "--interval", "1ms").decode()
        for words in ("ready, 0 of 16 clients", "dram    [.", "nvme 0  [", "connection "):
            self.assertIn(words, text)

    def test_log_as_json(self):
        self.daemon.signal_and_wait(signal.SIGTERM)
        os.remove(self.daemon.log)
        self.daemon = self.start("log.format=json")
        for line in self.daemon.log_text().splitlines():
            self.assertEqual(sorted(json.loads(line)), ["level", "message", "monotonic", "time"])
        self.assertIn('"level":"info","message":"admin socket ', self.daemon.log_text())

    def test_log_level(self):
        self.assertEqual(self.ok("log-level"), b"info\n")
        self.assertEqual(self.ok_json("log-level", "warning"), {"log_level": "warning"})
        self.ok("ping", "--count", "1")
        self.assertEqual(self.ok("log-level", "debug"), b"debug\n")
        log = self.daemon.log_text()
        for words in ("warning in place of info", "debug in place of warning"):
            self.assertIn(f"log level {words}, by the admin socket", log)
        self.assertNotIn("attached", log)
        self.assertEqual(self.daemon.post("/v1/log-level?level=loud")[0], 400)
        self.assertEqual(self.daemon.post("/v1/log-level")[0], 400)
        self.one_line(self.kvferry("log-level", "loud"), 2, "'loud' is not error, warning")

    def test_disable(self):
        for label in ("one", "two"):
            self.ok("put", "--key-text", "a", "--label", label, "--durable", data=b"x")

        def found(label):
            return self.kvferry("get", "--key-text", "a", "--label", label)[0] == 0

        names = {row["label"]: row["namespace_id"] for row in self.ok_json("ls")["namespaces"]}
        self.assertIn(f"namespace {names['one']} disabled; out of service now: not all, 1 by name",
                      self.ok("disable", "--namespace", "one").decode())
        self.assertEqual((found("one"), found("two")), (False, True))
        self.one_line(self.kvferry("put", "--key-text", "b", "--label", "one", data=b"x"), 1,
                      "put: refused")
        self.assertRegex(self.ok("ls").decode(), r"(?m)DISABLED one$")
        self.assertEqual(self.ok_json("stat")["metrics"]["disabled_namespaces"], 1)
        self.assertIn("ready, 1 NAMESPACE DISABLED (kvferry ls)\n", self.ok("stat").decode())
        self.assertIn("ready, 1 NAMESPACE DISABLED (kvferry ls),", self.ok(
            "top", "--count", "1").decode())
        # also for one that nobody is attached to and nothing is stored of
        self.ok("evict", "--namespace", "one")
        self.one_line(self.kvferry("put", "--key-text", "b", "--label", "one", data=b"x"), 1,
                      "put: refused")
        self.ok("disable")
        self.assertEqual((found("one"), found("two")), (False, False))
        self.assertIn("ready, ALL NAMESPACES DISABLED (kvferry enable)\n", self.ok("stat").decode())
        self.one_line(self.kvferry("enable", "--namespace", names["one"]), 1, "enable them all")
        self.ok("enable")
        self.assertEqual((found("one"), found("two")), (False, True))
        self.ok("put", "--key-text", "b", "--label", "one", data=b"x")
        self.assertEqual(self.ok_json("stat")["metrics"]["put_disabled"], 2)
        for _ in range(64):
            self.ok("disable", "--namespace", f"{_ + 1:016x}")
        self.one_line(self.kvferry("disable", "--namespace", names["one"]), 1, "64 namespaces are")
        self.ok("enable", "--namespace", f"{1:016x}")
        self.ok("disable", "--namespace", names["one"])
        # not over a restart
        self.daemon.signal_and_wait(signal.SIGTERM)
        self.daemon = self.start()
        self.assertTrue(found("two"))

    def test_drain(self):
        self.ok("put", "--key-text", "a", data=b"x" * 5000)
        self.assertRegex(self.ok("drain").decode(),
                         r"^(draining: \d+ clients, .* to write\n)*the daemon has ended\n$")
        self.assertEqual(self.daemon.process.wait(timeout=DEADLINE_S), 0)
        self.assertEqual(self.kvferry("drain")[0], 3)

    def test_bench(self):
        figures = self.ok_json("bench", "--count", "32", "--size", "64KiB", "--depth", "4")
        self.assertEqual(figures["wrong"], 0)
        for phase in ("put", "get", "memcpy"):
            self.assertGreater(figures[phase]["gb_s"], 0)
        for phase in ("put", "get"):
            self.assertEqual(figures[phase]["missing"], 0)
            self.assertLessEqual(figures[phase]["p50_ns"], figures[phase]["p99_ns"])
        # evicted at the end; a block that is on its way to the drive keeps its memory until then
        wait_for(lambda: self.ok_json("stat")["dram"]["stored_blocks"] == 0, "empty arena")
        self.assertIn("bound: one core's memcpy", self.ok("bench", "--count", "8").decode())

    def test_usage(self):
        for arguments in ([], ["bogus"], ["put"], ["get"], ["purge"], ["evict"],
                          ["put", "--key", "12"], ["put", "--key", "xy" * 16],
                          ["put", "a", "b", "--key-text", "k"], ["stat", "--durable"],
                          ["stat", "word"], ["stat", "-o", "xml"], ["ping", "--count", "0"],
                          ["put", "--key-text", "k", "--ttl", "5"], ["bench", "--size", "7"],
                          ["evict", "--key-text", "k", "--namespace", "n"],
                          ["put", "--key", "ab" * 16, "--key-text", "k"],
                          ["ping", "--socket", "tcp://127.0.0.1:99999?key=/k"],
                          ["ping", "--socket", "tcp://127.0.0.1:0?key=/k"],
                          ["ping", "--socket", "tcp://127.0.0.1:7171?key=/none/k"]):
            self.one_line(self.kvferry(*arguments), 2, "kvferry: ")

    def test_profiles_need_no_daemon(self):
        result = run(KVFERRY, "profiles", "-o", "json", "--socket", self.path("none.sock"))
        self.assertEqual(result[0], 0)
        rows = {row["profile"]: row for row in json.loads(result[1])["profiles"]}
        # K: 4 bits, a scale and an offset a vector, a mean; V the same without the mean
        self.assertEqual(rows["balanced"]["bits_a_value"], (4.25 + 16 / 256 + 4.25) / 2)
        self.assertNotIn("bits_a_value", rows["exact"])
        self.assertLessEqual(rows["exact"]["bits_a_value_max"], 16)
        self.assertTrue(rows["bytes"]["lossless"])
        self.assertLess(rows["max"]["bits_a_value"], rows["max-edges"]["bits_a_value"])
        self.assertLess(rows["max-edges"]["bits_a_value"], rows["dense"]["bits_a_value"])
        # of X: a scale in fp16 and a zero of a code's width for 128 values
        self.assertEqual(rows["x4"]["bits_a_value"], 4 + 16 / 128 + 4 / 128)
        self.assertEqual(rows["xcl3"]["bits_a_value"],
                         (3 * (4 + 20 / 128) + 29 * (3 + 19 / 128)) / 32)
        self.assertEqual([rows[name]["kinds"] for name in ("exact", "balanced", "x4", "xcl3",
                                                           "xgcl3")],
                         ["any", "KV and MLA", "X and XG", "X", "XG"])
        text = self.ok("profiles").decode()
        self.assertEqual(len(text.splitlines()), len(rows) + 1)
        self.assertRegex(text, r"(?m)^balanced +lossy +4.281 +3.74 ")

    def test_no_daemon(self):
        for command in (["ping"], ["stat"], ["ls"], ["clients"], ["verify"], ["bench"], ["top"],
                        ["drain"], ["disable"], ["enable"], ["reload"], ["log-level"],
                        ["log-level", "debug"],
                        ["purge", "--namespace", "x"], ["get", "--key-text", "k"],
                        ["put", "--key-text", "k"], ["evict", "--key-text", "k"]):
            result = run(KVFERRY, *command, "--socket", self.path("none.sock"), data=b"x")
            self.one_line(result, 3, "none.sock")

    def test_help_and_man_page_agree(self):
        text = self.ok("--help").decode()
        commands = re.findall(r"^    ([a-z-]+) +\S", text.split("Options of all")[0], re.MULTILINE)
        self.assertGreaterEqual(len(commands), 21)
        with open(os.path.join(ROOT, "docs", "man", "kvferry.1"), encoding="utf-8") as file:
            page = file.read().replace("\\-", "-")
        for command in commands:
            self.assertRegex(page, rf"(?m)^\.It Cm {command}\b")
            for option in re.findall(r"--([a-z-]+)", self.ok(command, "--help").decode()):
                self.assertIn(f"-{option}", page)

    def test_examples(self):
        for name, last in (("example_01_put_get", "every bit came back"),
                           ("example_02_async", "64 blocks of 256 KiB: 0 misses, 0 wrong")):
            code, out, error = run(os.path.join(EXAMPLES, name), self.daemon.socket)
            self.assertEqual(code, 0, error)
            self.assertIn(last, out.decode())


class OtherNode(Case):
    """Commands for a daemon on another node, by its address and a tenant's key."""

    def test_address(self):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        cluster, key = self.path("cluster.key"), self.path("client.key")
        with open(cluster, "wb") as file:
            file.write(os.urandom(32))
        daemon = Daemon(self.folder, f"cluster_key={cluster}", f"peers.listen=127.0.0.1:{port}",
                        env={"UCX_TLS": "tcp"})
        self.addCleanup(daemon.end)
        wait_for(lambda: daemon.process.poll() is not None or os.path.exists(daemon.admin), "start")
        if "UCX cannot be loaded" in daemon.log_text() or "has no UCX" in daemon.log_text():
            self.skipTest("no UCX here")
        daemon.wait_ready()
        code, line, _ = run(KVFERRY, "client-key", cluster)
        self.assertEqual(code, 0)
        self.assertRegex(line.decode(), "^default [0-9a-f]{64}\n$")
        with open(key, "wb") as file:
            file.write(line)
        self.one_line(run(KVFERRY, "client-key"), 2, "name the cluster's key")
        self.one_line(run(KVFERRY, "client-key", key), 1, "exactly 32 bytes")

        def far(*arguments, data=b""):
            return run(KVFERRY, *arguments, data=data, env={
                "UCX_TLS": "tcp", "KVFERRY_SOCKET": f"tcp://127.0.0.1:{port}", "KVFERRY_KEY": key})

        data = os.urandom(100_000)
        self.assertEqual(far("put", "--key-text", "far", data=data)[0], 0)
        self.assertEqual(far("get", "--key-text", "far")[:2], (0, data))
        self.assertEqual(far("ping", "--count", "3")[0], 0)
        self.assertEqual(far("evict", "--key-text", "far")[0], 0)
        self.assertEqual(far("get", "--key-text", "far")[0], 1)
        self.one_line(far("clients"), 2, "which is on its own node: run it there")
        code, said, _ = far("doctor")
        self.assertEqual(code, 0, said)
        self.assertIn("admin     note   the daemon is on another node", said.decode())


class ManPages(unittest.TestCase):
    def test_they_format_without_a_warning(self):
        groff = shutil.which("groff")
        if groff is None:
            self.skipTest("groff is not installed")
        folder = os.path.join(ROOT, "docs", "man")
        pages = sorted(os.listdir(folder))
        self.assertEqual(pages, ["kvferry.1", "kvferry.7", "kvferryd.8", "kvferryd.yaml.5"])
        for page in pages:
            code, _, error = run(groff, "-mdoc", "-ww", "-z", os.path.join(folder, page))
            self.assertEqual((code, error), (0, ""), page)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[4:])
