//! Runs a test case in a process whose loader finds the stand-in for libcuda, and counts what the
//! case leaves behind.
//!
//! `unsafe` is used to load the stand-in, which the process has loaded already, and to call its
//! functions for tests.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::sync::Mutex;
use std::time::Duration;

use cudarc::driver::CudaStream;

#[path = "../../../../stand-in/fakecuda/testing/built.rs"]
mod built;
#[path = "../../../../crates/cuvmm-model/testing/own_process.rs"]
mod own_process;

/// Printed by the process when its case has completed.
const ENDED: &str = "the case has completed";

/// How long a case may take.
const LONGEST: Duration = Duration::from_secs(60);

/// The kinds of objects that the stand-in counts.
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

/// The kinds of objects that the case may leave behind.
static LEFT: Mutex<BTreeSet<&str>> = Mutex::new(BTreeSet::new());

/// The libraries that the loader finds.
#[derive(PartialEq)]
pub enum Library {
    /// The stand-in under both names.
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
    let mut command = own_process::only(test);
    command
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

/// Ends the process if it hangs: a failed case may leave a stream held back.
pub fn watch() {
    std::thread::spawn(|| {
        std::thread::sleep(LONGEST);
        eprintln!("the case did not complete within {LONGEST:?}");
        std::process::abort();
    });
}

/// Reports that the case has completed.
pub fn ended() {
    println!("{ENDED}");
}

/// Reports that the case has completed, and checks that everything was returned to the driver.
pub fn ended_with_nothing_left() {
    let left = LEFT.lock().unwrap();
    for (what, count) in COUNTED.iter().zip(live()) {
        assert_eq!(count > 0, left.contains(what), "{what}: {count}");
    }
    ended();
}

/// Declares what the case leaves behind.
pub fn leaks(what: &[&'static str]) {
    LEFT.lock().unwrap().extend(what);
}

/// Returns a function that only the stand-in has.
fn function<F: Copy>(name: &str) -> F {
    // SAFETY: the stand-in is loaded already, and keeps the driver's contract.
    let library = unsafe { libloading::Library::new("libcuda.so.1") }.unwrap();
    // SAFETY: the callers name the function's type. The library stays loaded, because both
    // libraries under test load it for the life of the process.
    unsafe { *library.get::<F>(name).unwrap() }
}

/// Returns the stand-in's counts, in the order of `COUNTED`.
pub fn live() -> [u64; 8] {
    let ask = function::<unsafe extern "C" fn(*mut [u64; 8]) -> i32>("fakecuda_live");
    let mut counts = [0; 8];
    // SAFETY: the function writes the counts to a local array of the right size.
    assert_eq!(unsafe { ask(&mut counts) }, 0);
    counts
}

/// Holds back the stream's next work.
pub fn hold(stream: &CudaStream) {
    set_held(stream, true);
}

/// Lets held-back work run.
pub fn release(stream: &CudaStream) {
    set_held(stream, false);
}

fn set_held(stream: &CudaStream, held: bool) {
    stream.context().bind_to_thread().unwrap();
    let set = function::<unsafe extern "C" fn(*mut c_void, bool) -> i32>("fakecuda_hold");
    // SAFETY: the stream is alive.
    assert_eq!(unsafe { set(stream.cu_stream().cast(), held) }, 0);
}

/// Loses the context, as a faulting kernel does.
pub fn lose_the_context() {
    let lose = function::<unsafe extern "C" fn() -> i32>("fakecuda_lose");
    // SAFETY: the function takes no pointers.
    assert_eq!(unsafe { lose() }, 0);
}

/// Defines tests that run over the stand-in, each in a process of its own.
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
            #[ignore = "needs the stand-in; `over_the_stand_in` runs it in a process of its own"]
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

/// Defines tests over the stand-in from cases that also run on a GPU.
macro_rules! cases_on_stand_in {
    ($($name:ident),+ $(,)?) => {
        stand_in::on_stand_in! {
            $(fn $name() { cases::$name(); })+
        }
    };
}
pub(crate) use cases_on_stand_in;
