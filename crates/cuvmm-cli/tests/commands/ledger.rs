//! `cuvmm top` and `cuvmm ctl` on ledgers of this test's own process.

#![allow(clippy::unwrap_used)]

use std::fs::{File, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, chown};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use assert_cmd::Command;
use cuvmm::driver::host::{HostDriver, HostOptions};
use cuvmm::driver::{Driver, HandleTypes, Ordinal};
use cuvmm::ledger::{ProcessState, Remote};
use cuvmm::{Attachment, Device, Group, Ledger, LedgerView, Offer, Pool, Stream, Tenant};
use serde_json::Value;
use tempfile::TempDir;

pub(super) const MIB: u64 = 1 << 20;

pub(super) struct Engine {
    pub(super) ledger: Ledger,
    pub(super) pool: Pool,
    pub(super) chat: Tenant,
}

pub(super) fn engine(device: &Device, directory: &Path, name: &str) -> Engine {
    let ledger = Ledger::builder(device, directory)
        .limit(1 << 30)
        .name(name)
        .open()
        .unwrap();
    let pool = Pool::builder(device).shareable(HandleTypes::POSIX_FD);
    let pool = pool.ledger(&ledger).build().unwrap();
    let chat = pool.tenant("chat").register().unwrap();
    Engine { ledger, pool, chat }
}

pub(super) fn device() -> Device {
    Device::open(Arc::new(HostDriver::new(HostOptions::new())), 0).unwrap()
}

/// Runs the command on the ledgers of a directory. Returns the exit code, and what it printed and
/// complained.
pub(super) fn cuvmm(directory: &Path, arguments: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    let command = command.args(arguments).arg("--ledger").arg(directory);
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    (code, text(output.stdout), text(output.stderr))
}

pub(super) fn done(directory: &Path, arguments: &[&str]) -> String {
    let (code, printed, complaint) = cuvmm(directory, arguments);
    assert_eq!((code, &*complaint), (0, ""), "{arguments:?}");
    printed
}

#[test]
fn top_shows_processes_and_their_tenants() {
    let (device, directory) = (device(), TempDir::new().unwrap());
    let engine = engine(&device, directory.path(), "engine");
    // A process joins under no such name, but it can write one into the file.
    let file = std::fs::read(engine.ledger.path()).unwrap();
    let at = file.windows(6).position(|it| it == b"engine").unwrap();
    let file = File::options().write(true).open(engine.ledger.path());
    let written = file
        .unwrap()
        .write_all_at(b"\x1b[2J", (at + 6).try_into().unwrap());
    written.unwrap();
    let block = engine.chat.allocate(100 * MIB).unwrap();
    let text = done(directory.path(), &["top", "--once"]);
    assert!(text.contains("of 1 GiB charged; figures in GiB"), "{text}");
    assert!(text.contains("| engine[2J"), "{text}");
    // A narrow terminal does without the last columns.
    let columns = "state | charged | in use | idle | stalled% | limit |";
    let head = text.lines().find(|line| line.starts_with("| process"));
    let head = head
        .unwrap()
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ");
    assert!(head.contains(columns), "{head}");
    assert!(text.contains("|   /chat"), "{text}");
    assert!(
        text.lines().all(|line| line.chars().count() <= 100),
        "{text}"
    );

    let object: Value = serde_json::from_str(&done(directory.path(), &["top", "--json"])).unwrap();
    let process = &object["ledgers"][0]["processes"][0];
    assert_eq!(process["pid"], std::process::id());
    assert_eq!(process["obtained"], 100 * MIB);
    assert_eq!(process["no_report"], Value::Null);
    assert_eq!(process["waits"], Value::Null);
    assert_eq!(process["stalled_full_average"]["avg300"], 0.0);
    assert_eq!(object["ledgers"][0]["usable"], 1_u64 << 30);
    assert_eq!(object["ledgers"][0]["exports"], Value::Array(Vec::new()));
    let tenant = &process["report"]["pools"][0]["tenants"][0];
    assert_eq!(tenant["name"], "chat");
    assert_eq!(tenant["in_use"], 100 * MIB);
    drop(block);
}

#[test]
fn top_shows_who_lends_memory_to_whom_and_who_has_left() {
    let (device, directory) = (device(), TempDir::new().unwrap());
    let at = directory.path();
    let (owner, user) = (engine(&device, at, "owner"), engine(&device, at, "user"));
    let block = owner.chat.allocate(64 * MIB).unwrap();
    let parcel = Offer::block(&block).unwrap().parcel().unwrap();
    let text = done(at, &["top", "--once"]);
    let line = "\nowner lends 64 MiB in 1 block to no process yet\n";
    assert!(text.contains(line), "{text}");
    let stream = Stream::new(&device).unwrap();
    let attached = Attachment::builder(&device).home_stream(&stream);
    let attached = attached.ledger(&user.ledger).open(&parcel).unwrap();
    let text = done(at, &["top", "--once"]);
    let line = "\nowner lends 64 MiB in 1 block to user\n";
    assert!(text.contains(line), "{text}");

    let view = LedgerView::open(user.ledger.path()).unwrap();
    drop((block, parcel, owner));
    // The ledger's thread ends with the last step of leaving.
    while view.stats().processes[0].state != ProcessState::Lending {
        thread::sleep(Duration::from_millis(1));
    }
    let text = done(at, &["top", "--once"]);
    assert!(text.contains("| lending |"), "{text}");
    let line = "\nowner lends 64 MiB in 1 block to user; given back, and charged";
    assert!(text.contains(line), "{text}");
    let object: Value = serde_json::from_str(&done(at, &["top", "--json"])).unwrap();
    let ledger = &object["ledgers"][0];
    let [owner, user] = [0, 1].map(|it| &ledger["processes"][it]);
    assert_eq!(owner["state"], "Lending");
    // The ledger's limit, which is below their own, as in the text.
    let tenant = &user["report"]["pools"][0]["tenants"][0];
    for it in [owner, user, tenant] {
        assert_eq!(it["limit"], ledger["limit"], "{it}");
    }
    let export = &ledger["exports"][0];
    assert_eq!(
        (&export["owner"], &export["bytes"]),
        (&0.into(), &(64 * MIB).into())
    );
    assert_eq!(
        (&export["given_back"], &export["holders"][0]),
        (&true.into(), &1.into())
    );
    drop(attached);
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn top_shows_foreign_memory_that_a_process_waits_for() {
    let (driver, directory) = (
        Arc::new(HostDriver::new(HostOptions::new())),
        TempDir::new(),
    );
    let device = Device::open(Arc::clone(&driver) as Arc<dyn Driver>, 0).unwrap();
    let directory = directory.unwrap();
    let at = directory.path();
    let engine = engine(&device, at, "engine");
    let block = engine.chat.allocate(100 * MIB).unwrap();
    let foreign = device.total_memory() - 150 * MIB;
    driver.set_used_elsewhere(Ordinal(0), foreign);
    thread::scope(|scope| {
        let wait = Duration::from_secs(120);
        let waiting = engine.chat.block(200 * MIB).timeout(wait);
        let waiting = scope.spawn(|| waiting.allocate().unwrap());
        while engine.ledger.stats().processes[0].waits.is_none() {
            thread::sleep(Duration::from_millis(1));
        }
        let text = done(at, &["top", "--once"]);
        assert!(
            text.contains(", which leaves 150 MiB of the limit\n"),
            "{text}"
        );
        let why = ": foreign memory leaves 50 MiB of the limit\n";
        assert!(
            text.contains("\nengine waits ") && text.contains(why),
            "{text}"
        );
        let object: Value = serde_json::from_str(&done(at, &["top", "--json"])).unwrap();
        let ledger = &object["ledgers"][0];
        assert_eq!(
            (&ledger["foreign"], &ledger["usable"]),
            (&foreign.into(), &(150 * MIB).into())
        );
        assert!(ledger["processes"][0]["waits"]["lacks"].as_u64().unwrap() > 0);
        driver.set_used_elsewhere(Ordinal(0), 0);
        drop(waiting.join().unwrap());
    });
    drop(block);
}

#[test]
fn top_says_why_a_process_shows_no_tenants() {
    let (device, directory) = (device(), TempDir::new().unwrap());
    let ledger = Ledger::builder(&device, directory.path()).name("quiet");
    let _quiet = ledger.remote(Remote::Nothing).open().unwrap();
    let text = done(directory.path(), &["top", "--once"]);
    assert!(
        text.contains("quiet shows no tenants: no process serves"),
        "{text}"
    );
}

#[test]
fn top_without_a_ledger_says_so() {
    let directory = TempDir::new().unwrap();
    let text = done(directory.path(), &["top", "--once"]);
    let shown = directory.path().display();
    assert_eq!(text, format!("there is no ledger in {shown}\n"));
    let (code, _, complaint) = cuvmm(&directory.path().join("nowhere"), &["top", "--once"]);
    assert_eq!(code, 2, "{complaint}");
    std::fs::write(directory.path().join("x.cuvmm-ledger"), "not a ledger").unwrap();
    let (code, _, complaint) = cuvmm(directory.path(), &["top", "--once"]);
    assert_eq!(code, 2);
    assert!(complaint.contains("is not a usable ledger"), "{complaint}");
}

#[test]
fn top_says_why_a_file_is_no_ledger() {
    let directory = TempDir::new().unwrap();
    let file = directory.path().join("passwd");
    std::fs::write(&file, "root:x:0:0:root:/root:/bin/bash\n".repeat(48)).unwrap();
    let (code, _, complaint) = cuvmm(&file, &["top", "--once"]);
    let shown = file.display();
    let line = format!("cuvmm: {shown} is not a usable ledger: it has 1.5 KiB, and a ledger has ");
    assert!(complaint.starts_with(&line), "{complaint}");
    assert_eq!((code, complaint.lines().count()), (2, 1), "{complaint}");
}

/// Files that end as ledgers do and are none.
#[test]
fn a_file_that_is_no_ledger_hides_no_other() {
    let (device, directory) = (device(), TempDir::new().unwrap());
    let engine = engine(&device, directory.path(), "engine");
    let at = |name: &str| directory.path().join(format!("{name}.cuvmm-ledger"));
    let mut older = std::fs::read(engine.ledger.path()).unwrap();
    // The second word is the version.
    older[8..16].copy_from_slice(&1_u64.to_ne_bytes());
    std::fs::write(at("0-older"), older).unwrap();
    std::fs::write(at("0-empty"), []).unwrap();
    std::os::unix::fs::symlink(engine.ledger.path(), at("0-link")).unwrap();
    std::fs::create_dir(at("0-directory")).unwrap();
    let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
    rustix::fs::mknodat(rustix::fs::CWD, at("0-pipe"), kind, mode, 0).unwrap();
    let commands: [&[&str]; 4] = [
        &["top", "--once"],
        &["top", "--json"],
        &["metrics"],
        &["ctl", "limit", "engine", "500MiB"],
    ];
    for arguments in commands {
        let (code, printed, complaint) = cuvmm(directory.path(), arguments);
        assert_eq!(code, 0, "{arguments:?}: {complaint}");
        assert!(arguments[0] == "ctl" || printed.contains("engine"));
        assert_eq!(complaint.lines().count(), 5, "{complaint}");
        for wrong in ["older", "empty", "link", "directory", "pipe"] {
            assert!(complaint.contains(&format!("0-{wrong}.cuvmm-ledger")));
        }
    }
    let stats = LedgerView::open(engine.ledger.path()).unwrap().stats();
    assert_eq!(stats.processes[0].limit, 500 * MIB);
    let named = at("0-older");
    let (code, _, complaint) = cuvmm(&named, &["top", "--once"]);
    assert_eq!((code, complaint.lines().count()), (2, 1), "{complaint}");
}

#[test]
fn ctl_changes_a_process_and_its_tenants() {
    let (device, directory) = (device(), TempDir::new().unwrap());
    let engine = engine(&device, directory.path(), "engine");
    let block = engine.chat.allocate(100 * MIB).unwrap();
    let at = directory.path();
    assert_eq!(done(at, &["ctl", "limit", "engine/chat", "200MiB"]), "");
    assert_eq!(done(at, &["ctl", "guarantee", "engine/chat", "150MiB"]), "");
    assert_eq!(done(at, &["ctl", "priority", "engine/chat", "-5"]), "");
    let stats = engine.chat.stats();
    assert_eq!((stats.limit, stats.guarantee), (200 * MIB, 150 * MIB));
    assert_eq!(stats.priority, -5);

    let pid = std::process::id().to_string();
    assert_eq!(done(at, &["ctl", "guarantee", "engine/chat", "0"]), "");
    let said = done(at, &["ctl", "limit", &pid, "60MiB"]);
    assert!(
        said.starts_with("40 MiB more than that is still held"),
        "{said}"
    );
    assert_eq!(engine.ledger.stats().processes[0].limit, 60 * MIB);
    drop(block);
    let said = done(at, &["ctl", "trim", "engine"]);
    assert_eq!(said, "gave back 100 MiB\n");
    assert_eq!(engine.ledger.stats().charged, 0);
}

#[test]
fn ctl_says_what_it_cannot_do() {
    let (device, directory) = (device(), TempDir::new().unwrap());
    let at = directory.path();
    let (code, _, complaint) = cuvmm(at, &["ctl", "trim", "engine"]);
    let line = format!("cuvmm: no process uses a ledger in {}\n", at.display());
    assert_eq!((code, complaint), (2, line));
    let one = engine(&device, at, "engine");
    one.chat.set_limit(512 * MIB).unwrap();
    one.chat.set_guarantee(32 * MIB).unwrap();
    one.ledger.set_guarantee(64 * MIB).unwrap();
    let pid = std::process::id();
    for (arguments, expected, wanted) in [
        (
            &["ctl", "trim", "motor"][..],
            2,
            format!(
                "motor is no process and no tenant of one (PROCESS/TENANT); there are engine ({pid})"
            ),
        ),
        (
            &["ctl", "trim", "engine/chat"],
            2,
            "trimmed by process".to_owned(),
        ),
        (
            &["ctl", "limit", "engine/", "1GiB"],
            2,
            "PROCESS/TENANT".to_owned(),
        ),
        (
            &["ctl", "limit", "engine/code", "1GiB"],
            1,
            "no tenant is named \"code\"".to_owned(),
        ),
        (
            &["ctl", "limit", "engine", "0"],
            1,
            "the process refused".to_owned(),
        ),
        (
            &["ctl", "limit", "engine", "10MiB"],
            1,
            "bytes of a process's limit, which is at least its guarantee: 10 MiB is less than the \
             minimum of 64 MiB"
                .to_owned(),
        ),
        (
            &["ctl", "limit", "engine/chat", "10MiB"],
            1,
            "bytes of a tenant's limit, which is at least its guarantee: 10 MiB is less than the \
             minimum of 32 MiB"
                .to_owned(),
        ),
        (
            &["ctl", "guarantee", "engine/chat", "900MiB"],
            1,
            "bytes of a tenant's guarantee, which is at most its limit: 900 MiB is more than the \
             maximum of 512 MiB"
                .to_owned(),
        ),
        (
            &["ctl", "sleep", "engine"],
            1,
            "set no function that puts it to sleep".to_owned(),
        ),
        (
            &["ctl", "limit", "engine", "much"],
            2,
            "a size is a number of bytes".to_owned(),
        ),
    ] {
        let (code, printed, complaint) = cuvmm(at, arguments);
        assert_eq!(
            (code, &*printed),
            (expected, ""),
            "{arguments:?}: {complaint}"
        );
        assert!(complaint.contains(&wanted), "{arguments:?}: {complaint}");
        assert_eq!(complaint.lines().count(), 1, "{complaint}");
    }
    let two = engine(&device, at, "engine");
    let (code, _, complaint) = cuvmm(at, &["ctl", "trim", "engine"]);
    assert_eq!(code, 2);
    let file = one.ledger.path().display();
    let both = format!("engine may be engine@0 in {file}, or engine@1 in {file}: give one");
    assert!(complaint.contains(&both), "{complaint}");
    drop((one, two));
}

#[test]
fn every_process_and_tenant_has_a_name_that_ctl_takes() {
    let (device, directory) = (device(), TempDir::new().unwrap());
    let at = directory.path();
    let limit = |of: &str, size: &str| done(at, &["ctl", "limit", of, size]);
    let llama = "meta-llama/Llama-3";
    let one = engine(&device, at, llama);
    let limits = |engine: &Engine| {
        let processes = engine.ledger.stats().processes;
        let slot = engine.ledger.slot();
        let own = processes.iter().find(|it| it.slot == slot).unwrap();
        (own.limit / MIB, engine.chat.stats().limit / MIB)
    };
    limit(llama, "900MiB");
    limit("meta-llama/Llama-3/chat", "800MiB");
    assert_eq!(limits(&one), (900, 800));

    // Replicas, and all other members of containers of their own, have one name and one number.
    let two = engine(&device, at, llama);
    let three = engine(&device, at, "meta-llama");
    let (file, before) = (one.ledger.path().display(), limits(&one));
    let pid = std::process::id();
    for (of, words) in [
        (
            llama,
            &[
                "meta-llama/Llama-3@0",
                "meta-llama/Llama-3@1",
                "meta-llama@2/Llama-3",
            ][..],
        ),
        (
            "meta-llama/Llama-3/chat",
            &["meta-llama/Llama-3@1/chat", "meta-llama@2/Llama-3/chat"],
        ),
        (&pid.to_string(), &["meta-llama/Llama-3@0", "meta-llama@2"]),
    ] {
        let (code, _, complaint) = cuvmm(at, &["ctl", "limit", of, "1MiB"]);
        assert_eq!(code, 2, "{complaint}");
        for word in words {
            let word = format!("{word} in {file}");
            assert!(complaint.contains(&word), "{word}: {complaint}");
        }
    }
    limit("meta-llama/Llama-3@1", "700MiB");
    limit("meta-llama/Llama-3@1/chat", "600MiB");
    limit("meta-llama@2/chat", "500MiB");
    limit(&format!("{pid}@2"), "400MiB");
    assert_eq!(limits(&one), before);
    assert_eq!(limits(&two), (700, 600));
    assert_eq!(limits(&three), (400, 500));
    assert_eq!(done(at, &["ctl", "trim", "meta-llama"]), "gave back 0 B\n");

    limit("meta-llama/Llama-3@1", "none");
    limit("meta-llama/Llama-3@1/chat", "none");
    let (process, tenant) = limits(&two);
    assert!(
        process == 1024 && tenant > 1024,
        "the ledger's, the device's: {process} {tenant}"
    );
    drop((two, three));
}

#[test]
fn a_tenant_that_is_not_there_is_refused_by_every_verb() {
    let (device, directory) = (device(), TempDir::new().unwrap());
    let calls = Arc::new(AtomicU32::new(0));
    let count = || {
        let calls = Arc::clone(&calls);
        move |_: Option<&str>| {
            calls.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    };
    let ledger = Ledger::builder(&device, directory.path()).limit(1 << 30);
    let ledger = ledger.name("a").on_sleep(count()).on_wake(count());
    let ledger = ledger.open().unwrap();
    let pool = Pool::builder(&device).ledger(&ledger).build().unwrap();
    let chat = pool.tenant("chat").register().unwrap();
    for arguments in [
        &["limit", "a/nope", "1GiB"][..],
        &["guarantee", "a/nope", "0"],
        &["priority", "a/nope", "1"],
        &["sleep", "a/nope"],
        &["wake", "a/nope"],
    ] {
        let arguments = [&["ctl"], arguments].concat();
        let (code, _, complaint) = cuvmm(directory.path(), &arguments);
        assert_eq!(code, 1, "{arguments:?}: {complaint}");
        let wanted = "no tenant is named \"nope\": there are \"chat\"";
        assert!(complaint.contains(wanted), "{arguments:?}: {complaint}");
    }
    let (code, ..) = cuvmm(directory.path(), &["ctl", "trim", "a/nope"]);
    assert_eq!((code, calls.load(Ordering::Relaxed)), (2, 0));
    for word in ["a/chat", "a"] {
        done(directory.path(), &["ctl", "sleep", word]);
    }
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    drop(chat);
}

#[test]
fn a_group_is_put_to_sleep_and_woken_from_outside() {
    let (device, directory) = (device(), TempDir::new().unwrap());
    let asked: Arc<Mutex<Vec<String>>> = Arc::default();
    let group = Arc::new(Group::join(directory.path(), "tp0", 1, None).unwrap());
    let (seen, rank) = (Arc::clone(&asked), Arc::clone(&group));
    let ledger = Ledger::builder(&device, directory.path()).limit(1 << 30);
    let ledger = ledger.on_group(move |it| {
        let verb = if it.wake { "wake" } else { "sleep" };
        seen.lock().unwrap().push(format!("{verb} {:?}", it.tags));
        assert_eq!(it.group, rank.name());
        let entered = rank.enter(verb, it.timeout);
        let entered = entered.map_err(|error| error.to_string())?;
        match it.tags.contains(&"cache".to_owned()) {
            true => Err(entered.fail("no cache").to_string()),
            false => entered.ready().map_err(|error| error.to_string()),
        }
    });
    let ledger = ledger.open().unwrap();
    let at = directory.path();
    done(at, &["ctl", "sleep", "--group", "tp0", "--tag", "weights"]);
    done(at, &["ctl", "wake", "--group", "tp0"]);
    let seen = asked.lock().unwrap().clone();
    assert_eq!(seen, ["sleep [\"weights\"]", "wake []"]);
    let refused = |arguments: &[&str], code: i32, wanted: &str| {
        let (found, _, complaint) = cuvmm(at, &[&["ctl", "sleep"], arguments].concat());
        assert_eq!(found, code, "{arguments:?}: {complaint}");
        assert!(complaint.contains(wanted), "{arguments:?}: {complaint}");
    };
    refused(&["--group", "tp0", "--tag", "cache"], 1, "failed: no cache");
    refused(&["--group", "tp1"], 2, "no group is named tp1 in ");
    refused(&[], 2, "--group");
    refused(&["a", "--group", "tp0"], 2, "--group");
    refused(&["a", "--tag", "weights"], 2, "--tag");
    let other = Group::join(at, "tp2", 2, None).unwrap();
    refused(&["--group", "tp2"], 1, "rank 1 of group tp2 has not joined");
    drop((ledger, other));
    refused(&["--group", "tp0"], 1, "uses no ledger");
}

/// Runs a command without `--ledger`. Returns the exit code, and what it printed and complained.
fn by_default(arguments: &[&str], variable: &str, value: &Path) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    let command = command.args(arguments).env_remove("CUVMM_LEDGER");
    let output = command.env(variable, value).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    (code, text(output.stdout), text(output.stderr))
}

#[test]
fn a_default_folder_that_others_may_use_is_not_trusted() {
    let (device, directory) = (device(), TempDir::new().unwrap());
    let folder = directory.path().join("cuvmm");
    let engine = engine(&device, &folder, "engine");
    let all = [
        &["top", "--once"][..],
        &["top", "--json"],
        &["metrics"],
        &["ctl", "trim", "engine"],
    ];
    let refused = |wanted: &str| {
        for arguments in all {
            let (code, printed, complaint) =
                by_default(arguments, "XDG_RUNTIME_DIR", directory.path());
            assert_eq!((code, &*printed), (1, ""), "{arguments:?}: {complaint}");
            assert!(complaint.contains(wanted), "{arguments:?}: {complaint}");
        }
    };
    let works = || {
        for arguments in all {
            let (code, _, complaint) = by_default(arguments, "XDG_RUNTIME_DIR", directory.path());
            assert_eq!(code, 0, "{arguments:?}: {complaint}");
        }
    };
    works();
    std::fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
    refused("has mode 0755");
    std::fs::set_permissions(&folder, Permissions::from_mode(0o700)).unwrap();
    match chown(&folder, Some(4321), None) {
        Ok(()) => refused("belongs to user 4321"),
        Err(error) => {
            let said = format!("*** NOT TRIED: another user's folder: {error}");
            drop(writeln!(std::io::stderr(), "{said}"));
        }
    }
    let own = rustix::process::geteuid().as_raw();
    chown(&folder, Some(own), None).unwrap();
    works();
    let aside = directory.path().join("aside");
    std::fs::rename(&folder, &aside).unwrap();
    std::os::unix::fs::symlink(&aside, &folder).unwrap();
    refused("is no folder");
    drop(engine);
}

#[test]
fn a_default_folder_without_ledgers_names_the_option_for_another_one() {
    let directory = TempDir::new().unwrap();
    let folder = directory.path().join("cuvmm");
    let there = format!(
        "a ledger in {} (--ledger names another folder)\n",
        folder.display()
    );
    let (code, printed, _) = by_default(&["top", "--once"], "XDG_RUNTIME_DIR", directory.path());
    assert_eq!(
        (code, printed),
        (0, there.replace("a ledger", "there is no ledger"))
    );
    let trim = ["ctl", "trim", "engine"];
    let (code, _, complaint) = by_default(&trim, "XDG_RUNTIME_DIR", directory.path());
    assert_eq!(
        (code, complaint),
        (2, format!("cuvmm: no process uses {there}"))
    );
}

#[test]
fn all_commands_look_where_the_environment_says() {
    let (device, directory) = (device(), TempDir::new().unwrap());
    let engine = engine(&device, directory.path(), "engine");
    for (arguments, wanted) in [
        (&["top", "--once"][..], "| engine"),
        (&["metrics"], "process=\"engine\""),
        (&["ctl", "trim", "engine"], "gave back"),
    ] {
        let (code, printed, complaint) = by_default(arguments, "CUVMM_LEDGER", directory.path());
        assert_eq!(code, 0, "{arguments:?}: {complaint}");
        assert!(printed.contains(wanted), "{printed}");
        let other = [arguments, &["--ledger", "/nowhere"]].concat();
        let (code, ..) = by_default(&other, "CUVMM_LEDGER", directory.path());
        assert_eq!(code, 2, "{other:?}");
    }
    drop(engine);
}
