//! Prometheus reads the figures of two processes from `cuvmm metrics`.
//!
//! Needs `prometheus` on the path or at `CUVMM_PROMETHEUS`. Without it the test says so and ends, or
//! fails if `CUVMM_REQUIRE_PROMETHEUS` is set.

#![allow(clippy::panic, clippy::unwrap_used)]

mod support;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use support::program::{Program, run};
use tempfile::TempDir;

/// How long Prometheus may take to start and to read the figures.
const PATIENCE: Duration = Duration::from_secs(90);

/// How often a free port is looked for. Another program may take it before Prometheus does.
const TRIES: usize = 5;

#[test]
#[ignore = "a program of its own, started by another test"]
fn example_processes() {
    run();
}

#[test]
fn prometheus_reads_the_figures() {
    let Some(prometheus) = prometheus() else {
        let required = std::env::var_os("CUVMM_REQUIRE_PROMETHEUS").is_some();
        assert!(!required, "CUVMM_REQUIRE_PROMETHEUS is set: no prometheus");
        println!("NO PROMETHEUS: nothing reads the metrics here");
        return;
    };
    let ledgers = TempDir::new().unwrap();
    let _chat = Program::start(ledgers.path(), "chat");
    let _code = Program::start(ledgers.path(), "code");
    let (metrics, address) = metrics(ledgers.path());
    let server = Server::start(&prometheus, &address);

    let targets = server.until("the target", "/api/v1/targets", |answer| {
        let target = &answer["data"]["activeTargets"][0];
        let health = target["health"].as_str().unwrap_or_default();
        // Text that Prometheus cannot read would stay an error for ever.
        assert_ne!(health, "down", "{answer}");
        health == "up"
    });
    assert_eq!(
        targets["data"]["activeTargets"].as_array().unwrap().len(),
        1
    );
    // Both processes have joined, and their tenants are known.
    for (query, expected) in [
        ("cuvmm_ledger_limit_bytes", (1_u64 << 30).to_string()),
        ("count(cuvmm_process_charged_bytes)", "2".to_owned()),
        ("sum(cuvmm_process_answering)", "2".to_owned()),
        (
            "cuvmm_process_guarantee_bytes{process=\"chat\"}",
            (128_u64 << 20).to_string(),
        ),
        (
            "cuvmm_tenant_in_use_bytes{process=\"code\",tenant=\"model\"}",
            (64_u64 << 20).to_string(),
        ),
        ("count(cuvmm_process_stalled_seconds_total)", "2".to_owned()),
        (
            "count(cuvmm_process_stalled_full_seconds_total)",
            "2".to_owned(),
        ),
        ("count(cuvmm_process_waited_seconds)", "2".to_owned()),
        (
            "count(cuvmm_ledger_stalled_full_seconds_total)",
            "1".to_owned(),
        ),
        ("cuvmm_ledger_usable_bytes", (1_u64 << 30).to_string()),
        (
            "count(cuvmm_tenant_refusals_total{tenant=\"cache\"})",
            "2".to_owned(),
        ),
    ] {
        let path = format!("/api/v1/query?query={}", encoded(query));
        server.until(query, &path, |answer| {
            let samples = answer["data"]["result"].as_array();
            let sample = samples.and_then(|it| it.first());
            sample.is_some_and(|it| it["value"][1] == *expected)
        });
    }
    drop(metrics);
}

/// Returns the program, if it is here.
fn prometheus() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("CUVMM_PROMETHEUS") {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH")?;
    let mut found = std::env::split_paths(&path).map(|folder| folder.join("prometheus"));
    found.find(|file| file.is_file())
}

/// Serves the figures of ledgers at a port that is free. Returns the address without a path.
fn metrics(ledgers: &Path) -> (Program, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    let command = command.args(["metrics", "--listen", "127.0.0.1:0", "--ledger"]);
    let command = command.arg(ledgers).stderr(Stdio::piped());
    let mut served = Program(command.spawn().unwrap());
    let mut said = String::new();
    let complaints = served.0.stderr.take().unwrap();
    BufReader::new(complaints).read_line(&mut said).unwrap();
    let address = said.trim().strip_prefix("serving figures at http://");
    let address = address.and_then(|it| it.strip_suffix("/metrics"));
    let address = address.unwrap_or_else(|| panic!("{said}")).to_owned();
    (served, address)
}

/// A Prometheus that reads one target.
struct Server {
    _folder: TempDir,
    _program: Program,
    port: u16,
}

impl Server {
    /// Starts Prometheus and waits until it answers.
    fn start(prometheus: &Path, target: &str) -> Self {
        let folder = TempDir::new().unwrap();
        let config = folder.path().join("prometheus.yml");
        let text = format!(
            "global:\n  scrape_interval: 1s\nscrape_configs:\n- job_name: cuvmm\n  \
             static_configs:\n  - targets: ['{target}']\n"
        );
        std::fs::write(&config, text).unwrap();
        let mut log = String::new();
        for attempt in 0..TRIES {
            let data = folder.path().join(format!("data{attempt}"));
            let log_file = folder.path().join(format!("log{attempt}"));
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
            let port = port.unwrap().port();
            let program = Command::new(prometheus)
                .arg(format!("--config.file={}", config.display()))
                .arg(format!("--storage.tsdb.path={}", data.display()))
                .arg(format!("--web.listen-address=127.0.0.1:{port}"))
                .stdout(Stdio::null())
                .stderr(std::fs::File::create(&log_file).unwrap())
                .spawn()
                .unwrap();
            let mut program = Program(program);
            if is_ready(&mut program.0, port) {
                return Self {
                    _folder: folder,
                    _program: program,
                    port,
                };
            }
            log = std::fs::read_to_string(&log_file).unwrap();
        }
        panic!("Prometheus does not start:\n{log}");
    }

    /// Asks until the answer satisfies a condition, and returns the answer.
    fn until(&self, what: &str, path: &str, is: impl Fn(&Value) -> bool) -> Value {
        let until = Instant::now() + PATIENCE;
        loop {
            let (_, body) = get(self.port, path).unwrap();
            let answer: Value = serde_json::from_str(&body).unwrap();
            if is(&answer) {
                return answer;
            }
            assert!(Instant::now() < until, "{what} did not come: {answer}");
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Waits until Prometheus is ready. Returns `false` if it has ended.
fn is_ready(program: &mut Child, port: u16) -> bool {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        if program.try_wait().unwrap().is_some() {
            return false;
        }
        if get(port, "/-/ready").is_ok_and(|(status, _)| status.contains(" 200 ")) {
            return true;
        }
        thread::sleep(Duration::from_millis(50));
    }
    false
}

/// Returns the first line and the body of an answer.
fn get(port: u16, path: &str) -> std::io::Result<(String, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    // This version of HTTP has no chunks.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    let status = head.lines().next().unwrap_or_default();
    Ok((status.to_owned(), body.to_owned()))
}

/// Returns a text for the query of an address.
fn encoded(text: &str) -> String {
    let bytes = text.bytes().map(|byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    });
    bytes.collect()
}
