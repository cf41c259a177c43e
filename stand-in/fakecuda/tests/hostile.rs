//! Every exported function with arguments that make no sense. Each argument is null or a pointer,
//! aligned or not, so that numbers are 0 or very large, and structures of odd values are behind the
//! pointers. The process lives, and the driver answers afterwards.
//!
//! The calls are made in a process of their own, which is this test with a variable set, so that the
//! function that ends it can be named.
//!
//! `unsafe` is allowed here to call functions by their names. Each pointer is null or points to memory of
//! the test, and what the functions must not be given is not (see `SPARED`).
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ffi::c_void;

use libloading::os::unix::Library;

#[path = "../testing/built.rs"]
mod built;
#[path = "../../../crates/cuvmm-model/testing/own_process.rs"]
mod own_process;
#[path = "../src/symbols.rs"]
mod symbols;

use symbols::symbols;

/// The variable that names the library for the process that makes the calls.
const LIBRARY: &str = "HOSTILE_TEST_LIBRARY";

/// The calls of each function.
const CALLS: u32 = 60;

/// The bytes behind a pointer, as words.
const WORDS: usize = 1 << 16;

/// Functions that call what they are given.
const SPARED: &[&str] = &[
    "cuLaunchHostFunc",
    "cuLaunchHostFunc_ptsz",
    "cuStreamAddCallback",
    "cuStreamAddCallback_ptsz",
];

macro_rules! names {
    ($($name:ident $base:ident $since:literal $stream:ident $place:ident)*) => {
        const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}
symbols!(names);

/// A function with as many arguments as any has, each of which fills a register or a place on the stack.
type Function = unsafe extern "C" fn(
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
    u64,
) -> i32;

/// Numbers that look random and are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        ((self.0 >> 33) % end as u64) as usize
    }
}

struct Driver {
    library: Library,
}

impl Driver {
    fn call(&self, name: &str, given: &[u64]) -> i32 {
        let mut a = [0; 16];
        a[..given.len()].copy_from_slice(given);
        // SAFETY: the functions take integers and pointers, and read no more of them than they take.
        let found = unsafe { self.library.get::<Function>(name.as_bytes()) };
        let function = *found.unwrap_or_else(|_| panic!("{name} is not exported"));
        // SAFETY: pointers are null or to memory of the test.
        unsafe {
            function(
                a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12],
                a[13], a[14], a[15],
            )
        }
    }

    /// Makes the primary context of the first device current.
    fn enter(&self) {
        let mut context = 0u64;
        let place = (&raw mut context).expose_provenance() as u64;
        assert_eq!(self.call("cuDevicePrimaryCtxRetain", &[place, 0]), 0);
        assert_eq!(self.call("cuCtxSetCurrent", &[context]), 0);
    }

    /// Allocates, fills, reads and frees.
    fn works(&self) {
        let (mut memory, mut byte) = (0u64, 0u8);
        let place = (&raw mut memory).expose_provenance() as u64;
        let into = (&raw mut byte).expose_provenance() as u64;
        assert_eq!(self.call("cuMemAlloc_v2", &[place, 4096]), 0);
        assert_eq!(self.call("cuMemsetD8_v2", &[memory, 5, 4096]), 0);
        assert_eq!(self.call("cuMemcpyDtoH_v2", &[into, memory, 1]), 0);
        assert_eq!(byte, 5);
        assert_eq!(self.call("cuMemFree_v2", &[memory]), 0);
    }
}

/// Makes the calls. The name of each function is written before its first call.
fn call_all(library: &str) {
    // SAFETY: the stand-in was just built from this workspace.
    let library = unsafe { Library::new(library) }.unwrap();
    let driver = Driver { library };
    assert_eq!(driver.call("cuInit", &[0]), 0);
    driver.enter();
    let mut random = Random(20);
    let mut words = vec![0u64; WORDS];
    let pointer = words.as_mut_ptr().cast::<c_void>().expose_provenance() as u64;
    for name in NAMES.iter().filter(|name| !SPARED.contains(name)) {
        eprintln!("{name}");
        for _ in 0..CALLS {
            driver.enter();
            let (mut memory, mut stream) = (0u64, 0u64);
            let place = (&raw mut memory).expose_provenance() as u64;
            driver.call("cuMemAlloc_v2", &[place, 4096]);
            let place = (&raw mut stream).expose_provenance() as u64;
            driver.call("cuStreamCreate", &[place, 1]);
            let odd = [
                0,
                0,
                0,
                1,
                2,
                3,
                7,
                1 << 32 | 1,
                u64::MAX,
                2 << 20,
                memory,
                stream,
                pointer,
            ];
            for word in &mut words[..64] {
                *word = odd[random.below(odd.len())];
            }
            let arguments = [0; 10].map(|_| [0, pointer, pointer + 1][random.below(3)]);
            driver.call(name, &arguments);
        }
        // What a call left of captures, lost contexts and memory ends here.
        assert_eq!(driver.call("cuDevicePrimaryCtxReset_v2", &[0]), 0);
    }
    driver.enter();
    driver.works();
    eprintln!("done");
}

#[test]
#[ignore = "slow: `.ci/run` runs it"]
fn no_argument_ends_the_process() {
    if let Some(library) = std::env::var_os(LIBRARY) {
        return call_all(library.to_str().unwrap());
    }
    let directory = tempfile::tempdir().unwrap();
    let library = built::fakecuda_in(directory.path());
    for manner in ["measured", "hostile"] {
        let output = own_process::only("no_argument_ends_the_process")
            .env(LIBRARY, &library)
            .env("FAKECUDA_CAPACITY", "1GiB")
            .env("FAKECUDA_MANNER", manner)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        let last: Vec<_> = text.lines().rev().take(12).collect();
        assert!(
            output.status.success(),
            "{manner}: {} {last:?}",
            output.status
        );
        assert!(text.contains("\ndone\n"), "{manner}: {last:?}");
    }
}
