//! Memory of the model that passes to another process as a Win32 handle.
//!
//! `unsafe` is allowed here because the driver's methods and the system's calls are unsafe.
#![cfg(windows)]
#![allow(unsafe_code, clippy::unwrap_used)]

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::windows::io::AsRawHandle as _;
use std::process::{Command, Stdio};
use std::ptr;

use cuvmm_driver::{DeviceAddress, Driver, HandleTypes, ImportSource, Ordinal, PhysicalProps};
use cuvmm_model::model::{ModelDriver, ModelOptions};
use windows_sys::Win32::Foundation::{DUPLICATE_SAME_ACCESS, DuplicateHandle};
use windows_sys::Win32::System::Threading::GetCurrentProcess;

const DEVICE: Ordinal = Ordinal(0);
const SIZE: u64 = 6 << 20;
const TOTAL: u64 = 1 << 30;
/// Set in the process that imports.
const IMPORTS: &str = "CUVMM_TEST_IMPORTS";
/// The word that it prints then.
const IMPORTED: &str = "imported";

fn model() -> ModelDriver {
    ModelDriver::new(ModelOptions::new().capacity(TOTAL))
}

/// The other process: imports the handle that the first line of its input names, and holds it until its
/// input ends.
#[test]
fn the_importing_process() {
    if std::env::var_os(IMPORTS).is_none() {
        return;
    }
    let mut lines = std::io::stdin().lines();
    let handle: usize = lines.next().unwrap().unwrap().parse().unwrap();
    let driver = model();
    let source = ImportSource::Win32(ptr::without_provenance_mut(handle));
    // SAFETY: the process that started this one has made the handle, and nothing closes it.
    let physical = unsafe { driver.import(source, HandleTypes::WIN32) }.unwrap();
    assert_eq!(driver.live().physical_bytes, SIZE);
    let at = driver.reserve(SIZE, 0, DeviceAddress::NULL, 0).unwrap();
    // SAFETY: the range was just reserved, and the handle is alive.
    unsafe { driver.map(at, SIZE, 0, physical, 0) }.unwrap();
    println!("{IMPORTED}");
    assert!(lines.next().is_none());
}

#[test]
fn a_handle_in_another_process_is_imported_there_and_keeps_the_memory() {
    let driver = model();
    let free = || driver.memory_info(DEVICE).unwrap().free;
    let mut props = PhysicalProps::device(DEVICE);
    props.handle_types = HandleTypes::WIN32;
    let physical = driver.create(SIZE, &props, 0).unwrap();
    // SAFETY: the handle is alive.
    let exported = unsafe { driver.export(physical, HandleTypes::WIN32, 0) }.unwrap();

    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_importing_process", "--nocapture"])
        .env(IMPORTS, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut theirs = ptr::null_mut();
    let ours = exported.as_source().os_handle().unwrap();
    // SAFETY: both processes and the handle are open, and the result is written to a local.
    let given = unsafe {
        let (from, to) = (GetCurrentProcess(), child.as_raw_handle());
        DuplicateHandle(from, ours, to, &mut theirs, 0, 0, DUPLICATE_SAME_ACCESS)
    };
    assert_ne!(given, 0);
    let mut input = child.stdin.take().unwrap();
    writeln!(input, "{}", theirs.addr()).unwrap();
    let said = BufReader::new(child.stdout.take().unwrap()).lines();
    let said: Vec<String> = {
        let until = |line: &std::io::Result<String>| !line.as_ref().unwrap().ends_with(IMPORTED);
        let mut said = said;
        let mut lines: Vec<_> = said
            .by_ref()
            .take_while(until)
            .map(Result::unwrap)
            .collect();
        drop(exported);
        // SAFETY: the handle is released once.
        unsafe { driver.release(physical) }.unwrap();
        assert_eq!(free(), TOTAL - SIZE, "the other process has the memory");
        drop(input);
        lines.extend(said.map(Result::unwrap));
        lines
    };
    assert!(child.wait().unwrap().success(), "{said:?}");
    assert_eq!(free(), TOTAL);
    assert!(driver.live().is_nothing());
}
