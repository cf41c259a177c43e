//! Running a case in a process whose loader finds the stand-in for libcuda, and counting what it left.
//!
//! `unsafe` here: loading the stand-in, which the process has loaded already, and calling what it has
//! for tests.
#![allow(
    unsafe_code,
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic
)]

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use cudarc::driver::CudaStream;

#[path = "../../../fakecuda/testing/built.rs"]
mod built;

/// What the process says when it has come to its end.
const ENDED: &str = "the case has come to its end";

/// How long a case may take.
const LONGEST: Duration = Duration::from_secs(60);

/// What the stand-in counts.
const COUNTED: [&str; 8] = [
    "reservations",
    "physicals",
    "mappings",
    "allocations",
    "streams",
    "events",
    "queued",
    "retained",
];

/// What the case said it leaves behind.
static LEFT: Mutex<BTreeSet<&str>> = Mutex::new(BTreeSet::new());

/// What the loader finds.
#[derive(PartialEq)]
pub enum Library {
    /// The stand-in by both of its names.
    Once,
    /// A copy of the stand-in for each name.
    Twice,
}

/// Runs a test of this program over the stand-in.
pub fn run(test: &str, library: Library) {
    let folder = tempfile::tempdir().unwrap();
    let stand_in = built::fakecuda_in(folder.path());
    let second = folder.path().join("libcuda.so");
    match library {
        Library::Once => std::os::unix::fs::symlink(&stand_in, second).unwrap(),
        Library::Twice => drop(std::fs::copy(&stand_in, second).unwrap()),
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--ignored", "--exact", "--nocapture", test])
        .env("LD_LIBRARY_PATH", folder.path())
        .env("FAKECUDA_DEVICES", "2")
        .env("FAKECUDA_CAPACITY", (1_u64 << 30).to_string());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.contains(ENDED),
        "{}\n{said}\n{complained}",
        output.status
    );
}

/// Ends the process if it hangs: a case that fails may leave a stream held back.
pub fn watch() {
    std::thread::spawn(|| {
        std::thread::sleep(LONGEST);
        eprintln!("the case has not come to its end in {LONGEST:?}");
        std::process::abort();
    });
}

/// The process has come to its end.
pub fn ended() {
    println!("{ENDED}");
}

/// The same, and everything that was had from the driver has been given back.
pub fn ended_with_nothing_left() {
    let left = LEFT.lock().unwrap();
    for (what, count) in COUNTED.iter().zip(live()) {
        assert_eq!(count > 0, left.contains(what), "{what}: {count}");
    }
    ended();
}

/// The case leaves these behind, and says why.
pub fn leaks(what: &[&'static str]) {
    LEFT.lock().unwrap().extend(what);
}

/// A function of the stand-in's own.
fn function<F: Copy>(name: &str) -> F {
    // SAFETY: the stand-in is loaded already, and keeps the promises of the driver.
    let library = unsafe { libloading::Library::new("libcuda.so.1") }.unwrap();
    // SAFETY: the callers give the type that the function has; the library stays, as it is loaded for
    // good by both libraries that this is about.
    unsafe { *library.get::<F>(name).unwrap() }
}

/// How many of each there are.
pub fn live() -> [u64; 8] {
    let ask = function::<unsafe extern "C" fn(*mut [u64; 8]) -> i32>("fakecuda_live");
    let mut counts = [0; 8];
    // SAFETY: the result goes to a local.
    assert_eq!(unsafe { ask(&mut counts) }, 0);
    counts
}

/// What the stream has next waits.
pub fn hold(stream: &CudaStream) {
    set_held(stream, true);
}

/// What waited runs now.
pub fn let_go(stream: &CudaStream) {
    set_held(stream, false);
}

fn set_held(stream: &CudaStream, held: bool) {
    stream.context().bind_to_thread().unwrap();
    let set = function::<unsafe extern "C" fn(*mut c_void, bool) -> i32>("fakecuda_hold");
    // SAFETY: the stream is alive.
    assert_eq!(unsafe { set(stream.cu_stream().cast(), held) }, 0);
}

/// As a kernel that faults would.
pub fn lose_the_context() {
    let lose = function::<unsafe extern "C" fn() -> i32>("fakecuda_lose");
    // SAFETY: it takes no pointers.
    assert_eq!(unsafe { lose() }, 0);
}

/// Tests that run in a process of their own, over the stand-in.
macro_rules! on_stand_in {
    ($($(#[$meta:meta])* fn $name:ident() $body:block)+) => {$(
        mod $name {
            use super::*;

            $(#[$meta])*
            #[test]
            fn over_the_stand_in() {
                let test = concat!(stringify!($name), "::in_a_process_of_its_own");
                stand_in::run(test, stand_in::Library::Once);
            }

            #[test]
            #[ignore = "wants the stand-in; `over_the_stand_in` runs it in a process of its own"]
            fn in_a_process_of_its_own() {
                fn case() $body
                stand_in::watch();
                case();
                stand_in::ended_with_nothing_left();
            }
        }
    )+};
}
pub(crate) use on_stand_in;

/// The same with cases that run on a GPU too.
macro_rules! cases_on_stand_in {
    ($($name:ident),+ $(,)?) => {
        stand_in::on_stand_in! {
            $(fn $name() { cases::$name(); })+
        }
    };
}
pub(crate) use cases_on_stand_in;
