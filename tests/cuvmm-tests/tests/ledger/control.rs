//! Figures and terms of a process of a ledger, asked and changed from outside.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cuvmm::driver::host::{HostDriver, HostOptions};
use cuvmm::error::{ControlError, GroupError};
use cuvmm::ledger::{Control, GroupRequest, LedgerBuilder, Remote};
use cuvmm::{Contents, Device, Group, Ledger, LedgerView, Limit, Pool};

const MIB: u64 = 1 << 20;

struct Process {
    device: Device,
    directory: tempfile::TempDir,
}

impl Process {
    fn new() -> Self {
        let driver = Arc::new(HostDriver::new(HostOptions::new()));
        Self {
            device: Device::open(driver, 0).unwrap(),
            directory: tempfile::tempdir().unwrap(),
        }
    }

    fn builder(&self) -> LedgerBuilder<'_> {
        let builder = Ledger::builder(&self.device, self.directory.path());
        builder.limit(1 << 30).name("engine")
    }

    fn pool(&self, ledger: &Ledger) -> Pool {
        Pool::builder(&self.device).ledger(ledger).build().unwrap()
    }

    fn sockets(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.directory.path()).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        let is_socket = |path: &PathBuf| path.extension().is_some_and(|it| it == "control");
        paths.filter(is_socket).collect()
    }
}

fn control(ledger: &Ledger) -> Control {
    LedgerView::open(ledger.path())
        .unwrap()
        .control(ledger.slot())
}

fn refusal<T: std::fmt::Debug>(answer: Result<T, ControlError>) -> String {
    match answer.unwrap_err() {
        ControlError::Refused(reason) => reason,
        other => panic!("{other}"),
    }
}

#[test]
fn a_report_has_the_figures_of_every_tenant() {
    let process = Process::new();
    let ledger = process.builder().open().unwrap();
    assert_eq!(control(&ledger).report().unwrap().pools, []);
    let pool = process.pool(&ledger);
    let chat = pool.tenant("chat").guarantee(64 * MIB).register().unwrap();
    let block = chat.allocate(100 * MIB).unwrap();
    drop(chat.allocate(20 * MIB).unwrap());
    let report = control(&ledger).report().unwrap();
    let [found] = &report.pools[..] else {
        panic!("{report:?}")
    };
    let tenant = &found.tenants[0];
    assert_eq!((&*tenant.name, tenant.blocks), ("chat", 1));
    assert_eq!(tenant.in_use, 100 * MIB);
    assert_eq!(tenant.cached + tenant.pending_free, 20 * MIB);
    assert_eq!(tenant.guarantee, 64 * MIB);
    assert_eq!(found.committed, 120 * MIB);
    assert!(found.granted >= found.committed);
    drop(block);
}

#[test]
fn a_report_has_the_limit_of_a_tenant_that_holds() {
    let process = Process::new();
    let ledger = process.builder().open().unwrap();
    let pool = Pool::builder(&process.device).ledger(&ledger);
    let pool = pool.limit(Limit::Bytes(600 * MIB)).build().unwrap();
    let chat = pool.tenant("chat").register().unwrap();
    let limit = || {
        let report = control(&ledger).report().unwrap();
        report.pools[0].tenants[0].limit
    };
    assert_eq!(limit(), 600 * MIB, "its pool's");
    control(&ledger).set_limit(None, 500 * MIB).unwrap();
    assert_eq!(limit(), 500 * MIB, "its process's");
    chat.set_limit(400 * MIB).unwrap();
    assert_eq!(limit(), 400 * MIB, "its own");
    chat.set_limit(u64::MAX).unwrap();
    control(&ledger).set_limit(None, u64::MAX).unwrap();
    pool.set_limit(Limit::Bytes(2 << 30)).unwrap();
    assert_eq!(limit(), 1 << 30, "the ledger's");
}

#[test]
fn a_guarantee_beyond_a_limit_names_the_limit() {
    let process = Process::new();
    let ledger = process.builder().open().unwrap();
    let engine = control(&ledger);
    let own = || ledger.stats().processes[0].clone();
    let beyond = |bytes| refusal(engine.set_guarantee(None, bytes));
    let of = |which, bytes| {
        let what = "bytes of a process's guarantee, which is at most";
        format!("{what} {which} limit: {bytes} is more than the maximum of")
    };
    for (bytes, shown) in [(2 << 30, "2 GiB"), (1 << 50, "1 PiB")] {
        assert_eq!(
            beyond(bytes),
            format!("{} 1 GiB", of("the ledger's", shown))
        );
    }
    engine.set_limit(None, 600 * MIB).unwrap();
    assert_eq!(beyond(2 << 30), format!("{} 600 MiB", of("its", "2 GiB")));
    assert_eq!((own().guarantee, own().charged), (0, 0));
    engine.set_guarantee(None, 600 * MIB).unwrap();
    assert_eq!(own().guarantee, 600 * MIB);
}

#[test]
fn terms_of_a_tenant_are_changed() {
    let process = Process::new();
    let ledger = process.builder().open().unwrap();
    let pool = process.pool(&ledger);
    let chat = pool.tenant("chat").register().unwrap();
    let block = chat.allocate(100 * MIB).unwrap();
    let engine = control(&ledger);
    assert_eq!(engine.set_limit(Some("chat"), 60 * MIB), Ok(40 * MIB));
    assert!(chat.allocate(2 * MIB).is_err(), "it is above its limit");
    engine.set_limit(Some("chat"), 200 * MIB).unwrap();
    engine.set_guarantee(Some("chat"), 150 * MIB).unwrap();
    engine.set_priority(Some("chat"), -3).unwrap();
    let stats = chat.stats();
    assert_eq!((stats.guarantee, stats.priority), (150 * MIB, -3));
    let refused = refusal(engine.set_guarantee(Some("chat"), 201 * MIB));
    assert!(
        refused.contains("200 MiB") || refused.contains("209715200"),
        "{refused}"
    );
    assert_eq!(chat.stats().guarantee, 150 * MIB);
    let refused = refusal(engine.set_limit(Some("other"), MIB));
    assert_eq!(refused, "no tenant is named \"other\": there are \"chat\"");
    let second = process.pool(&ledger);
    let twin = second.tenant("chat").register().unwrap();
    let refused = refusal(engine.set_limit(Some("chat"), 10 * MIB));
    assert_eq!(refused, "2 pools have a tenant named \"chat\"");
    assert_eq!(chat.stats().limit, 200 * MIB);
    drop((block, twin));
}

#[test]
fn terms_of_the_process_are_changed() {
    let process = Process::new();
    let ledger = process.builder().open().unwrap();
    let pool = process.pool(&ledger);
    let chat = pool.tenant("chat").register().unwrap();
    let block = chat.allocate(100 * MIB).unwrap();
    drop(chat.allocate(200 * MIB).unwrap());
    let engine = control(&ledger);
    let view = LedgerView::open(ledger.path()).unwrap();
    let own = || view.stats().processes[0].clone();

    // Idle memory is given back, memory in use is not.
    assert_eq!(engine.set_limit(None, 150 * MIB), Ok(0));
    assert_eq!(own().limit, 150 * MIB);
    assert!(
        (100 * MIB..=150 * MIB).contains(&own().charged),
        "{:?}",
        own()
    );
    assert_eq!(engine.set_limit(None, 60 * MIB), Ok(40 * MIB));
    let refused = chat.try_allocate(2 * MIB).unwrap_err();
    assert!(refused.to_string().contains("its own limit"), "{refused}");
    assert!(refusal(engine.set_limit(None, 0)).contains("limit"));
    assert_eq!(own().limit, 60 * MIB);

    engine.set_limit(None, 400 * MIB).unwrap();
    engine.set_priority(None, 7).unwrap();
    engine.set_guarantee(None, 300 * MIB).unwrap();
    assert_eq!((own().priority, own().guarantee), (7, 300 * MIB));
    assert_eq!(own().charged, 300 * MIB, "a guarantee is charged");
    assert!(refusal(engine.set_limit(None, 299 * MIB)).contains("limit"));
    let refused = refusal(engine.set_guarantee(None, 401 * MIB));
    assert!(refused.contains("at most its limit: 402 MiB"), "{refused}");
    drop(block);
}

#[test]
fn idle_memory_is_trimmed() {
    let process = Process::new();
    let ledger = process.builder().open().unwrap();
    let pool = process.pool(&ledger);
    let chat = pool.tenant("chat").register().unwrap();
    let block = chat.allocate(100 * MIB).unwrap();
    drop(chat.allocate(200 * MIB).unwrap());
    let refunded = control(&ledger).trim(0).unwrap();
    assert!(refunded >= 200 * MIB, "{refunded}");
    assert_eq!(ledger.stats().charged, 100 * MIB);
    assert_eq!(control(&ledger).trim(0), Ok(0));
    drop(block);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn what_is_trimmed_is_what_was_idle_beside_a_guarantee() {
    let process = Process::new();
    let ledger = process.builder().open().unwrap();
    let pool = process.pool(&ledger);
    let chat = pool.tenant("chat").guarantee(100 * MIB).register().unwrap();
    let code = pool.tenant("code").register().unwrap();
    drop(code.allocate(200 * MIB).unwrap());
    // This memory is in the free list then, and the guarantee needs some of it.
    code.set_limit(140 * MIB).unwrap();
    let own = || ledger.stats().processes[0].clone();
    let begun = Instant::now();
    let mut found = own();
    while found.charged > 250 * MIB || found.idle != found.charged - 100 * MIB {
        found = own();
        assert!(begun.elapsed().as_secs() < 20, "{found:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(control(&ledger).trim(100 * MIB), Ok(found.idle));
    assert_eq!(own().charged, 100 * MIB);
    drop(chat);
}

#[test]
fn sleep_is_a_matter_of_the_program() {
    let process = Process::new();
    let ledger = process.builder().open().unwrap();
    let refused = refusal(control(&ledger).sleep(None));
    assert_eq!(
        refused,
        "the process has set no function that puts it to sleep"
    );
    drop(ledger);

    let asleep: Arc<Mutex<Option<Pool>>> = Arc::default();
    let (down, up) = (Arc::clone(&asleep), Arc::clone(&asleep));
    let tenant = |pool: &Mutex<Option<Pool>>, name: Option<&str>| {
        let pool = pool.lock().unwrap().clone().ok_or("no model is loaded")?;
        let name = name.ok_or("name a tenant")?;
        pool.find_tenant(name).ok_or("no such tenant")
    };
    let ledger = process
        .builder()
        .on_sleep(move |name| {
            let blocks = tenant(&down, name)?;
            let slept = blocks.blocks().sleep(Contents::Discard);
            slept.map(drop).map_err(|error| error.to_string())
        })
        .on_wake(move |name| {
            assert!(name.is_some(), "the function panics");
            let blocks = tenant(&up, name)?;
            let woken = blocks.blocks().wake();
            woken.map(drop).map_err(|error| error.to_string())
        })
        .open()
        .unwrap();
    let engine = control(&ledger);
    let absent = "no tenant is named \"chat\": there is none";
    assert_eq!(refusal(engine.sleep(Some("chat"))), absent);
    assert_eq!(refusal(engine.wake(Some("chat"))), absent);
    let pool = process.pool(&ledger);
    let chat = pool.tenant("chat").register().unwrap();
    assert_eq!(refusal(engine.sleep(Some("chat"))), "no model is loaded");
    *asleep.lock().unwrap() = Some(pool.clone());
    let block = chat.allocate(100 * MIB).unwrap();
    engine.sleep(Some("chat")).unwrap();
    assert!(block.is_asleep());
    assert_eq!(
        engine.report().unwrap().pools[0].tenants[0].asleep,
        100 * MIB
    );
    let refused = refusal(engine.wake(None));
    assert_eq!(refused, "the process's function that wakes it panicked");
    engine.wake(Some("chat")).unwrap();
    assert!(!block.is_asleep());
    *asleep.lock().unwrap() = None;
}

/// Two ranks, whose functions meet while both are asked.
#[test]
fn a_group_is_asked_in_all_its_ranks_at_once() {
    let processes = [Process::new(), Process::new()];
    let directory = tempfile::tempdir().unwrap();
    let controls = processes.each_ref().map(|process| {
        let group = Group::join(directory.path(), "tp0", 2, None).unwrap();
        let ledger = process.builder().on_group(move |it| {
            let text = |error: GroupError| error.to_string();
            let entered = group.enter(&it.tags.concat(), it.timeout).map_err(text)?;
            match it.wake && group.rank() == 1 {
                true => Err(entered.fail("no memory").to_string()),
                false => entered.ready().map_err(text),
            }
        });
        let ledger = ledger.open().unwrap();
        (control(&ledger), ledger)
    });
    let (controls, ledgers): (Vec<_>, Vec<_>) = controls.into_iter().unzip();
    let request = |wake| {
        let request = GroupRequest::new("tp0", wake).tags(vec!["weights".to_owned()]);
        request.timeout(Duration::from_secs(600))
    };
    for _ in 0..3 {
        for answer in Control::group(&controls, &request(false)) {
            answer.unwrap();
        }
    }
    let own = std::process::id();
    for answer in Control::group(&controls, &request(true)) {
        let text = format!(
            "group \"tp0\" has undone \"weights\": rank 1 (process {own}) failed: no memory"
        );
        assert_eq!(refusal(answer), text);
    }
    let plain = Process::new();
    let ledger = plain.builder().open().unwrap();
    let refused = Control::group(&[control(&ledger)], &request(true));
    assert_eq!(
        refusal(refused.into_iter().next().unwrap()),
        "the process has set no function that puts groups to sleep and wakes them"
    );
    drop(ledgers);
}

#[test]
fn a_process_answers_what_it_allows() {
    let process = Process::new();
    let ledger = process.builder().remote(Remote::Figures).open().unwrap();
    let engine = control(&ledger);
    engine.report().unwrap();
    for refused in [
        engine.trim(0),
        engine.set_limit(None, MIB),
        engine.sleep(None).map(|()| 0),
    ] {
        let reason = refusal(refused);
        assert_eq!(
            reason,
            "the process does not allow changes by other programs"
        );
    }
    drop(ledger);
    let ledger = process.builder().remote(Remote::Nothing).open().unwrap();
    let answer = control(&ledger).report();
    assert!(
        matches!(answer, Err(ControlError::NotServed { .. })),
        "{answer:?}"
    );
    assert_eq!(process.sockets(), [] as [PathBuf; 0]);
}

#[test]
fn a_socket_goes_with_its_process_and_names_no_other() {
    let process = Process::new();
    let ledger = process.builder().open().unwrap();
    let old = control(&ledger);
    assert_eq!(process.sockets().len(), 1);
    drop(ledger);
    // The threads of the ledger may hold it for a moment.
    for _ in 0..1_000 {
        if process.sockets().is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(process.sockets(), [] as [PathBuf; 0]);
    let ledger = process.builder().name("next").open().unwrap();
    let answer = old.set_limit(None, MIB);
    assert!(
        matches!(answer, Err(ControlError::NotServed { .. })),
        "{answer:?}"
    );
    control(&ledger).report().unwrap();
}

#[test]
fn the_sockets_of_a_replaced_file_are_in_no_ones_way() {
    let process = Process::new();
    let old = process.builder().open().unwrap();
    std::fs::remove_file(old.path()).unwrap();
    let ledger = process.builder().name("next").open().unwrap();
    control(&ledger).report().unwrap();
    drop(old);
    for _ in 0..1_000 {
        if process.sockets().len() == 1 {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    control(&ledger).report().unwrap();
}

#[test]
fn a_socket_that_a_dead_process_left_is_replaced() {
    let process = Process::new();
    let ledger = process.builder().open().unwrap();
    let socket = process.sockets().remove(0);
    drop(ledger);
    let begun = Instant::now();
    while socket.exists() {
        assert!(begun.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(1));
    }
    // The next process in the slot has this name.
    let next = socket.to_str().unwrap().replace("-0.control", "-1.control");
    drop(UnixListener::bind(next).unwrap());
    let ledger = process.builder().open().unwrap();
    control(&ledger).report().unwrap();
}

#[test]
fn a_long_path_is_no_obstacle() {
    let process = Process::new();
    let deep = process.directory.path().join("d".repeat(150));
    let ledger = Ledger::builder(&process.device, &deep).limit(1 << 30);
    let ledger = ledger.open().unwrap();
    control(&ledger).report().unwrap();
}

/// Sends bytes, and returns the answer.
fn send(socket: &Path, bytes: &[u8]) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_hostile_client_is_refused_and_delays_others_by_a_second_at_most() {
    let process = Process::new();
    let ledger = process.builder().open().unwrap();
    let socket = process.sockets().remove(0);
    let deep = [b"[".repeat(50_000), b"\n".to_vec()].concat();
    for bytes in [
        &b""[..],
        b"\n",
        b"\xff\xfe\n",
        b"{\"trim\":{\"keep\":-1}}\n",
        b"{\"change\":{\"tenant\":null,\"change\":{\"limit\":1e99}}}\n",
        b"\"report\"  \"report\"\n",
        &deep,
    ] {
        let answer = send(&socket, bytes);
        assert!(
            answer.starts_with("{\"refused\":\"this is not a request"),
            "{answer}"
        );
    }
    // More than a request may be: the connection ends, with or without an answer.
    send(&socket, &b"x".repeat(1 << 20));
    assert!(send(&socket, b"\"report\"\nmore").starts_with("{\"report\":"));
    let silent = UnixStream::connect(&socket).unwrap();
    control(&ledger).report().unwrap();
    drop(silent);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn a_client_that_reads_slowly_delays_others_by_a_second_or_so() {
    let process = Process::new();
    let ledger = process.builder().open().unwrap();
    let pool = process.pool(&ledger);
    let long = pool.tenant("n".repeat(4 << 20)).register().unwrap();
    let mut slow = UnixStream::connect(process.sockets().remove(0)).unwrap();
    slow.write_all(b"\"report\"\n").unwrap();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut part = vec![0; 100 << 10];
            while begun.elapsed() < Duration::from_secs(6) && slow.read(&mut part).unwrap() > 0 {
                std::thread::sleep(Duration::from_millis(500));
            }
        });
        std::thread::sleep(Duration::from_millis(100));
        control(&ledger).report().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(4));
    });
    drop(long);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn an_answer_takes_no_longer_than_the_client_allows() {
    let process = Process::new();
    let ledger = process.builder().open().unwrap();
    let socket = process.sockets().remove(0);
    control(&ledger).timeout(Duration::MAX).report().unwrap();
    std::fs::remove_file(&socket).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    let begun = Instant::now();
    let short = Duration::from_millis(200);
    let engine = control(&ledger).timeout(short);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            while begun.elapsed() < Duration::from_secs(3) && stream.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let timed_out = Err(ControlError::TimedOut(short));
        assert_eq!(engine.report(), timed_out);
        assert!(begun.elapsed() < Duration::from_secs(2));
    });
    // No thread accepts: the queue is full after the first.
    rustix::net::listen(&listener, 0).unwrap();
    let (done, outcome) = channel();
    std::thread::spawn(move || {
        let all = (0..3).all(|_| matches!(engine.report(), Err(ControlError::TimedOut { .. })));
        done.send(all)
    });
    assert_eq!(outcome.recv_timeout(Duration::from_secs(20)), Ok(true));
}
