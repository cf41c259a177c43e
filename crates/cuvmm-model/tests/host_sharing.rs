//! Sharing between two real processes: this process exports, and runs its own program again to
//! import.
//!
//! `unsafe` because the driver's methods are.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod model_support;
#[path = "../testing/own_process.rs"]
mod own_process;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use cuvmm_driver::{Driver, Exported, HandleTypes, ImportSource, PhysicalProps};
use cuvmm_model::host::{HostDriver, HostOptions};
use model_support::*;
use rustix::fs::{FlockOperation, fcntl_lock, flock};

const FD: HandleTypes = HandleTypes::POSIX_FD;

/// The second process. Does nothing when it runs as one of the tests.
#[test]
fn taker() {
    let Ok(descriptor) = std::env::var("CUVMM_TEST_DESCRIPTOR") else {
        return;
    };
    let descriptor: i32 = descriptor.parse().unwrap();
    let d = host(HostOptions::new());
    let mut line = String::new();
    unsafe {
        let handle = d.import(ImportSource::Fd(descriptor), FD).unwrap();
        let va = d.reserve(2 * PAGE, 0, ANYWHERE, 0).unwrap();
        d.map(va, 2 * PAGE, 0, handle, 0).unwrap();
        d.set_access(va, 2 * PAGE, &[rw(D0)]).unwrap();
        assert_eq!(first_byte(&d, at(va, PAGE)), 17, "the giver's bytes");
        d.fill(D0, va, 42, PAGE).unwrap();
        assert_eq!(code(d.export(handle, FD, 0)), INVALID_VALUE);
        println!("\nwritten");
        // The exporting process has released everything and closed its descriptors before it sends
        // the next line.
        std::io::stdin().lock().read_line(&mut line).unwrap();
        assert_eq!(first_byte(&d, at(va, PAGE)), 17);
        println!("\nstill there");
        std::io::stdin().lock().read_line(&mut line).unwrap();
    }
}

#[test]
fn memory_lives_in_two_processes() {
    let d = host(HostOptions::new());
    let props = PhysicalProps {
        handle_types: FD,
        ..PhysicalProps::device(D0)
    };
    let handle = d.create(2 * PAGE, &props, 0).unwrap();
    let va = d.reserve(2 * PAGE, 0, ANYWHERE, 0).unwrap();
    unsafe {
        d.map(va, 2 * PAGE, 0, handle, 0).unwrap();
        d.set_access(va, 2 * PAGE, &[rw(D0)]).unwrap();
        d.fill(D0, va, 17, 2 * PAGE).unwrap();
    }
    let Exported::Fd(fd) = unsafe { d.export(handle, FD, 0) }.unwrap() else {
        panic!("a descriptor")
    };
    // A duplicate without close-on-exec, which the other process inherits.
    let inherited = rustix::io::dup(&fd).unwrap();
    let mut taker = own_process::only("taker")
        .env("CUVMM_TEST_DESCRIPTOR", inherited.as_raw_fd().to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    drop(inherited);
    drop(fd);
    let mut lines = BufReader::new(taker.stdout.take().unwrap()).lines();
    let mut heard = |word: &str| {
        let found = lines
            .by_ref()
            .map_while(Result::ok)
            .any(|line| line == word);
        assert!(found, "the other process ended before it said: {word}");
    };
    heard("written");
    assert_eq!(first_byte(&d, va), 42);
    unsafe {
        d.unmap(va, 2 * PAGE).unwrap();
        d.release(handle).unwrap();
    }
    assert_eq!(d.live().exported_only, 1, "the other process holds it");
    assert_eq!(d.memory_info(D0).unwrap().free, 4 * GIB - 2 * PAGE);
    let mut orders = taker.stdin.take().unwrap();
    orders.write_all(b"look\n").unwrap();
    heard("still there");
    orders.write_all(b"end\n").unwrap();
    assert!(taker.wait().unwrap().success());
    assert_eq!(
        d.memory_info(D0).unwrap().free,
        4 * GIB,
        "it ended, and all is back"
    );
}

/// Tests every lock that a process can take on a received descriptor.
#[test]
fn a_process_that_locks_what_it_was_handed_holds_up_no_call() {
    let d = Arc::new(host(HostOptions::new()));
    let props = PhysicalProps {
        handle_types: FD,
        ..PhysicalProps::device(D0)
    };
    let handle = d.create(PAGE, &props, 0).unwrap();
    let export = move |d: &HostDriver| match unsafe { d.export(handle, FD, 0) }.unwrap() {
        Exported::Fd(fd) => fd,
        other => panic!("{other:?}"),
    };
    let locked = export(&d);
    flock(&locked, FlockOperation::LockExclusive).unwrap();
    fcntl_lock(&locked, FlockOperation::LockExclusive).unwrap();
    let (sender, receiver) = channel();
    let giver = Arc::clone(&d);
    // On its own thread, because a call that hangs would hang the test.
    spawn(move || {
        let given = export(&giver);
        unsafe { giver.release(handle) }.unwrap();
        drop(sender.send(given));
    });
    let given = receiver.recv_timeout(Duration::from_secs(30)).unwrap();
    assert_eq!(d.live().exported_only, 1);
    drop((locked, given));
    // A process that another test starts has all descriptors too, until it executes its own
    // program.
    let begun = Instant::now();
    while d.live().exported_only > 0 && begun.elapsed() < Duration::from_secs(30) {
        sleep(Duration::from_millis(1));
    }
    assert_eq!(d.live().exported_only, 0);
    assert_eq!(d.memory_info(D0).unwrap().free, 4 * GIB);
}
