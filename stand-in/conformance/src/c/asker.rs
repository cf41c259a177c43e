//! Asking a library, and writing the answer of a case.

use std::fmt::Display;
use std::io::Write as _;
use std::process::Command;

use cuvmm_driver::CUresult;

use super::library::{Library, at};

/// The bytes of a granule.
pub(crate) const GRANULE: u64 = 2 << 20;

/// Asks a library, and prints the answer as it comes, so that nothing is lost if the process dies.
#[derive(Debug)]
pub(crate) struct Asker {
    pub(crate) library: Library,
    name: String,
    /// The text that another case gave to this one when it started its process.
    pub(crate) given: String,
    case: &'static str,
    open: bool,
}

impl Asker {
    pub(crate) fn new(library: Library, name: &str, case: &'static str, given: &str) -> Self {
        Self {
            library,
            name: name.to_owned(),
            given: given.to_owned(),
            case,
            open: false,
        }
    }

    /// Begins a line of the answer, named after the case and `part`.
    pub(crate) fn part(&mut self, part: impl Display) {
        self.end();
        let part = part.to_string();
        let dot = if part.is_empty() { "" } else { "." };
        print(format_args!("{}{dot}{part}\t", self.case));
        self.open = true;
    }

    /// Ends the line, if one is open.
    pub(crate) fn end(&mut self) {
        if std::mem::take(&mut self.open) {
            print("\n");
        }
    }

    /// Adds a word to the answer.
    pub(crate) fn note(&mut self, word: impl Display) {
        if !self.open {
            self.part("");
        }
        print(format_args!("{word} "));
    }

    /// Calls a function without adding its code to the answer.
    pub(crate) fn call(&self, name: &str, arguments: &[u64]) -> Option<CUresult> {
        self.library.call(name, arguments)
    }

    /// Calls a function and adds its code to the answer. Returns `true` on success.
    pub(crate) fn say(&mut self, name: &str, arguments: &[u64]) -> bool {
        let code = self.call(name, arguments);
        self.code(code);
        code == Some(CUresult::CUDA_SUCCESS)
    }

    /// Calls a function that has to succeed. If it does not, its name and code become part of the
    /// answer.
    pub(crate) fn need(&mut self, name: &str, arguments: &[u64]) {
        let code = self.call(name, arguments);
        if code != Some(CUresult::CUDA_SUCCESS) {
            self.note(format_args!("({name}"));
            self.code(code);
            self.note(")");
        }
    }

    /// Adds a code to the answer.
    pub(crate) fn code(&mut self, code: Option<CUresult>) {
        let Some(code) = code else {
            return self.note("absent");
        };
        match code.name() {
            Some(name) => self.note(
                name.trim_start_matches("CUDA_")
                    .trim_start_matches("ERROR_"),
            ),
            None => self.note(code.0),
        }
    }

    /// Initializes the driver and makes the primary context of the first device current.
    pub(crate) fn enter(&mut self) -> u64 {
        self.need("cuInit", &[0]);
        let mut context = 0u64;
        self.need("cuDevicePrimaryCtxRetain", &[at(&mut context), 0]);
        self.need("cuCtxSetCurrent", &[context]);
        context
    }

    /// Returns the number of devices.
    pub(crate) fn devices(&mut self) -> i32 {
        let mut count = 0i32;
        self.need("cuDeviceGetCount", &[at(&mut count)]);
        count
    }

    /// Allocates plain device memory.
    pub(crate) fn alloc(&mut self, bytes: u64) -> u64 {
        let mut address = 0u64;
        self.need("cuMemAlloc_v2", &[at(&mut address), bytes]);
        address
    }

    /// Allocates from the current pool on the default stream.
    pub(crate) fn alloc_async(&mut self, bytes: u64) -> u64 {
        let mut address = 0u64;
        self.need("cuMemAllocAsync", &[at(&mut address), bytes, 0]);
        address
    }

    /// Allocates pinned host memory.
    pub(crate) fn pinned(&mut self, bytes: u64, flags: u64) -> u64 {
        let mut address = 0u64;
        self.need("cuMemHostAlloc", &[at(&mut address), bytes, flags]);
        address
    }

    /// Creates a stream.
    pub(crate) fn stream(&mut self) -> u64 {
        let mut stream = 0u64;
        self.need("cuStreamCreate", &[at(&mut stream), 1]);
        stream
    }

    /// Creates an event.
    pub(crate) fn event(&mut self, flags: u64) -> u64 {
        let mut event = 0u64;
        self.need("cuEventCreate", &[at(&mut event), flags]);
        event
    }

    /// Reserves addresses.
    pub(crate) fn reserve(&mut self, bytes: u64) -> u64 {
        let mut address = 0u64;
        self.need("cuMemAddressReserve", &[at(&mut address), bytes, 0, 0, 0]);
        address
    }

    /// Creates a physical of one granule.
    pub(crate) fn physical(&mut self) -> u64 {
        let mut handle = 0u64;
        let mut props = props();
        self.need(
            "cuMemCreate",
            &[at(&mut handle), GRANULE, at(&mut props), 0],
        );
        handle
    }

    /// Maps a new physical at an address, with or without access for the first device.
    pub(crate) fn map(&mut self, address: u64, open: bool) {
        let handle = self.physical();
        self.need("cuMemMap", &[address, GRANULE, 0, handle, 0]);
        if open {
            let mut access = [1u32, 0, 3];
            self.need("cuMemSetAccess", &[address, GRANULE, at(&mut access), 1]);
        }
    }

    /// Returns the free memory of the current context's device.
    pub(crate) fn free(&mut self) -> u64 {
        let (mut free, mut total) = (0u64, 0u64);
        self.need("cuMemGetInfo_v2", &[at(&mut free), at(&mut total)]);
        free
    }

    /// Runs another case in a process of its own, gives it a text, and adds its answer to this one.
    pub(crate) fn other_process(&mut self, case: &str, given: &str) {
        let Ok(program) = std::env::current_exe() else {
            return self.note("no-program");
        };
        let output = Command::new(program)
            .args(["--library", &self.name, "--case", case, "--given", given])
            .output();
        match output {
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                let said = text.trim().split_once('\t').map_or("", |(_, said)| said);
                self.note(format_args!("[{}]", said.trim()));
                if !output.status.success() {
                    self.note(format_args!("[{}]", output.status));
                }
            }
            Err(error) => self.note(error),
        }
    }
}

fn print(text: impl Display) {
    let mut out = std::io::stdout();
    // Nothing can be done about a parent that has gone.
    let _ = write!(out, "{text}");
    let _ = out.flush();
}

/// Returns the properties of ordinary memory of the first device, as the C structure's words.
pub(crate) fn props() -> [u32; 8] {
    [1, 0, 1, 0, 0, 0, 0, 0]
}

/// Returns a number of bytes in words: zero, whole granules, or less than one.
pub(crate) fn granules(bytes: u64) -> String {
    match bytes {
        0 => "0".to_owned(),
        bytes if bytes.is_multiple_of(GRANULE) => format!("{}x2MiB", bytes / GRANULE),
        bytes => format!("{bytes}B"),
    }
}
