//! Asking a library, and writing the answer of a case.

use std::fmt::Display;
use std::io::Write as _;
use std::process::Command;

use cuvmm_driver::CUresult;

use super::library::{Library, at};

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
    /// The first device's primary context, once [`enter`](Self::enter) has retained it.
    pub(crate) primary: u64,
}

impl Asker {
    pub(crate) fn new(library: Library, name: &str, case: &'static str, given: &str) -> Self {
        Self {
            library,
            name: name.to_owned(),
            given: given.to_owned(),
            case,
            open: false,
            primary: 0,
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

    pub(crate) fn end(&mut self) {
        if std::mem::take(&mut self.open) {
            print("\n");
        }
    }

    pub(crate) fn note(&mut self, word: impl Display) {
        if !self.open {
            self.part("");
        }
        print(format_args!("{word} "));
    }

    pub(crate) fn call(&self, name: &str, arguments: &[u64]) -> Option<CUresult> {
        self.library.call(name, arguments)
    }

    /// Calls a function and adds its code to the answer. Returns `true` on success.
    pub(crate) fn say(&mut self, name: &str, arguments: &[u64]) -> bool {
        let code = self.call(name, arguments);
        self.code(code);
        code == Some(CUresult::CUDA_SUCCESS)
    }

    /// Begins a line of the answer, calls a function and adds its code.
    pub(crate) fn ask(&mut self, part: impl Display, name: &str, arguments: &[u64]) {
        self.part(part);
        self.say(name, arguments);
    }

    /// Asks functions, each in a line that is named after it.
    pub(crate) fn ask_each(&mut self, calls: &[(&str, &[u64])]) {
        for (name, arguments) in calls {
            self.ask(name, name, arguments);
        }
    }

    /// Calls a function that writes its result to its first argument, adds its code, and returns
    /// the result, which is `value` if the function writes none.
    pub(crate) fn get<T>(&mut self, name: &str, mut value: T, rest: &[u64]) -> T {
        self.say(name, &[&[at(&mut value)], rest].concat());
        value
    }

    /// Adds the result of [`get`](Self::get) to the answer too.
    pub(crate) fn tell<T: Display>(&mut self, name: &str, value: T, rest: &[u64]) {
        let value = self.get(name, value, rest);
        self.note(value);
    }

    /// Calls a function that writes its result to its last argument, as [`get`](Self::get) does.
    pub(crate) fn get_last<T>(&mut self, name: &str, first: &[u64], mut value: T) -> T {
        self.say(name, &[first, &[at(&mut value)]].concat());
        value
    }

    /// Adds the result of [`get_last`](Self::get_last) to the answer too.
    pub(crate) fn tell_last<T: Display>(&mut self, name: &str, first: &[u64], value: T) {
        let value = self.get_last(name, first, value);
        self.note(value);
    }

    /// Calls a function that has to succeed, and returns the result that it writes to its first
    /// argument.
    pub(crate) fn made(&mut self, name: &str, rest: &[u64]) -> u64 {
        let mut made = 0u64;
        self.need(name, &[&[at(&mut made)], rest].concat());
        made
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
    pub(crate) fn enter(&mut self) {
        self.need("cuInit", &[0]);
        self.primary = self.made("cuDevicePrimaryCtxRetain", &[0]);
        self.need("cuCtxSetCurrent", &[self.primary]);
    }

    /// Makes a context of the first device, which is then current.
    pub(crate) fn context(&mut self) -> u64 {
        self.made("cuCtxCreate_v2", &[0, 0])
    }

    /// Returns the second device's primary context. Where there is one device, the answer is that.
    pub(crate) fn peer(&mut self) -> Option<u64> {
        if self.made("cuDeviceGetCount", &[]) < 2 {
            self.note("one-device");
            return None;
        }
        Some(self.made("cuDevicePrimaryCtxRetain", &[1]))
    }

    pub(crate) fn alloc(&mut self, bytes: u64) -> u64 {
        self.made("cuMemAlloc_v2", &[bytes])
    }

    /// Allocates from the current pool on the default stream.
    pub(crate) fn alloc_async(&mut self, bytes: u64) -> u64 {
        self.made("cuMemAllocAsync", &[bytes, 0])
    }

    /// Allocates managed memory that every stream may use.
    pub(crate) fn managed(&mut self, bytes: u64) -> u64 {
        self.made("cuMemAllocManaged", &[bytes, 1])
    }

    pub(crate) fn pinned(&mut self, bytes: u64, flags: u64) -> u64 {
        self.made("cuMemHostAlloc", &[bytes, flags])
    }

    pub(crate) fn stream(&mut self) -> u64 {
        self.made("cuStreamCreate", &[1])
    }

    pub(crate) fn event(&mut self, flags: u64) -> u64 {
        self.made("cuEventCreate", &[flags])
    }

    pub(crate) fn reserve(&mut self, bytes: u64) -> u64 {
        self.made("cuMemAddressReserve", &[bytes, 0, 0, 0])
    }

    pub(crate) fn default_pool(&mut self) -> u64 {
        self.made("cuDeviceGetDefaultMemPool", &[0])
    }

    /// Creates a physical of one granule with these properties, and adds the code to the answer.
    pub(crate) fn create(&mut self, mut props: [u32; 8]) -> u64 {
        self.get("cuMemCreate", 0, &[GRANULE, at(&mut props), 0])
    }

    pub(crate) fn physical(&mut self) -> u64 {
        self.made("cuMemCreate", &[GRANULE, at(&mut props()), 0])
    }

    /// Reserves addresses and maps a granule at the first.
    pub(crate) fn mapping(&mut self, open: bool) -> u64 {
        let address = self.reserve(GRANULE);
        self.map(address, open);
        address
    }

    /// Gives the first device access to a granule: 1 to read, 3 also to write.
    pub(crate) fn grant(&mut self, address: u64, flags: u32) {
        let mut access = [1u32, 0, flags];
        self.need("cuMemSetAccess", &[address, GRANULE, at(&mut access), 1]);
    }

    /// Adds the code of asking which kind of memory an address has.
    pub(crate) fn say_kind(&mut self, address: u64) {
        self.get("cuPointerGetAttribute", 0u32, &[2, address]);
    }

    /// Returns the first address and the size of the range that contains an address, and adds the code.
    pub(crate) fn range(&mut self, address: u64) -> (u64, u64) {
        let (mut base, mut size) = (0u64, 0u64);
        let arguments = [at(&mut base), at(&mut size), address];
        self.say("cuMemGetAddressRange_v2", &arguments);
        (base, size)
    }

    pub(crate) fn first_byte(&mut self, address: u64) -> u8 {
        let mut byte = [77u8];
        self.need("cuMemcpyDtoH_v2", &[at(&mut byte), address, 1]);
        byte[0]
    }

    /// Maps a new physical at an address, with or without access for the first device.
    pub(crate) fn map(&mut self, address: u64, open: bool) {
        let handle = self.physical();
        self.need("cuMemMap", &[address, GRANULE, 0, handle, 0]);
        if open {
            self.grant(address, 3);
        }
    }

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

/// Returns the largest power of two, up to a granule, that an address is a multiple of.
pub(crate) fn alignment(address: u64) -> u64 {
    1 << address.trailing_zeros().min(21)
}

/// Returns a word for a result that was 7 before the call; `other` for any address or handle.
pub(crate) fn written(value: u64, other: &'static str) -> &'static str {
    match value {
        7 => "unwritten",
        0 => "null",
        _ => other,
    }
}

/// Returns a number of bytes in words: zero, whole granules, or less than one.
pub(crate) fn granules(bytes: u64) -> String {
    match bytes {
        0 => "0".to_owned(),
        bytes if bytes.is_multiple_of(GRANULE) => format!("{}x2MiB", bytes / GRANULE),
        bytes => format!("{bytes}B"),
    }
}
