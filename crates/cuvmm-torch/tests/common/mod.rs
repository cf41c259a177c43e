//! Runs a case in a process whose loader finds the stand-in for libcuda, and gives the case the
//! functions of both libraries.
//!
//! `unsafe` is used to load the two libraries and to call their C functions. The addresses and
//! streams that are passed came from them.
#![allow(unsafe_code, dead_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::ptr::null_mut;
use std::time::Duration;

use libloading::Library;

#[path = "../../../../stand-in/fakecuda/testing/built.rs"]
mod built;
pub(crate) mod graphs;
#[path = "../../../cuvmm-model/testing/own_process.rs"]
pub(crate) mod own_process;
pub(crate) mod paged;
pub(crate) mod sharing;
pub(crate) mod tags;

pub(crate) const MIB: usize = 1 << 20;

/// Printed by the process when its case has completed.
pub(crate) const ENDED: &str = "the case has completed";

/// How long a case may take.
const LONGEST: Duration = Duration::from_secs(120);

/// Runs a case of this program, named by its path with the program's name, over the stand-in, which has
/// two devices of 256 MiB. Returns the lines that the library printed on standard error.
pub(crate) fn run(case: &str, variables: &[(&str, &str)]) -> Vec<String> {
    let (_, case) = case.split_once("::").unwrap();
    let Output {
        status,
        stdout,
        stderr,
    } = {
        let folder = tempfile::tempdir().unwrap();
        built::fakecuda_in(folder.path());
        let mut command = own_process::only(case);
        command
            .env("LD_LIBRARY_PATH", folder.path())
            .env("FAKECUDA_DEVICES", "2")
            .env("FAKECUDA_CAPACITY", (256 * MIB).to_string());
        for name in [
            "LIMIT",
            "PRESET",
            "ALIASES",
            "STREAM_WAITS",
            "MAPPER",
            "RDMA",
        ] {
            command.env_remove(format!("CUVMM_TORCH_{name}"));
        }
        command.envs(variables.iter().copied()).output().unwrap()
    };
    let (said, complained) = (
        String::from_utf8_lossy(&stdout),
        String::from_utf8_lossy(&stderr),
    );
    assert!(
        status.success() && said.contains(ENDED),
        "{case}: {status}\n{said}\n{complained}"
    );
    let lines = complained.lines();
    lines
        .filter(|line| line.starts_with("cuvmm: "))
        .map(str::to_owned)
        .collect()
}

/// Runs a case over a driver that can refuse calls. Returns `None` where there is no compiler.
pub(crate) fn run_refusing(case: &str, variables: &[(&str, &str)]) -> Option<Vec<String>> {
    let folder = tempfile::tempdir().unwrap();
    refusing_in(folder.path()).then(|| {
        let path = ("LD_LIBRARY_PATH", folder.path().to_str().unwrap());
        run(case, &[&[path], variables].concat())
    })
}

/// Runs the body of a case, in its own process.
pub(crate) fn case(body: impl FnOnce()) {
    std::thread::spawn(|| {
        std::thread::sleep(LONGEST);
        eprintln!("the case did not complete within {LONGEST:?}");
        std::process::abort();
    });
    body();
    println!("{ENDED}");
}

/// Asserts that an error's text contains another.
pub(crate) fn refused<T: std::fmt::Debug>(outcome: Result<T, String>, text: &str) {
    let error = outcome.unwrap_err();
    assert!(error.contains(text), "{error}");
}

/// Defines tests that run over the stand-in, each case in a process of its own, with the environment
/// variables and the lines that it expects on standard error. A line contains the expected text.
macro_rules! over_the_stand_in {
    ($($name:ident [$($variable:literal = $value:literal),*] says [$($text:literal),* $(,)?] $body:block)+) => {$(
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            #[test]
            fn over_the_stand_in() {
                let case = concat!(module_path!(), "::in_a_process_of_its_own");
                let lines = crate::common::run(case, &[$(($variable, $value)),*]);
                let expected: &[&str] = &[$($text),*];
                assert_eq!(lines.len(), expected.len(), "{lines:#?}");
                for (line, text) in lines.iter().zip(expected) {
                    assert!(line.contains(text), "{line}\nlacks: {text}");
                }
            }

            #[test]
            #[ignore = "needs the stand-in; `over_the_stand_in` runs it in a process of its own"]
            fn in_a_process_of_its_own() {
                crate::common::case(|| $body);
            }
        }
    )+};
}
pub(crate) use over_the_stand_in;

/// A stream's handle.
pub(crate) type Handle = *mut c_void;

/// Returns the handle of the legacy default stream (0 or 1) or of the per-thread one (2).
pub(crate) fn default_stream(number: usize) -> Handle {
    std::ptr::without_provenance_mut(number)
}

fn function<F: Copy>(library: &'static Library, name: &str) -> F {
    // SAFETY: the callers name the function's type. The library stays loaded.
    unsafe { *library.get::<F>(name).expect(name) }
}

fn load(path: PathBuf) -> &'static Library {
    // SAFETY: both libraries have no code that runs when they are loaded.
    let library = unsafe { Library::new(&path) }.expect("the library can be loaded");
    Box::leak(Box::new(library))
}

/// Runs `body` in a forked child, and returns its exit code.
pub(crate) fn in_a_child(body: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child only runs `body`, which takes no lock that another thread could hold, and
    // ends without running what is registered for the exit.
    match unsafe { libc::fork() } {
        0 => {
            let code = body();
            // SAFETY: it ends the child.
            unsafe { libc::_exit(code) }
        }
        child => {
            let mut status = 0;
            // SAFETY: the status is written to a local.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert!(libc::WIFEXITED(status), "status {status:#x}");
            libc::WEXITSTATUS(status)
        }
    }
}
/// Defines tests as `over_the_stand_in` does, over a driver that can refuse calls. They print nothing
/// on standard error, and do nothing where there is no compiler.
#[allow(unused_macros)]
macro_rules! over_a_driver_that_refuses {
    ($(#[$text:meta])* $name:ident $body:block) => {
        $(#[$text])*
        mod $name {
            use super::*;

            #[test]
            fn over_the_stand_in() {
                let case = concat!(module_path!(), "::in_a_process_of_its_own");
                let lines = crate::common::run_refusing(case, &[]).unwrap_or_default();
                assert!(lines.is_empty(), "{lines:#?}");
            }

            #[test]
            #[ignore = "needs the stand-in; `over_the_stand_in` runs it in a process of its own"]
            fn in_a_process_of_its_own() {
                crate::common::case(|| $body);
            }
        }
    };
}
#[allow(unused_imports)]
pub(crate) use over_a_driver_that_refuses;

/// The functions that PyTorch calls.
#[derive(Clone, Copy)]
pub(crate) struct Torch {
    malloc: unsafe extern "C" fn(isize, c_int, Handle) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void, isize, c_int, Handle),
    record: unsafe extern "C" fn(*mut c_void, Handle),
    reset: unsafe extern "C" fn(),
    stats: Text,
    library: &'static Library,
}

/// A function that writes a text about a device.
pub(crate) type Text = unsafe extern "C" fn(c_int, *mut c_char, usize) -> usize;

impl Torch {
    /// Loads the shared library, which cargo puts beside this program.
    pub(crate) fn load() -> Self {
        let program = std::env::current_exe().unwrap();
        let library = load(program.parent().unwrap().join("libcuvmm_torch.so"));
        Self {
            malloc: function(library, "cuvmm_malloc"),
            free: function(library, "cuvmm_free"),
            record: function(library, "cuvmm_record_stream"),
            reset: function(library, "cuvmm_reset"),
            stats: function(library, "cuvmm_stats"),
            library,
        }
    }

    /// Returns a function of the library, whose type the caller names.
    pub(crate) fn function<F: Copy>(&self, name: &str) -> F {
        function(self.library, name)
    }

    /// Returns the thread's last error.
    pub(crate) fn last_error(&self) -> String {
        let ask: unsafe extern "C" fn(*mut c_char, usize) -> usize =
            self.function("cuvmm_last_error");
        let mut text = vec![0_u8; 4096];
        // SAFETY: the buffer has the length that is passed.
        let length = unsafe { ask(text.as_mut_ptr().cast(), text.len()) };
        text.truncate(length - 1);
        String::from_utf8(text).unwrap()
    }

    /// Returns what a function writes about device 0.
    pub(crate) fn text(&self, name: &str) -> String {
        self.written(self.function(name), 0)
    }

    /// Returns a number of the JSON that a function writes about device 0, at a path with dots.
    pub(crate) fn number(&self, name: &str, path: &str) -> u64 {
        let json: serde_json::Value = serde_json::from_str(&self.text(name)).unwrap();
        let found = path.split('.').fold(&json, |json, key| &json[key]);
        found.as_u64().expect(path)
    }

    /// Allocates on device 0. Returns 0 for null.
    pub(crate) fn malloc(&self, size: isize, stream: Handle) -> usize {
        self.malloc_on(0, size, stream)
    }

    pub(crate) fn malloc_on(&self, device: c_int, size: isize, stream: Handle) -> usize {
        // SAFETY: the tests pass live streams of the device.
        unsafe { (self.malloc)(size, device, stream) }.addr()
    }

    /// Allocates some MiB on device 0.
    pub(crate) fn mib(&self, mib: usize, stream: Handle) -> usize {
        let address = self.malloc(isize::try_from(mib * MIB).unwrap(), stream);
        assert_ne!(address, 0);
        address
    }

    /// Frees on device 0.
    pub(crate) fn free(&self, address: usize, stream: Handle) {
        self.free_on(0, address, stream);
    }

    /// Frees memory that is said to be of a device.
    pub(crate) fn free_on(&self, device: c_int, address: usize, stream: Handle) {
        // SAFETY: the tests do not use memory that they have freed.
        unsafe { (self.free)(std::ptr::without_provenance_mut(address), 0, device, stream) };
    }

    pub(crate) fn record(&self, address: usize, stream: Handle) {
        // SAFETY: the tests pass live streams of the device.
        unsafe { (self.record)(std::ptr::without_provenance_mut(address), stream) };
    }

    pub(crate) fn reset(&self) {
        // SAFETY: it takes no arguments.
        unsafe { (self.reset)() };
    }

    /// Returns the JSON of a device's figures; nothing if it has no heap.
    pub(crate) fn json(&self, device: c_int) -> String {
        self.written(self.stats, device)
    }

    fn written(&self, write: Text, device: c_int) -> String {
        // The text may be longer or shorter at each call if another thread allocates.
        let texts = std::iter::repeat_with(|| written(write, device));
        texts
            .take(1000)
            .flatten()
            .next()
            .expect("the length settles")
    }

    /// Returns a number of device 0's figures.
    pub(crate) fn figure(&self, name: &str) -> u64 {
        self.figure_of(0, name)
    }

    pub(crate) fn figure_of(&self, device: c_int, name: &str) -> u64 {
        let json: serde_json::Value = serde_json::from_str(&self.json(device)).unwrap();
        let value = json.get(name).or_else(|| json["heap"].get(name));
        value.and_then(serde_json::Value::as_u64).expect(name)
    }
}

/// Returns the text that a function writes, and checks that it writes nothing into a buffer that is too
/// short. Returns `None` if the length changed between the calls.
fn written(write: Text, device: c_int) -> Option<String> {
    // SAFETY: nothing is written to a null buffer.
    let needed = unsafe { write(device, null_mut(), 0) };
    let mut buffer = vec![b'?'; needed];
    // SAFETY: the buffer has the length that is passed.
    let again = unsafe { write(device, buffer.as_mut_ptr().cast(), needed) };
    if again != needed {
        return None;
    }
    if needed > 0 {
        assert_eq!(buffer.pop(), Some(0));
        let mut short = vec![b'?'; needed - 1];
        // SAFETY: the buffer has the length that is passed.
        let asked = unsafe { write(device, short.as_mut_ptr().cast(), needed - 1) };
        if asked != needed {
            return None;
        }
        assert!(short.iter().all(|&byte| byte == b'?'), "written in part");
    }
    Some(String::from_utf8(buffer).unwrap())
}

/// Compiles a C++ file of the tests into a shared library that is linked with others. Returns its
/// path; `None`, after saying so, where there is no compiler.
pub(crate) fn compiled(
    folder: &std::path::Path,
    source: &str,
    name: &str,
    options: &[&str],
) -> Option<PathBuf> {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/cxx")
        .join(source);
    let library = folder.join(name);
    let mut compiler = Command::new("g++");
    compiler.args(["-std=c++17", "-O1", "-shared", "-fPIC", "-o"]);
    compiler.arg(&library).arg(source).args(options);
    match compiler.output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{said}");
            Some(library)
        }
        Err(error) => {
            println!("exceptions of C++ were not tried: g++ cannot be started: {error}");
            None
        }
    }
}

/// Puts a library that can refuse calls in the place of libcuda, in a folder. Returns `false` where
/// there is no compiler.
fn refusing_in(folder: &std::path::Path) -> bool {
    let all = folder.join("all");
    std::fs::create_dir(&all).unwrap();
    // Under its own name the loader would take the library that refuses for it.
    let mut bytes = std::fs::read(built::fakecuda_in(&all)).unwrap();
    let (own, other) = (b"libcuda.so.1\0", b"libcuda.so.0\0");
    let named = |bytes: &[u8]| bytes.windows(own.len()).position(|name| name == own);
    while let Some(at) = named(&bytes) {
        bytes[at..at + other.len()].copy_from_slice(other);
    }
    let stand_in = all.join("libcuda.so.0");
    std::fs::write(&stand_in, bytes).unwrap();
    let stand_in = stand_in.into_os_string().into_string().unwrap();
    let beside = format!("-Wl,-rpath,{}", all.to_str().unwrap());
    // A library that asks for this one must not find the other.
    compiled(
        folder,
        "refuse.cpp",
        "libcuda.so.1",
        &["-Wl,--no-as-needed", &beside, &stand_in, "-ldl"],
    )
    .is_some()
}

/// Makes the two complaints of the case of filters where there is no compiler.
pub(crate) fn complain_twice(torch: &Torch) {
    let end: unsafe extern "C" fn(c_int, [u64; 2]) = torch.function("cuvmm_end_allocate_to_pool");
    let release: unsafe extern "C" fn(c_int, [u64; 2]) = torch.function("cuvmm_release_pool");
    // SAFETY: they may be called at any time.
    unsafe {
        end(0, [4, 5]);
        release(0, [6, 0]);
    }
}

/// Loads a shared library and never unloads it.
pub(crate) fn loaded(path: PathBuf) -> &'static Library {
    load(path)
}

/// The functions of the driver that a program with kernels would use.
#[derive(Clone, Copy)]
pub(crate) struct Cuda {
    current: unsafe extern "C" fn(*mut c_void) -> c_int,
    context: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int,
    stream: unsafe extern "C" fn(*mut Handle, u32) -> c_int,
    synchronize: unsafe extern "C" fn(Handle) -> c_int,
    fill: unsafe extern "C" fn(u64, u8, usize, Handle) -> c_int,
    read: unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int,
    hold: unsafe extern "C" fn(Handle, bool) -> c_int,
    lose: unsafe extern "C" fn() -> c_int,
    live: unsafe extern "C" fn(*mut [u64; 8]) -> c_int,
    begin: unsafe extern "C" fn(Handle, c_int) -> c_int,
    end: unsafe extern "C" fn(Handle, *mut Handle) -> c_int,
    instantiate: unsafe extern "C" fn(*mut Handle, Handle, u64) -> c_int,
    launch: unsafe extern "C" fn(Handle, Handle) -> c_int,
    library: &'static Library,
}

impl Cuda {
    /// Loads the stand-in, initializes it, and makes the context of device 0 current.
    pub(crate) fn load() -> Self {
        let library = load(PathBuf::from("libcuda.so.1"));
        let init: unsafe extern "C" fn(u32) -> c_int = function(library, "cuInit");
        // SAFETY: it may be called at any time.
        assert_eq!(unsafe { init(0) }, 0);
        let cuda = Self {
            current: function(library, "cuCtxSetCurrent"),
            context: function(library, "cuDevicePrimaryCtxRetain"),
            stream: function(library, "cuStreamCreate"),
            synchronize: function(library, "cuStreamSynchronize"),
            fill: function(library, "cuMemsetD8Async"),
            read: function(library, "cuMemcpyDtoH_v2"),
            hold: function(library, "fakecuda_hold"),
            lose: function(library, "fakecuda_lose"),
            live: function(library, "fakecuda_live"),
            begin: function(library, "cuStreamBeginCapture_v2"),
            end: function(library, "cuStreamEndCapture"),
            instantiate: function(library, "cuGraphInstantiateWithFlags"),
            launch: function(library, "cuGraphLaunch"),
            library,
        };
        cuda.enter(0);
        cuda
    }

    /// Returns a function of the library, whose type the caller names.
    pub(crate) fn function<F: Copy>(&self, name: &str) -> F {
        function(self.library, name)
    }

    /// Makes the primary context of a device current on this thread.
    pub(crate) fn enter(&self, device: c_int) {
        let mut context = null_mut();
        // SAFETY: the result is written to a local.
        assert_eq!(unsafe { (self.context)(&mut context, device) }, 0);
        // SAFETY: the context was just retained, and is never released.
        assert_eq!(unsafe { (self.current)(context) }, 0);
    }

    /// Creates a stream of the current device.
    pub(crate) fn stream(&self) -> Handle {
        let mut stream = null_mut();
        // SAFETY: the result is written to a local.
        assert_eq!(unsafe { (self.stream)(&mut stream, 1) }, 0);
        stream
    }

    pub(crate) fn synchronize(&self, stream: Handle) {
        // SAFETY: the tests pass live streams.
        assert_eq!(unsafe { (self.synchronize)(stream) }, 0);
    }

    /// Queues a fill on a stream.
    pub(crate) fn fill(&self, address: usize, byte: u8, size: usize, stream: Handle) {
        // SAFETY: the tests fill memory that they have allocated.
        let code = unsafe { (self.fill)(address as u64, byte, size, stream) };
        assert_eq!(code, 0);
    }

    /// Fills ranges, each with an own value from 1 on, and waits for that.
    pub(crate) fn fill_all(&self, ranges: &[(usize, usize)]) {
        for (&(address, size), byte) in ranges.iter().zip(1..) {
            self.fill(address, byte, size, null_mut());
        }
        self.synchronize(null_mut());
    }

    /// Asserts that all bytes of a range have a value.
    pub(crate) fn expect(&self, address: usize, byte: u8, size: usize) {
        let mut bytes = vec![!byte; size];
        // SAFETY: the buffer has the length that is passed.
        let code = unsafe { (self.read)(bytes.as_mut_ptr().cast(), address as u64, size) };
        assert_eq!(code, 0);
        let wrong = bytes.iter().position(|&found| found != byte);
        assert_eq!(wrong, None, "of {size} bytes at {address:#x}");
    }

    /// Captures what `body` queues on a stream, in global mode. Returns the executable graph.
    pub(crate) fn capture(&self, stream: Handle, body: impl FnOnce()) -> Handle {
        let (mut graph, mut executable) = (null_mut(), null_mut());
        // SAFETY: the tests pass live streams, and the results are written to locals.
        unsafe {
            assert_eq!((self.begin)(stream, 0), 0);
            body();
            assert_eq!((self.end)(stream, &mut graph), 0);
            assert_eq!((self.instantiate)(&mut executable, graph, 0), 0);
        }
        executable
    }

    /// Queues a graph on a stream.
    pub(crate) fn launch(&self, executable: Handle, stream: Handle) {
        // SAFETY: the tests pass live graphs and streams.
        assert_eq!(unsafe { (self.launch)(executable, stream) }, 0);
    }

    /// Holds a stream's next work back, or lets it run.
    pub(crate) fn hold(&self, stream: Handle, held: bool) {
        // SAFETY: the tests pass live streams.
        assert_eq!(unsafe { (self.hold)(stream, held) }, 0);
    }

    /// Lets a stream's work run, on another thread.
    pub(crate) fn let_go<'a>(&'a self, stream: Handle, scope: &'a std::thread::Scope<'a, '_>) {
        let handle = stream.expose_provenance();
        scope.spawn(move || {
            self.enter(0);
            self.hold(std::ptr::with_exposed_provenance_mut(handle), false);
        });
    }

    /// Makes calls fail, such as `cuMemMap:1-`, or no more calls.
    pub(crate) fn fail(&self, faults: Option<&str>) {
        let fail: unsafe extern "C" fn(*const c_char) -> c_int = self.function("fakecuda_fail");
        let faults = faults.map(|faults| CString::new(faults).unwrap());
        let text = faults
            .as_ref()
            .map_or(std::ptr::null(), |text| text.as_ptr());
        // SAFETY: the text is null or terminated.
        assert_eq!(unsafe { fail(text) }, 0);
    }

    /// Loses the current context, as a faulting kernel does.
    pub(crate) fn lose(&self) {
        // SAFETY: it takes no arguments.
        assert_eq!(unsafe { (self.lose)() }, 0);
    }

    /// Returns the number of live physicals and of live mappings.
    pub(crate) fn physicals_and_mappings(&self) -> (u64, u64) {
        let mut counts = [0; 8];
        // SAFETY: the counts are written to a local array of the right size.
        assert_eq!(unsafe { (self.live)(&mut counts) }, 0);
        (counts[1], counts[2])
    }
}
