//! A ledger's file with arbitrary contents: opening it fails with an error that names the fault, or
//! it is used like any other, and no call panics or waits forever.

#![no_main]

#[path = "../../../tests/cuvmm-tests/tests/ledger_contents_support/mod.rs"]
mod ledger_contents_support;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let folder = ledger_contents_support::folder();
    let directory = folder.join(format!("cuvmm-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    ledger_contents_support::survive(&directory, bytes);
});
