//! `cuvmm metrics` on ledgers of this test's own process and of others.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use cuvmm::LedgerView;
use cuvmm::ledger::FILE_ENDING;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit, setrlimit};
use tempfile::TempDir;

use crate::ledger::{MIB, cuvmm, device, done, engine};
use crate::support::program::Program;

/// `cuvmm metrics --listen`, and the address that it says.
struct Server {
    program: Program,
    address: String,
}

impl Server {
    fn start(directory: &Path, listen: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
        let command = command
            .args(["metrics", "--listen", listen, "--ledger"])
            .arg(directory);
        let mut program = Program(command.stderr(Stdio::piped()).spawn().unwrap());
        let mut said = String::new();
        let mut complaints = BufReader::new(program.0.stderr.take().unwrap());
        complaints.read_line(&mut said).unwrap();
        let address = said.trim().strip_prefix("serving figures at ").unwrap();
        Self {
            address: address.to_owned(),
            program,
        }
    }

    fn connect(&self) -> Box<dyn Stream> {
        match self.address.strip_prefix("unix:") {
            Some(path) => Box::new(UnixStream::connect(path).unwrap()),
            None => {
                let address = self.address.strip_prefix("http://").unwrap();
                Box::new(TcpStream::connect(address.strip_suffix("/metrics").unwrap()).unwrap())
            }
        }
    }

    fn get(&self, path: &str) -> String {
        let mut stream = self.connect();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

trait Stream: std::io::Read + std::io::Write {}

impl<T: std::io::Read + std::io::Write> Stream for T {}

fn unix(directory: &Path) -> String {
    format!("unix:{}", directory.join("metrics.sock").display())
}

#[test]
fn metrics_are_printed_and_served() {
    let (device, directory) = (device(), TempDir::new().unwrap());
    let engine = engine(&device, directory.path(), "en\"gine");
    let block = engine.chat.allocate(100 * MIB).unwrap();
    let text = done(directory.path(), &["metrics"]);
    let pid = std::process::id();
    let device = "device=\"6375766d-6d20-686f-7374-000000000000\"";
    for line in [
        format!("cuvmm_ledger_limit_bytes{{{device}}} 1073741824"),
        format!(
            "cuvmm_process_obtained_bytes{{{device},process=\"en\\\"gine\",pid=\"{pid}\",slot=\"0\"}} \
             104857600"
        ),
        // The limits that hold, which are the ledger's here.
        format!(
            "cuvmm_process_limit_bytes{{{device},process=\"en\\\"gine\",pid=\"{pid}\",slot=\"0\"}} \
             1073741824"
        ),
        format!(
            "cuvmm_tenant_limit_bytes{{{device},process=\"en\\\"gine\",pid=\"{pid}\",slot=\"0\",\
             pool=\"0\",tenant=\"chat\",state=\"registered\"}} 1073741824"
        ),
        "# TYPE cuvmm_process_stalled_seconds counter".to_owned(),
        "# TYPE cuvmm_process_stalled_full_seconds counter".to_owned(),
        "# TYPE cuvmm_process_waited_seconds gauge".to_owned(),
        format!("cuvmm_ledger_stalled_full_seconds_total{{{device}}} 0.0"),
        format!("cuvmm_ledger_usable_bytes{{{device}}} 1073741824"),
        "# UNIT cuvmm_tenant_in_use_bytes bytes".to_owned(),
    ] {
        assert!(text.lines().any(|it| it == line), "{line}\n{text}");
    }
    let in_use = "pool=\"0\",tenant=\"chat\",state=\"registered\"} 104857600";
    assert!(text.contains(in_use), "{text}");
    assert!(text.ends_with("# EOF\n"));

    for listen in [&*unix(directory.path()), "127.0.0.1:0"] {
        let server = Server::start(directory.path(), listen);
        let answer = server.get("/metrics");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(answer.contains("Content-Type: application/openmetrics-text; version=1.0.0"));
        assert!(answer.contains(in_use), "{answer}");
        assert!(server.get("/").starts_with("HTTP/1.1 404"));
    }
    for (listen, rule) in [
        ("0.0.0.0:9", "is no loopback address"),
        ("unix:", "a path follows unix:"),
        ("9470", "is not an address with a port"),
    ] {
        let (code, _, complaint) = cuvmm(directory.path(), &["metrics", "--listen", listen]);
        assert_eq!(code, 2, "{complaint}");
        assert!(complaint.contains(rule), "{complaint}");
    }
    drop(block);
}

/// A draining tenant and its successor are two series, and two draining ones are one.
#[test]
fn no_series_is_printed_twice() {
    let (device, directory) = (device(), TempDir::new().unwrap());
    let engine = engine(&device, directory.path(), "engine");
    let mut blocks = vec![engine.chat.allocate(2 * MIB).unwrap()];
    drop(engine.chat);
    for size in [4, 8] {
        let chat = engine.pool.tenant("chat").register().unwrap();
        blocks.push(chat.allocate(size * MIB).unwrap());
    }
    let chat = engine.pool.tenant("chat").register().unwrap();
    blocks.push(chat.allocate(16 * MIB).unwrap());
    let text = done(directory.path(), &["metrics"]);
    let mut series = BTreeSet::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (labels, _) = line.rsplit_once(' ').unwrap();
        assert!(series.insert(labels.to_owned()), "{line}");
    }
    let in_use = text
        .lines()
        .filter(|it| it.starts_with("cuvmm_tenant_in_use_bytes{"));
    let in_use: Vec<_> = in_use
        .map(|it| it.split_once(",state=").unwrap().1)
        .collect();
    assert_eq!(
        in_use,
        ["\"draining\"} 14680064", "\"registered\"} 16777216"]
    );
}

/// Idle clients are closed where a client comes that asks, and the server lives on with few
/// descriptors too.
#[test]
fn idle_clients_do_not_keep_others_from_the_figures() {
    let limit = getrlimit(Resource::Nofile);
    let current = limit.maximum;
    setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
    let (device, directory) = (device(), TempDir::new().unwrap());
    let engine = engine(&device, directory.path(), "engine");
    for (listen, descriptors) in [
        ("127.0.0.1:0", 1024),
        ("127.0.0.1:0", 16),
        (&*unix(directory.path()), 1024),
        (&*unix(directory.path()), 16),
    ] {
        let mut server = Server::start(directory.path(), listen);
        // The command has counted on more.
        let few = Rlimit {
            current: Some(descriptors),
            ..limit
        };
        prlimit(
            Some(Pid::from_child(&server.program.0)),
            Resource::Nofile,
            few,
        )
        .unwrap();
        let mut idle = Vec::new();
        for count in 0..600 {
            idle.push(server.connect());
            if count % 150 == 149 {
                let answer = server.get("/metrics");
                assert!(
                    answer.starts_with("HTTP/1.1 200"),
                    "{descriptors}: {answer}"
                );
                assert!(answer.ends_with("# EOF\n"), "{answer}");
            }
        }
        assert!(server.program.0.try_wait().unwrap().is_none());
    }
    drop(engine);
}

#[test]
fn a_client_that_does_not_read_keeps_no_other_from_the_figures() {
    let (device, directory) = (device(), TempDir::new().unwrap());
    let engine = engine(&device, directory.path(), "engine");
    // More figures than a socket takes.
    let names = (0..300).map(|number| format!("{number:0100}"));
    let tenants: Vec<_> = names
        .map(|name| engine.pool.tenant(name).register().unwrap())
        .collect();
    let server = Server::start(directory.path(), &unix(directory.path()));
    let mut still = Vec::new();
    for _ in 0..3 {
        let mut stream = server.connect();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        still.push(stream);
        assert!(server.get("/metrics").ends_with("# EOF\n"));
    }
    let mut answer = String::new();
    still[0].read_to_string(&mut answer).unwrap();
    assert!(answer.len() > 500_000 && answer.ends_with("# EOF\n"));
    drop(tenants);
}

#[test]
fn a_socket_of_a_killed_server_is_replaced_and_nothing_else() {
    let (device, directory) = (device(), TempDir::new().unwrap());
    let engine = engine(&device, directory.path(), "engine");
    let listen = unix(directory.path());
    let refused = |listen: &str, reason: &str| {
        let (code, _, complaint) = cuvmm(directory.path(), &["metrics", "--listen", listen]);
        assert_eq!(code, 1, "{complaint}");
        assert!(complaint.contains(reason), "{complaint}");
    };
    for _ in 0..3 {
        let server = Server::start(directory.path(), &listen);
        refused(&listen, "another process");
        assert!(server.get("/metrics").starts_with("HTTP/1.1 200"));
        // This kills it.
        drop(server);
    }
    let file = directory.path().join("file");
    std::fs::write(&file, "kept").unwrap();
    refused(&format!("unix:{}", file.display()), "no socket");
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(directory.path().join("metrics.sock"), &link).unwrap();
    refused(&format!("unix:{}", link.display()), "no socket");
    assert!(link.is_symlink());
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "kept");
    for refused in ["file.lock", "link.lock"] {
        assert!(!directory.path().join(refused).exists(), "{refused}");
    }
    let other = directory.path().join("other");
    let live = std::os::unix::net::UnixListener::bind(&other).unwrap();
    refused(
        &format!("unix:{}", other.display()),
        "another process listens",
    );
    drop(live);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    refused(&taken.local_addr().unwrap().to_string(), "in use");
    drop(engine);
}

/// A process that is stopped has no figures of tenants, does not count as answering, and takes no
/// figures from the others.
#[test]
fn stopped_processes_do_not_answer() {
    let directory = TempDir::new().unwrap();
    let names = ["a", "b", "c", "d"];
    let programs = names.map(|name| Program::start(directory.path(), name));
    let file = || {
        let mut files = std::fs::read_dir(directory.path()).unwrap();
        files.find_map(|it| {
            let path = it.unwrap().path();
            path.to_string_lossy()
                .ends_with(FILE_ENDING)
                .then_some(path)
        })
    };
    let shows = |wanted: &dyn Fn(&str) -> bool| {
        // What is awaited comes, or the test never ends.
        while !wanted(&cuvmm(directory.path(), &["metrics"]).1) {}
    };
    let tenant = |name: &str| format!("process=\"{name}\",");
    shows(&|text| {
        let models = text.lines().filter(|it| it.contains("tenant=\"model\""));
        let models: Vec<_> = models.collect();
        names
            .iter()
            .all(|name| models.iter().any(|it| it.contains(&tenant(name))))
    });
    let view = LedgerView::open(file().unwrap()).unwrap();
    for stopped in &programs[..3] {
        kill_process(Pid::from_child(&stopped.0), Signal::STOP).unwrap();
    }
    let server = Server::start(directory.path(), &unix(directory.path()));
    let answers = |text: &str, name: &str| {
        let mut lines = text
            .lines()
            .filter(|it| it.starts_with("cuvmm_process_answering{"));
        let line = lines.find(|it| it.contains(&tenant(name))).unwrap();
        line.ends_with(" 1")
    };
    loop {
        let text = server.get("/metrics");
        let stopped = names[..3].iter().all(|name| !answers(&text, name));
        assert!(stopped, "{text}");
        let of = |name: &str| {
            text.lines()
                .any(|it| it.contains(&tenant(name)) && it.contains("tenant="))
        };
        assert!(!of("a") && !of("b") && !of("c"), "{text}");
        if answers(&text, "d") && of("d") {
            break;
        }
    }
    assert_eq!(view.stats().processes.len(), 4);
    for stopped in &programs[..3] {
        kill_process(Pid::from_child(&stopped.0), Signal::CONT).unwrap();
    }
}
