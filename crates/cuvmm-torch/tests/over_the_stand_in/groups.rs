//! Tags of several processes sleep and wake together, over the stand-in for libcuda.
//!
//! `unsafe` is used to call the library's functions.

use std::ffi::{CString, c_char, c_int};
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::common::tags::Tags;
use crate::common::{Cuda, MIB, over_the_stand_in, refused};
use cuvmm::LedgerView;
use cuvmm::ledger::{Control, GroupRequest};

/// The variable with the directory of the group, for its second rank.
const SECOND: &str = "CUVMM_TESTS_SECOND";

/// Printed by the second rank before it waits to be killed.
const READY: &str = "the second rank is ready";

/// Milliseconds, longer than a test runs.
const LONG: u64 = 600_000;

/// A rank of a group, and its functions.
struct Rank {
    tags: Tags,
    token: u64,
    sleep: unsafe extern "C" fn(u64, *const c_char, c_int, u64) -> c_int,
    wake: unsafe extern "C" fn(u64, *const c_char, u64) -> c_int,
    leave: unsafe extern "C" fn(u64),
}

impl Rank {
    fn join(json: &str) -> Result<Self, String> {
        let tags = Tags::load();
        let join: unsafe extern "C" fn(*const c_char, *mut u64) -> c_int =
            tags.torch.function("cuvmm_group_join");
        let (json, mut token) = (CString::new(json).unwrap(), 0);
        // SAFETY: the text is terminated, and the number is written.
        tags.outcome(unsafe { join(json.as_ptr(), &raw mut token) })?;
        Ok(Self {
            token,
            sleep: tags.torch.function("cuvmm_group_sleep"),
            wake: tags.torch.function("cuvmm_group_wake"),
            leave: tags.torch.function("cuvmm_group_leave"),
            tags,
        })
    }

    fn in_directory(directory: &Path, ranks: u32) -> Self {
        let json = serde_json::json!({ "name": "tp0", "ranks": ranks, "directory": directory });
        Self::join(&json.to_string()).unwrap()
    }

    fn sleep(&self, tags: &str, keep: c_int, timeout: u64) -> Result<(), String> {
        let tags = CString::new(tags).unwrap();
        // SAFETY: the text is terminated, and the tests do not use memory that sleeps.
        let code = unsafe { (self.sleep)(self.token, tags.as_ptr(), keep, timeout) };
        self.tags.outcome(code)
    }

    fn wake(&self, tags: &str, timeout: u64) -> Result<(), String> {
        let tags = CString::new(tags).unwrap();
        // SAFETY: the text is terminated.
        let code = unsafe { (self.wake)(self.token, tags.as_ptr(), timeout) };
        self.tags.outcome(code)
    }

    /// Returns the figures of the group, as JSON.
    fn figures(&self) -> Option<serde_json::Value> {
        let write: unsafe extern "C" fn(u64, *mut c_char, usize) -> usize =
            self.tags.torch.function("cuvmm_group");
        let mut text = [0_u8; 512];
        // SAFETY: the buffer has this number of bytes.
        let length = unsafe { write(self.token, text.as_mut_ptr().cast(), text.len()) };
        serde_json::from_slice(&text[..length.saturating_sub(1)]).ok()
    }
}

/// Memory of a tag with contents, which ranks check.
struct Weights {
    cuda: Cuda,
    address: usize,
    value: u8,
}

impl Weights {
    fn new(tags: &Tags, value: u8) -> Self {
        let (cuda, address) = (Cuda::load(), tags.allocate("weights", 20));
        let stream = cuda.stream();
        cuda.fill(address, value, 20 * MIB, stream);
        cuda.synchronize(stream);
        Self {
            cuda,
            address,
            value,
        }
    }

    fn are_there(&self) {
        self.cuda.expect(self.address, self.value, 20 * MIB);
    }
}

over_the_stand_in! {
    tags_of_two_processes_sleep_and_wake_in_both_or_in_none [] says [] {
        let directory = tempfile::tempdir().unwrap();
        let first = Rank::in_directory(directory.path(), 2);
        let weights = Weights::new(&first.tags, 1);
        first.tags.keep(weights.address, 4 * MIB).unwrap();
        let awake = weights.cuda.physicals_and_mappings();
        let mut second = crate::common::own_process::only("groups::second::in_a_process_of_its_own")
            .env(SECOND, directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let pid = second.id();
        first.sleep(r#"["weights"]"#, 1, LONG).unwrap();
        assert_eq!(weights.cuda.physicals_and_mappings(), (0, 0));
        assert_eq!(first.tags.asleep(), r#"["weights"]"#);
        first.wake("null", LONG).unwrap();
        weights.are_there();
        // The other rank's tag is asleep already.
        for keep in [1, 0] {
            let error = first.sleep(r#"["weights"]"#, keep, LONG).unwrap_err();
            let reason = "failed: the tag \"weights\" is asleep";
            assert!(error.ends_with(reason) && error.contains(&format!("process {pid}")), "{error}");
            assert_eq!(first.tags.asleep(), "[]");
            assert_eq!(weights.cuda.physicals_and_mappings(), awake);
            weights.are_there();
        }
        // This rank's own error is that of its program, and the other one shows it.
        let error = first.sleep(r#"["cache"]"#, 1, LONG).unwrap_err();
        assert_eq!(error, "no memory was allocated under the tag \"cache\": there are \"weights\"");
        // The other rank's memory is awake already when all are to wake.
        first.sleep("null", 1, LONG).unwrap();
        let error = first.wake(r#"["weights"]"#, LONG).unwrap_err();
        assert!(error.ends_with("failed: the tag \"weights\" is awake"), "{error}");
        assert_eq!(first.tags.asleep(), r#"["weights"]"#);
        assert_eq!(weights.cuda.physicals_and_mappings(), (0, 0));
        first.tags.wake("null").unwrap();
        weights.are_there();

        let mut said = BufReader::new(second.stdout.take().unwrap()).lines();
        assert!(said.any(|line| line.unwrap().contains(READY)), "the second rank has ended");
        second.kill().unwrap();
        second.wait().unwrap();
        let error = first.sleep("null", 1, LONG).unwrap_err();
        let reason = format!("rank 1 (process {pid}) has ended");
        assert!(error.ends_with(&reason), "{error}");
        weights.are_there();
    }

    second [] says [] {
        let Some(directory) = std::env::var_os(SECOND) else {
            return;
        };
        let rank = Rank::in_directory(directory.as_ref(), 2);
        let weights = Weights::new(&rank.tags, 2);
        rank.sleep(r#"["weights"]"#, 1, LONG).unwrap();
        rank.wake("null", LONG).unwrap();
        weights.are_there();
        rank.tags.sleep(r#"["weights"]"#, true).unwrap();
        for keep in [1, 0] {
            let error = rank.sleep(r#"["weights"]"#, keep, LONG).unwrap_err();
            assert_eq!(error, "the tag \"weights\" is asleep");
        }
        rank.tags.wake("null").unwrap();
        weights.are_there();
        let cache = rank.tags.allocate("cache", 4);
        let error = rank.sleep(r#"["cache"]"#, 1, LONG).unwrap_err();
        let reason = "failed: no memory was allocated under the tag \"cache\": there are \"weights\"";
        assert!(error.ends_with(reason), "{error}");
        assert_eq!(rank.tags.asleep(), "[]");
        rank.tags.free(cache);
        rank.sleep("null", 1, LONG).unwrap();
        rank.tags.wake("null").unwrap();
        assert!(rank.wake(r#"["weights"]"#, LONG).is_err());
        weights.are_there();
        println!("{READY}");
        // Until the other process has killed this one.
        let _ = std::io::stdin().read_line(&mut String::new());
    }

    what_cannot_be_is_refused [] says [] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let join = |json: serde_json::Value| Rank::join(&json.to_string()).map(drop);
        let rank = Rank::in_directory(path, 2);
        let figures = rank.figures().unwrap();
        let file = path.join("tp0.cuvmm-group");
        let expected = serde_json::json!({ "name": "tp0", "rank": 0, "ranks": 2, "path": file });
        assert_eq!(figures, expected);
        refused(join(serde_json::json!({ "name": "a/b", "ranks": 1, "directory": path })), "a/b");
        refused(join(serde_json::json!({ "name": "tp0", "ranks": 3, "directory": path })), "2 ranks");
        refused(join(serde_json::json!({ "name": "tp0", "ranks": 2, "rank": 0, "directory": path })), "taken");
        refused(join(serde_json::json!({ "name": "tp0" })), "JSON");
        let error = rank.sleep("null", 1, 0).unwrap_err();
        assert!(error.ends_with("rank 1 had not joined in time"), "{error}");
        let error = rank.sleep("null", 3, 0).unwrap_err();
        assert!(error.starts_with("keep is 3"), "{error}");
        // SAFETY: it may be called at any time.
        unsafe { (rank.leave)(rank.token) };
        assert!(rank.figures().is_none());
        refused(rank.wake("null", 0), "in no group");
        assert!(Rank::in_directory(path, 1).figures().is_some(), "all had left");
    }

    marks_and_the_timeout_are_those_of_sleep_and_wake ["CUVMM_TORCH_LIMIT" = "64MiB"] says [] {
        let directory = tempfile::tempdir().unwrap();
        let rank = Rank::in_directory(directory.path(), 1);
        let weights = Weights::new(&rank.tags, 1);
        let (tags, cuda) = (&rank.tags, &weights.cuda);
        tags.keep(weights.address, 4 * MIB).unwrap();
        let (stream, awake) = (cuda.stream(), cuda.physicals_and_mappings());
        cuda.hold(stream, true);
        cuda.fill(weights.address, 1, 20 * MIB, stream);
        refused(rank.sleep("null", 0, 0), "work may use 1 block");
        assert_eq!((tags.asleep().as_str(), cuda.physicals_and_mappings()), ("[]", awake));
        cuda.hold(stream, false);
        cuda.synchronize(stream);
        weights.are_there();
        rank.sleep("null", 0, LONG).unwrap();
        let other = tags.torch.mib(60, stream);
        refused(rank.wake("null", 0), "cannot wake 20 MiB");
        assert_eq!(tags.asleep(), r#"["weights"]"#);
        tags.torch.free(other, stream);
        cuda.synchronize(stream);
        rank.wake("null", LONG).unwrap();
        cuda.expect(weights.address, 1, 4 * MIB);
        cuda.expect(weights.address + 4 * MIB, 0, 16 * MIB);
    }

    what_stays_asleep_of_an_undone_operation_is_told [] says [] {
        let directory = tempfile::tempdir().unwrap();
        let first = Rank::in_directory(directory.path(), 2);
        let weights = Weights::new(&first.tags, 1);
        let second = cuvmm::Group::join(directory.path(), "tp0", 2, None).unwrap();
        // Names of tags may contain anything, so they are quoted.
        let operation = r#"sleep ["weights"] keep"#;
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                let entered = second.enter(operation, Duration::from_millis(LONG)).unwrap();
                // When the first rank is ready.
                while weights.cuda.physicals_and_mappings().1 > 0 {
                    std::thread::yield_now();
                }
                weights.cuda.fail(Some("cuMemMap:1-"));
                drop(entered.fail("no memory"));
            });
            first.sleep(r#"["weights"]"#, 1, LONG).unwrap_err()
        });
        weights.cuda.fail(None);
        let own = std::process::id();
        let undone = format!("has undone {operation:?}: rank 1 (process {own}) failed: no memory; ");
        assert!(error.contains(&undone), "{error}");
        let stayed = r#"the tag "weights" of device 0: an error has left 1 block (20 MiB) asleep"#;
        assert!(error.contains(stayed), "{error}");
        assert_eq!(first.tags.asleep(), r#"["weights"]"#);
        first.tags.wake("null").unwrap();
        weights.are_there();
    }

    another_program_asks_a_group [] says [] {
        let directory = tempfile::tempdir().unwrap();
        let tags = Tags::load();
        let configure: unsafe extern "C" fn(*const c_char) -> c_int =
            tags.torch.function("cuvmm_configure");
        let json = serde_json::json!({ "ledger": directory.path() }).to_string();
        let json = CString::new(json).unwrap();
        // SAFETY: the text is terminated.
        tags.outcome(unsafe { configure(json.as_ptr()) }).unwrap();
        let weights = Weights::new(&tags, 1);
        let mut files = std::fs::read_dir(directory.path()).unwrap().map(|file| file.unwrap().path());
        let ledger = files.find(|path| path.extension() == Some("cuvmm-ledger".as_ref()));
        let view = LedgerView::open(ledger.unwrap()).unwrap();
        let ranks = [view.control(view.stats().processes[0].slot)];
        let ask = |wake, tags: &[&str]| {
            let tags = tags.iter().map(|&tag| tag.to_owned()).collect();
            let request = GroupRequest::new("tp0", wake).tags(tags);
            let answer = Control::group(&ranks, &request).pop().unwrap();
            answer.map_err(|error| error.to_string())
        };
        refused(ask(false, &[]), "the process has joined no group");
        // The directory is that of the ledger.
        let rank = Rank::join(r#"{"name": "tp0", "ranks": 1}"#).unwrap();
        assert!(directory.path().join("tp0.cuvmm-group").exists());
        ask(false, &["weights"]).unwrap();
        assert_eq!(tags.asleep(), r#"["weights"]"#);
        refused(ask(false, &["cache"]), "\"cache\"");
        ask(true, &[]).unwrap();
        weights.are_there();
        // A group of this name in another directory.
        let elsewhere = tempfile::tempdir().unwrap();
        let other = Rank::in_directory(elsewhere.path(), 1);
        refused(ask(false, &[]), "several groups named \"tp0\"");
        for directory in [&directory, &elsewhere] {
            let path = directory.path().join("tp0.cuvmm-group");
            refused(ask(false, &[]), path.to_str().unwrap());
        }
        assert_eq!(tags.asleep(), "[]");
        // SAFETY: it may be called at any time.
        unsafe { (other.leave)(other.token) };
        ask(false, &[]).unwrap();
        ask(true, &[]).unwrap();
        // SAFETY: it may be called at any time.
        unsafe { (rank.leave)(rank.token) };
        refused(ask(true, &[]), "in no group named \"tp0\"");
    }
}
